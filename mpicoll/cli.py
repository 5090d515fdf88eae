"""The command line: what mpicoll is running on, and its plugins. Nobody imports this."""

from __future__ import annotations

import json
import platform
import re
import sys
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import click

__all__ = ["main"]

# What an MPI library may lack, by the function that tells, and what mpicoll does then.
_MISSING = {
    "MPI_Allreduce_c": "large counts (longer messages travel in pieces)",
    "MPI_Allreduce_init": "persistent collectives",
    "MPI_Session_init": "sessions",
}


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(version("mpicoll"), prog_name="mpicoll")
def main() -> None:
    """Differentiable MPI communication for stock PyTorch, on any MPI."""


@main.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
def info(as_json: bool) -> None:
    """Say what mpicoll was built with and what it runs with.

    Initialises MPI. Under mpiexec every rank takes part and rank 0 prints.
    """
    try:
        facts, rank = collect()
    except (ImportError, RuntimeError) as error:
        raise click.ClickException(f"mpicoll cannot use MPI here: {error}") from error
    except ValueError as error:  # a setting
        raise click.ClickException(str(error)) from error
    if rank:
        return
    if as_json:
        click.echo(json.dumps(facts, indent=2))
    else:
        _show(facts)
    sys.stdout.flush()


@main.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
@click.option("--check", is_flag=True, help="Exit with 1 if a plugin has a problem.")
def plugins(as_json: bool, check: bool) -> None:
    """Say which plugins there are, what they do, and what is wrong with them.

    Imports the plugins. Under mpiexec the ranks are compared and rank 0 prints.
    """
    try:
        found = find_plugins()
    except ValueError as error:
        raise click.ClickException(str(error)) from error
    ranks, rank = _of_all_ranks(found)
    found["ranks"] = len(ranks)
    found["problems"] = _problems(ranks)
    if not rank:
        if as_json:
            click.echo(json.dumps(found, indent=2, default=str))
        else:
            _show_plugins(found)
        sys.stdout.flush()
    if check and found["problems"]:
        raise SystemExit(1)


def find_plugins() -> dict[str, Any]:
    """What this process finds; loading it changes nothing for the programs that mpicoll serves."""
    from . import config
    from .plugins import GROUP, HOOK_API
    from .plugins.manager import Manager

    manager = Manager(config.read())
    manager.load()
    shown = ("name", "distribution", "version", "value", "state", "reason", "hooks")
    return {
        "entry point group": GROUP,
        "hook api": HOOK_API,
        "plugins": [
            {name: getattr(plugin, name) for name in shown} | {"info": manager.info(plugin)}
            for plugin in manager.plugins
        ],
        "problems": manager.problems(),
    }


def _of_all_ranks(found: dict[str, Any]) -> tuple[list[dict[str, Any]], int]:
    """What every rank finds, and the number of this one; just this one where MPI does not run."""
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError):  # to look at plugins, no MPI is needed
        return [found], 0
    text = json.dumps(found, default=str)
    return [json.loads(t) for t in MPI.COMM_WORLD.allgather(text)], MPI.COMM_WORLD.Get_rank()


def _problems(ranks: list[dict[str, Any]]) -> list[str]:
    """The problems of all ranks, and in what the ranks differ; a problem of all is said once."""
    every = [f["problems"] for f in ranks]
    problems = [p for p in every[0] if all(p in other for other in every)]
    for rank, own in enumerate(every):
        problems += [f"rank {rank}: {p}" for p in own if p not in problems]
    loaded = [
        [f"{p['name']} ({p['distribution']} {p['version']})" for p in f["plugins"]
         if p["state"] == "loaded"]
        for f in ranks
    ]  # fmt: skip
    for rank, names in enumerate(loaded[1:], 1):
        for label in dict.fromkeys([*loaded[0], *names]):
            if (label in names) != (label in loaded[0]):
                there, missing = (rank, 0) if label in names else (0, rank)
                problems.append(f"rank {there} loads {label}, rank {missing} does not")
    return problems


