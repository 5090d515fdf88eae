"""The stubs of the Cython modules say what the binaries have: names, arguments, defaults."""

from __future__ import annotations

import ast
import importlib
import inspect
import pathlib

import pytest

import mpicoll

CORE = pathlib.Path(mpicoll.__file__).parent / "_core"
MODULES = sorted(path.stem for path in CORE.glob("*.pyx"))

Arguments = list[tuple[str, str | None]]  # name and default
Names = dict[str, object]  # a function's arguments, "property", or the names of a class


def _arguments(node: ast.FunctionDef) -> Arguments:
    """Names and defaults of a function; constants are compared by value, the rest by name."""
    names = [argument.arg for argument in node.args.args]
    defaults: list[str | None] = [None] * (len(names) - len(node.args.defaults))
    defaults += [ast.unparse(default) for default in node.args.defaults]
    return list(zip(names, defaults, strict=True))


def _stub_names(body: list[ast.stmt]) -> Names:
    names: Names = {}
    for node in body:
        if isinstance(node, ast.FunctionDef):
            is_property = any(ast.unparse(d) == "property" for d in node.decorator_list)
            names[node.name] = "property" if is_property else _arguments(node)
        elif isinstance(node, ast.ClassDef):
            names[node.name] = _stub_names(node.body)
    return names


def _signature(owner: object, function: object) -> Arguments:
    """What Cython embedded: ``module.name(int op, x=None)``, C types and all."""
    line = (function.__doc__ or "").splitlines()[0]
    inside = line[line.index("(") + 1 : line.rindex(")")]
    found: Arguments = []
    for part in filter(None, (p.strip() for p in inside.split(","))):
        name, _, default = part.partition("=")
        found.append((name.split()[-1], default or None))
    return [(name, _constant(owner, default)) for name, default in found]


def _constant(owner: object, default: str | None) -> str | None:
    """A C constant, which has no name in Python, as its value."""
    return {"USER": "0"}.get(default or "", default)


def _binary_names(module: object) -> Names:
    names: Names = {}
    for name, value in vars(module).items():
        if name.startswith("_"):
            continue
        if isinstance(value, type) and value.__module__ == module.__name__:
            names[name] = _class_names(module, value)
        elif type(value).__name__ == "cython_function_or_method":
            names[name] = _signature(module, value)
    return names


def _class_names(module: object, kind: type) -> Names:
    names: Names = {}
    for name, value in vars(kind).items():
        if name.startswith("_"):
            continue
        if inspect.isgetsetdescriptor(value) or inspect.ismemberdescriptor(value):
            names[name] = "property"
        elif callable(value):
            names[name] = _signature(module, value)
    first = (kind.__doc__ or "").splitlines()[0]
    if first.startswith(f"{kind.__name__}("):  # made by calling it
        names["__init__"] = [("self", None), *_signature(module, kind)]
    return names


def test_every_module_is_found():
    assert MODULES == ["buffers", "collectives", "mpi", "nonblocking", "point_to_point"]


@pytest.mark.parametrize("name", MODULES)
def test_stub_and_binary_agree(name):
    module = importlib.import_module(f"mpicoll._core.{name}")
    stub = _stub_names(ast.parse((CORE / f"{name}.pyi").read_text()).body)
    binary = _binary_names(module)
    assert binary, "the binary has no public names: the comparison would be empty"
    assert stub == binary


@pytest.mark.parametrize("name", MODULES)
def test_stubs_are_annotated_throughout(name):
    for node in ast.walk(ast.parse((CORE / f"{name}.pyi").read_text())):
        if isinstance(node, ast.FunctionDef):
            assert node.returns is not None, node.name
            for argument in node.args.args:
                assert argument.arg == "self" or argument.annotation is not None, node.name


def test_the_comparison_sees_differences():
    stub = ast.parse(
        "def f(a: int, b: int = 1) -> None: ...\nclass C:\n    @property\n    def x(self): ..."
    )
    assert _stub_names(stub.body) == {"f": [("a", None), ("b", "1")], "C": {"x": "property"}}

    def cython() -> None: ...

    cython.__doc__ = "module.f(int a, b=1)\n\nWords."
    assert _signature(None, cython) == [("a", None), ("b", "1")]
