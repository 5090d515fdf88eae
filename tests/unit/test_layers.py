"""Imports go one way, importing mpicoll starts nothing, and everything public is documented."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import mpicoll
from mpicoll.ops import OPERATIONS

ROOT = Path(mpicoll.__file__).parent
MODULES = sorted(ROOT.rglob("*.py")) + sorted(ROOT.rglob("*.pyx"))

# From the bottom up: a room may import those below it, and those on its own floor where named.
FLOORS = [
    {"ops", "errors", "config"},
    {"_core"},
    {"staging", "watch", "failure"},
    {"dispatch", "arguments", "negotiate", "lifetime", "nonblocking"},
    {"autograd"},
    {"communicator"},
    {"helpers", "nn"},
]
TOP = {
    "",
    "cli",
    "__main__",
    "algorithms",
    "c10d",
    "plugins",
    "debug",
}  # nobody below imports these
NEIGHBOURS = {
    ("negotiate", "dispatch"),
    ("arguments", "dispatch"),
    ("lifetime", "dispatch"),
    ("nonblocking", "dispatch"),
    ("nn", "helpers"),
}


def room_of(path: Path) -> str:
    """The room that a file belongs to; the package's own ``__init__`` is ''."""
    first = path.relative_to(ROOT).parts[0]
    return "" if first == "__init__.py" else first.split(".")[0]