def collect() -> tuple[dict[str, Any], int]:
    """The facts, in the order in which they are shown, and the rank of this process."""
    import torch

    from . import config, cuda_aware_mpi_support
    from ._core import mpi
    from ._core.shared_memory import segment

    mpi.bind()
    from mpi4py import MPI

    shared = segment(MPI.COMM_WORLD, config.read().shared_bytes)

    notes = mpi.notes()
    aware, reason = cuda_aware_mpi_support()
    levels = {
        MPI.THREAD_SINGLE: "MPI_THREAD_SINGLE",
        MPI.THREAD_FUNNELED: "MPI_THREAD_FUNNELED",
        MPI.THREAD_SERIALIZED: "MPI_THREAD_SERIALIZED",
        MPI.THREAD_MULTIPLE: "MPI_THREAD_MULTIPLE",
    }
    facts: dict[str, Any] = {
        "mpicoll": version("mpicoll"),
        "built with": _built_with(mpi.__file__),
        "python": f"{platform.python_version()} ({sys.executable})",
        "torch": str(torch.__version__),
        "mpi4py": _version("mpi4py"),
        "numpy": _version("numpy"),
        "mpi library": " ".join(notes["library"].splitlines()[0].split()),
        "mpi standard": ".".join(map(str, MPI.Get_version())),
        "mpi path": notes["path"],
        "abi": notes["abi"],
        "thread level": levels.get(notes["thread_level"], str(notes["thread_level"])),
        "lacks": [_MISSING.get(name, name) for name in notes["missing"]],
        "short messages": "through MPI"
        if shared is None
        else f"up to {shared[1]} bytes through shared memory",
        "device aware": aware,
        "device reason": reason,
        "ranks": MPI.COMM_WORLD.Get_size(),
        "launcher": notes["launcher"] or "ok",
    }
    return facts, MPI.COMM_WORLD.Get_rank()


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _built_with(path: str) -> dict[str, str]:
    """The Cython and the compiler that left their names in the core's binary."""
    with open(path, "rb") as file:
        binary = file.read()
    found: dict[str, str] = {}
    for tool, pattern in (
        ("compiler", rb"(?:GCC: \([^\0)]*\) [\d.]+|clang version [\d.]+)"),
        ("cython", rb"_cython_(\d+(?:_\d+)+(?:[a-z]+\d+)?)"),
    ):
        match = re.search(pattern, binary)
        if match is not None:
            text = match.group(match.lastindex or 0).decode()
            found[tool] = text.replace("_", ".") if tool == "cython" else text
    return found


def _show(facts: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in facts.items():
        if name == "device reason":
            continue
        style = ""
        if name == "lacks":
            value = "; ".join(value) or "nothing that mpicoll uses"
        elif name == "built with":
            value = ", ".join(f"{tool} {text}" for tool, text in value.items()) or "unknown"
        elif name == "device aware":
            value = f"{'yes' if value else 'no'}: {facts['device reason']}"
        elif name == "launcher" and value != "ok":
            style = "bold red"
        table.add_row(name, Text(str(value), style=style))
    Console().print(table)


def _show_plugins(found: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False)
    table.add_column("plugin", no_wrap=True)
    table.add_column("from", overflow="fold")
    table.add_column("state", no_wrap=True)
    table.add_column("hooks", overflow="fold")
    styles = {"loaded": "green", "blocked": "yellow", "failed": "bold red"}
    for plugin in found["plugins"]:
        lines = [name.removeprefix("mpicoll_") for name in plugin["hooks"]]
        lines += [f"{name}: {value}" for name, value in plugin["info"].items()]
        if plugin["reason"]:
            lines.append(plugin["reason"])
        table.add_row(
            Text(plugin["name"]),
            Text(f"{plugin['distribution']} {plugin['version']}\n{plugin['value']}"),
            Text(plugin["state"], style=styles[plugin["state"]]),
            Text("\n".join(lines)),
        )
    console = Console()
    console.print(table)
    for problem in found["problems"]:
        console.print(Text(problem, style="bold red"))
