"""The command line: what mpicoll is running on. Nobody imports this."""

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
    if rank:
        return
    if as_json:
        click.echo(json.dumps(facts, indent=2))
    else:
        _show(facts)
    sys.stdout.flush()


def collect() -> tuple[dict[str, Any], int]:
    """The facts, in the order in which they are shown, and the rank of this process."""
    import torch

    from . import cuda_aware_mpi_support
    from ._core import mpi

    mpi.bind()
    from mpi4py import MPI

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