def imported_rooms(path: Path) -> set[str]:
    """The rooms of mpicoll that a file imports, at whatever depth of it."""
    text = path.read_text()
    if path.suffix == ".pyx":
        names = re.findall(r"^\s*(?:from|import|cimport)\s+(mpicoll(?:\.\w+)*)", text, re.MULTILINE)
        return {name.split(".")[1] if "." in name else "" for name in names}
    package = ["mpicoll", *path.relative_to(ROOT).parts[:-1]]
    rooms = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found = [alias.name.split(".") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            base = base + (node.module.split(".") if node.module else [])
            found = [base] if len(base) > 1 else [[*base, alias.name] for alias in node.names]
        else:
            continue
        rooms |= {name[1] if len(name) > 1 else "" for name in found if name[0] == "mpicoll"}
    return rooms


def floor_of(room: str) -> int:
    if room in TOP:
        return len(FLOORS)
    return next(i for i, floor in enumerate(FLOORS) if room in floor)


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_go_downwards(path):
    here = room_of(path)
    if here in TOP:
        return
    for there in imported_rooms(path) - {here}:
        allowed = floor_of(there) < floor_of(here) or (here, there) in NEIGHBOURS
        assert allowed, f"{path.relative_to(ROOT)} imports mpicoll.{there}, which lies above it"


def test_every_room_has_a_floor():
    rooms = {room_of(path) for path in MODULES}
    assert rooms <= set().union(TOP, *FLOORS), "a new room: say in FLOORS where it belongs"


def test_the_check_sees_imports():
    """The rule above would notice: some rooms do import what lies below them."""
    assert imported_rooms(ROOT / "communicator.py") >= {"ops", "_core", "staging", "dispatch"}
    assert imported_rooms(ROOT / "_core" / "mpi.pyx") >= {"errors", "_core"}
    assert imported_rooms(ROOT / "nn" / "functional.py") >= {"autograd", "communicator"}


def test_ops_imports_nothing_of_mpicoll():
    for path in (ROOT / "ops").glob("*.py"):
        assert imported_rooms(path) <= {"ops"}, path
    loaded = run("import mpicoll.ops, sys; print(*[m for m in sys.modules if 'mpi4py' in m])")
    assert loaded == ""


def test_settings_are_read_in_one_place():
    for path in MODULES:
        if path.name == "config.py":
            continue
        found = re.findall(r"environ\S*(?:get)?\W+MPICOLL_\w+", path.read_text())
        assert not found, f"{path.relative_to(ROOT)} reads {found}; config.py does that"


# ---------------------------------------------------------------- importing starts nothing


def run(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "error::ResourceWarning", "-c", code],
        capture_output=True, text=True, timeout=120, cwd=ROOT.parent,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_importing_loads_no_mpi():
    said = run(
        "import mpicoll, mpicoll.nn.functional, sys\n"
        "print('mpi4py.MPI' in sys.modules, any('libmpi' in l for l in open('/proc/self/maps')))"
    )
    assert said == "False False"


def test_importing_does_not_initialise_mpi():
    said = run(
        "import mpi4py; mpi4py.rc.initialize = False\n"
        "import mpicoll\n"
        "from mpi4py import MPI\n"
        "print(MPI.Is_initialized(), mpicoll._core.mpi.is_bound())"
    )
    assert said == "False False"


def test_importing_does_not_touch_cuda():
    said = run("import torch, mpicoll; print(torch.cuda.is_initialized())")
    assert said == "False"


def test_naming_the_world_does_not_initialise_mpi():
    said = run(
        "import mpicoll, sys; repr(mpicoll.COMM_WORLD)\n"
        "mpicoll.deactivate_cuda_aware_mpi_support()\n"
        "print('mpi4py.MPI' in sys.modules)"
    )
    assert said == "False"


def test_import_is_quiet():
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", "import mpicoll"],
        capture_output=True, text=True, timeout=120, cwd=ROOT.parent,
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


# ---------------------------------------------------------------- documentation


def public_things() -> dict[str, object]:
    """Everything a user can call or make, with the methods of the classes."""
    found: dict[str, object] = {}
    for module in ("mpicoll", "mpicoll.nn.functional", "mpicoll.algorithms"):
        for name in importlib.import_module(module).__all__:
            thing = getattr(importlib.import_module(module), name)
            if inspect.isclass(thing) or inspect.isroutine(thing):
                found[f"{module}.{name}"] = thing
    for qualified, thing in list(found.items()):
        if inspect.isclass(thing) and thing.__module__.startswith("mpicoll"):
            for name, member in vars(thing).items():
                if not name.startswith("_") and (
                    inspect.isroutine(member) or isinstance(member, property)
                ):
                    found[f"{qualified}.{name}"] = member
    return {k: v for k, v in found.items() if "MPI_Communicator" not in k}


PUBLIC = public_things()
COLLECTIVE = {
    f"mpicoll.Communicator.{name}"
    for row in OPERATIONS.values()
    for name in ([row.name, row.name + "_"] if row.inplace else [row.name])
} | {
    f"mpicoll.nn.functional.{name}"
    for name in importlib.import_module("mpicoll.nn.functional").__all__ if name != "ReduceOp"
}  # fmt: skip
DIFFERENTIABLE = COLLECTIVE | {
    f"mpicoll.Communicator.{name}" for name in ("Isend", "Irecv", "Send", "Recv", "Sendrecv")
}


def sections(doc: str) -> dict[str, str]:
    """The sections of a numpydoc docstring; the text before the first is ''."""
    parts = re.split(r"^(\w[\w ]*)\n-{3,}$", inspect.cleandoc(doc), flags=re.MULTILINE)
    return {"": parts[0]} | dict(zip(parts[1::2], parts[2::2], strict=True))


def described(text: str) -> list[str]:
    """The names that a Parameters section describes."""
    heads = re.findall(r"^(\S.*)$", text, re.MULTILINE)
    return [n.strip().lstrip("*") for head in heads for n in head.split(" : ")[0].split(",")]


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_summaries(name):
    doc = PUBLIC[name].__doc__
    assert doc, f"{name} has no docstring"
    summary = inspect.cleandoc(doc).split("\n\n")[0]
    assert "\n" not in summary, f"{name}: the summary has several lines"
    assert summary.endswith("."), f"{name}: {summary!r} does not end with a full stop"
    assert summary[0].isupper() or not summary[0].isalpha(), f"{name}: {summary!r}"


@pytest.mark.parametrize(
    "name", sorted(k for k, v in PUBLIC.items() if inspect.isfunction(v)), ids=str
)
def test_parameters(name):
    """Every parameter is described, in the order of the signature, and no other."""
    parameters = [p for p in inspect.signature(PUBLIC[name]).parameters if p != "self"]
    text = sections(PUBLIC[name].__doc__).get("Parameters", "")
    assert described(text) == parameters, f"{name}: Parameters describes {described(text)}"
    if parameters:
        lines = text.strip("\n").split("\n")
        assert all(
            lines[i + 1].startswith("    ") for i, line in enumerate(lines[:-1])
            if line and not line.startswith(" ")
        ), f"{name}: a parameter without a description"  # fmt: skip


@pytest.mark.parametrize("name", sorted(DIFFERENTIABLE))
def test_communicating_calls(name):
    """Returns, Raises, Notes with the adjoint, and the section of the MPI standard."""
    found = sections(PUBLIC[name].__doc__)
    order = [s for s in found if s]
    expected = ["Parameters", "Returns", "Raises", "Notes", "References"]
    assert [s for s in order if s in expected] == expected, f"{name}: {order}"
    assert "**Adjoint**" in found["Notes"], f"{name}: Notes does not give the adjoint"
    assert re.search(r"MPI-4\.1, section \d+\.\d+", found["References"]), name
    assert "MPIError" in found["Raises"], name
    assert all(found[s].strip() for s in expected), name


def test_there_is_something_to_check():
    assert len(PUBLIC) > 40
    assert set(PUBLIC) >= DIFFERENTIABLE
