"""Time training steps of DataParallel against torch's own over gloo, in one run.

Run it on an idle machine: ``mpiexec -n 2 python benchmarks/data_parallel.py``. The contestants take
turns, round by round, so that a drift of the machine's speed meets all of them; medians over the
rounds of the slowest rank. The model alone is what a step costs without communication, the messages
alone what the communication costs without a step. With one bucket everything is sent when backward
is over: of the messages, that part is hidden by which a step with several buckets is faster.
"""

from __future__ import annotations

import shutil
import statistics
import tempfile
import time
from collections.abc import Callable

import click
import torch
import torch.distributed as dist
from mpi4py import MPI
from rich.console import Console
from rich.table import Table
from torch.nn.parallel import DistributedDataParallel

import mpicoll
from mpicoll.algorithms import DataParallel
from mpicoll.staging import partition

WORLD = MPI.COMM_WORLD


def network(width: int, depth: int) -> torch.nn.Module:
    """Layers of one width."""
    torch.manual_seed(0)
    layers: list[torch.nn.Module] = []
    for _ in range(depth):
        layers += [torch.nn.Linear(width, width), torch.nn.ReLU()]
    return torch.nn.Sequential(*layers)


def step_of(model: torch.nn.Module, x: torch.Tensor) -> Callable[[], object]:
    """Forward and backward of one batch."""

    def step() -> None:
        model.zero_grad()
        model(x).square().mean().backward()

    return step


def messages_of(model: torch.nn.Module, bucket_bytes: int) -> Callable[[], object]:
    """The all-reduces of a step, and nothing else."""
    parameters = list(model.parameters())[::-1]
    sizes = [
        sum(parameters[i].numel() for i in some) for some in partition(parameters, bucket_bytes)
    ]
    flats = [torch.zeros(n) for n in sizes]
    comm = mpicoll.COMM_WORLD

    def send() -> None:
        for flat in flats:
            comm.Allreduce(flat, mpicoll.ReduceOp.AVG)

    return send


@click.command()
@click.option("--width", default=1024, help="Units of a layer.")
@click.option("--depth", default=8, help="Layers.")
@click.option("--batch", default=256, help="Samples of a rank.")
@click.option("--bucket-mib", default=8.0, help="Size of a bucket, for both.")
@click.option("--rounds", default=15, help="Rounds in which every contestant takes its turn.")
@click.option("--gloo/--no-gloo", default=True, help="Compare with torch's own over gloo.")
def main(width: int, depth: int, batch: int, bucket_mib: float, rounds: int, gloo: bool) -> None:
    """Print the table of times and ratios."""
    torch.set_num_threads(1)
    folder = WORLD.bcast(tempfile.mkdtemp() if WORLD.rank == 0 else None)
    bucket_bytes = int(bucket_mib * (1 << 20))
    x = torch.randn(batch, width)
    alone = network(width, depth)
    nbytes = sum(p.numel() * p.element_size() for p in alone.parameters())
    runs = {
        "model alone": step_of(alone, x),
        "messages alone": messages_of(alone, bucket_bytes),
        "DataParallel": step_of(DataParallel(network(width, depth), bucket_bytes=bucket_bytes), x),
        "DataParallel, one bucket": step_of(
            DataParallel(network(width, depth), bucket_bytes=1 << 40), x
        ),
    }
    if gloo:
        dist.init_process_group(
            "gloo", init_method=f"file://{folder}/store", rank=WORLD.rank, world_size=WORLD.size
        )
        runs["DistributedDataParallel, gloo"] = step_of(
            DistributedDataParallel(network(width, depth), bucket_cap_mb=bucket_mib), x
        )
    times: dict[str, list[float]] = {name: [] for name in runs}
    for k in range(rounds + 2):  # the first two do not count
        for name, run in runs.items():
            WORLD.Barrier()
            start = time.perf_counter()
            run()
            spent = WORLD.allreduce(time.perf_counter() - start, MPI.MAX)
            if k > 1:
                times[name].append(spent * 1e3)
    medians = {name: statistics.median(values) for name, values in times.items()}
    compute, ours = medians["model alone"], medians["DataParallel"]
    hidden = (medians["DataParallel, one bucket"] - ours) / medians["messages alone"]
    table = Table(
        title=f"One step, {WORLD.size} ranks, {nbytes / (1 << 20):.0f} MiB of gradients, medians"
    )
    table.add_column("contestant")
    table.add_column("ms", justify="right")
    table.add_column("of the model alone", justify="right")
    table.add_column("DataParallel is faster by", justify="right")
    table.add_column("messages hidden", justify="right")
    for name, median in medians.items():
        steps = name not in ("model alone", "messages alone")
        table.add_row(
            name,
            f"{median:.1f}",
            f"{median / compute:.2f}",
            f"{median / ours:.2f}" if steps and name != "DataParallel" else "",
            f"{hidden:.0%}" if name == "DataParallel" else "",
        )
    if WORLD.rank == 0:
        Console(width=110).print(table)
        shutil.rmtree(folder)
    if gloo:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
