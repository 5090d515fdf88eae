"""Time an all-reduce of float32 against a C loop, mpi4py and torch's gloo, in one run.

Run it on an idle machine: ``mpiexec -n 2 python benchmarks/allreduce.py``. Needs the ``mpicc`` of
the MPI in use for the C loop (left out where there is none). The contestants take turns, round by
round, so that a drift of the machine's speed meets all of them; the medians over the rounds are
printed in microseconds a call, and as ratios.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import click
import numpy as np
import torch
import torch.distributed as dist
from mpi4py import MPI
from rich.console import Console
from rich.table import Table

import mpicoll

WORLD = MPI.COMM_WORLD
Contestant = Callable[[int], float]


def raw_loop(folder: str, send: torch.Tensor, recv: torch.Tensor) -> Contestant | None:
    """The C loop, compiled by rank 0 with the MPI's own compiler."""
    beside = Path(sys.executable).parent / "mpicc"
    compiler = str(beside) if beside.exists() else shutil.which("mpicc")
    library = Path(folder) / "raw.so"
    if WORLD.rank == 0 and compiler and not library.exists():
        source = Path(__file__).parent / "raw.c"
        subprocess.run([compiler, "-O2", "-shared", "-fPIC", "-o", library, source], check=True)
    WORLD.Barrier()
    if not library.exists():
        return None
    loop = ctypes.CDLL(str(library)).raw_allreduce
    loop.restype = ctypes.c_double
    loop.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_int]
    return lambda calls: loop(send.data_ptr(), recv.data_ptr(), send.numel(), calls)


def timed(call: Callable[[], object]) -> Contestant:
    """Repeat `call` in a Python loop."""

    def run(calls: int) -> float:
        start = time.perf_counter()
        for _ in range(calls):
            call()
        return time.perf_counter() - start

    return run


def contestants(folder: str, n: int, gloo: bool) -> dict[str, Contestant]:
    """What is compared at `n` elements."""
    x = torch.full((n,), float(WORLD.rank + 1))
    leaf = x.clone().requires_grad_()
    seed = torch.ones(n)
    ready, out = x.numpy(), np.empty(n, np.float32)
    comm = mpicoll.COMM_WORLD
    op = mpicoll.MPI_SUM

    def on_tensors() -> torch.Tensor:
        y = torch.empty_like(x)
        WORLD.Allreduce(x.numpy(), y.numpy())
        return y

    runs: dict[str, Contestant] = {}
    raw = raw_loop(folder, x, torch.empty(n))
    if raw is not None:
        runs["C loop"] = raw
    runs["mpicoll"] = timed(lambda: comm.Allreduce(x, op))
    runs["mpi4py, ready numpy"] = timed(lambda: WORLD.Allreduce(ready, out))
    runs["mpi4py, tensors"] = timed(on_tensors)
    runs["mpicoll fwd+bwd"] = timed(
        lambda: torch.autograd.grad(comm.Allreduce(leaf, op), leaf, seed)
    )
    if gloo:
        import torch.distributed.nn.functional as theirs

        runs["gloo in place"] = timed(lambda: dist.all_reduce(x.clone()))
        runs["gloo functional fwd+bwd"] = timed(
            lambda: torch.autograd.grad(theirs.all_reduce(leaf), leaf, seed)
        )
    return runs


@click.command()
@click.option("--sizes", default="1,1024,65536,1048576,16777216", help="Elements, comma separated.")
@click.option("--rounds", default=9, help="Rounds in which every contestant takes its turn.")
@click.option("--seconds", default=0.05, help="Aimed length of one turn.")
@click.option("--gloo/--no-gloo", default=True, help="Compare with torch's gloo backend.")
def main(sizes: str, rounds: int, seconds: float, gloo: bool) -> None:
    """Print the table of times and ratios."""
    folder = WORLD.bcast(tempfile.mkdtemp() if WORLD.rank == 0 else None)
    torch.set_num_threads(1)
    if gloo:
        dist.init_process_group(
            "gloo", init_method=f"file://{folder}/store", rank=WORLD.rank, world_size=WORLD.size
        )
    table = Table(title=f"Allreduce of float32, {WORLD.size} ranks, microseconds a call (medians)")
    table.add_column("elements", justify="right")
    table.add_column("contestant")
    table.add_column("µs", justify="right")
    table.add_column("of C loop", justify="right")
    table.add_column("mpicoll is faster by", justify="right")
    for n in (int(s) for s in sizes.split(",")):
        runs = contestants(folder, n, gloo)
        counts, times = {}, {name: [] for name in runs}
        for name, run in runs.items():  # a trial turn decides how many calls fill a turn
            run(2)
            once = WORLD.allreduce(run(4), MPI.MAX) / 4
            counts[name] = max(2, min(20000, int(seconds / max(once, 1e-7))))
        for _ in range(rounds):
            for name, run in runs.items():
                WORLD.Barrier()
                spent = run(counts[name]) / counts[name]
                times[name].append(WORLD.allreduce(spent, MPI.MAX) * 1e6)
        medians = {name: statistics.median(values) for name, values in times.items()}
        for name, median in medians.items():
            ours = medians["mpicoll fwd+bwd" if "fwd" in name else "mpicoll"]
            table.add_row(
                str(n),
                name,
                f"{median:.2f}",
                f"{median / medians['C loop']:.2f}" if "C loop" in medians else "",
                "" if name.startswith("mpicoll") else f"{median / ours:.2f}",
            )
        table.add_section()
    if WORLD.rank == 0:
        Console(width=100).print(table)
        shutil.rmtree(folder)
    if gloo:
        dist.destroy_process_group()


if __name__ == "__main__":
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)
    main()
