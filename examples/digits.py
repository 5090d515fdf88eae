"""Data-parallel training on real data: scikit-learn's handwritten digits.

Run it with ``mpiexec -n W python examples/digits.py`` for any W. Every global mini-batch is cut
into W shards, whose sizes need not be equal; W ranks end with the same parameters as one process
does, to rounding. ``--check`` trains once more in one process, without mpicoll, and compares.
"""

import os
import time

import click
import numpy as np
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import parameters_to_vector

import mpicoll

TEST_SIZE = 360


def load(seed):
    """Return training and test data, the same on every rank: images, labels, images, labels."""
    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(seed).permutation(len(labels))
    images = torch.from_numpy(images[order] / 16.0)
    labels = torch.from_numpy(labels[order].astype(np.int64))
    return images[TEST_SIZE:], labels[TEST_SIZE:], images[:TEST_SIZE], labels[:TEST_SIZE]


def new_model(seed):
    """Return an untrained classifier, in float64 so that rounding stays small."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(64, 48), nn.Tanh(), nn.Linear(48, 10)).double()


def batches(count, batch, epochs, seed):
    """Yield the global mini-batches as index tensors, in the same order on every rank."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(epochs):
        yield from torch.randperm(count, generator=generator).split(batch)


def sgd(model, batch):
    """Return the optimiser; small mini-batches take small steps."""
    return torch.optim.SGD(model.parameters(), lr=min(0.1, batch / 1000), momentum=0.9)


def named(model, vector):
    """Return the parameters that lie one after the other in ``vector``, by name."""
    pieces = vector.split([parameter.numel() for parameter in model.parameters()])
    names = dict(model.named_parameters())
    return {name: piece.view_as(names[name]) for name, piece in zip(names, pieces, strict=True)}


def train(comm, model, images, labels, batch, epochs, seed, on_step):
    """Train on all ranks of ``comm``; ``on_step`` receives the loss of every global mini-batch."""
    for parameter in model.parameters():
        comm.Bcast_(parameter.detach(), 0)  # all ranks start from rank 0's parameters
    optimizer = sgd(model, batch)

    for indices in batches(len(labels), batch, epochs, seed):
        mine = indices[comm.rank :: comm.size]  # may be shorter than the others', or empty

        # The forward of copy_to_group is the identity. Its backward adds up the gradients of
        # all ranks, because all ranks use the same parameters. One call serves all parameters.
        shared = mpicoll.copy_to_group(parameters_to_vector(model.parameters()), comm)
        outputs = torch.func.functional_call(model, named(model, shared), (images[mine],))

        # The objective is L = sum of all ranks' losses. The loss of this rank is the sum over its
        # own samples, divided by the size of the *global* mini-batch, so that L is the global
        # mean whatever the sizes of the shards.
        loss = cross_entropy(outputs, labels[mine], reduction="sum") / len(indices)

        optimizer.zero_grad()
        loss.backward()
        optimizer.step()  # the same gradient on every rank, hence the same parameters
        on_step(comm.Allreduce(loss.detach(), mpicoll.MPI_SUM).item())


def train_alone(model, images, labels, batch, epochs, seed):
    """Train as anyone would in one process: the oracle of ``--check``."""
    optimizer = sgd(model, batch)
    for indices in batches(len(labels), batch, epochs, seed):
        optimizer.zero_grad()
        cross_entropy(model(images[indices]), labels[indices]).backward()
        optimizer.step()


@torch.no_grad()
def accuracy(comm, model, images, labels):
    """Return the fraction of right answers; every rank classifies its share of the images."""
    mine = slice(comm.rank, None, comm.size)
    right = (model(images[mine]).argmax(1) == labels[mine]).sum()
    return comm.Allreduce(right, mpicoll.MPI_SUM).item() / len(labels)


def compare(comm, model, images, labels, batch, epochs, seed):
    """Compare the parameters with those of one process, and with each other across ranks."""
    mine = parameters_to_vector(model.parameters()).detach()
    largest = comm.Allreduce(mine, mpicoll.MPI_MAX)
    smallest = comm.Allreduce(mine, mpicoll.MPI_MIN)
    difference = torch.zeros((), dtype=torch.float64)
    if comm.rank == 0:
        alone = new_model(seed)
        train_alone(alone, images, labels, batch, epochs, seed)
        difference = (mine - parameters_to_vector(alone.parameters()).detach()).abs().max()
    difference = comm.Bcast_(difference, 0)  # all ranks come to the same verdict
    return (largest - smallest).max().item(), difference.item()


def progress_bar(enabled):
    """Return a progress bar on standard error.

    A launcher puts a pipe between the ranks and the terminal, so that rich cannot see the
    terminal: believe TERM instead, except in continuous integration.
    """
    terminal = os.environ.get("TERM", "dumb") not in ("dumb", "unknown") and "CI" not in os.environ
    return Progress(
        TextColumn("training"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.4f}"),
        TimeRemainingColumn(),
        console=Console(stderr=True, force_terminal=terminal or None),
        disable=not enabled,
    )


@click.command(help=__doc__)
@click.option("--epochs", default=15, show_default=True, type=click.IntRange(min=1))
@click.option("--batch", default=100, show_default=True, type=click.IntRange(min=1))
@click.option("--seed", default=0, show_default=True)
@click.option("--check", is_flag=True, help="Compare with one process.")
def main(epochs, batch, seed, check):
    torch.set_num_threads(1)  # the ranks share the cores
    comm = mpicoll.COMM_WORLD
    images, labels, test_images, test_labels = load(seed)
    model = new_model(seed)

    steps = epochs * -(-len(labels) // batch)
    start = time.perf_counter()
    with progress_bar(enabled=comm.rank == 0) as progress:
        task = progress.add_task("training", total=steps, loss=float("nan"))

        def on_step(loss):
            progress.update(task, advance=1, loss=loss)

        train(comm, model, images, labels, batch, epochs, seed, on_step)
    seconds = time.perf_counter() - start

    score = accuracy(comm, model, test_images, test_labels)
    if comm.rank == 0:
        print(f"{comm.size} rank(s), {steps} steps in {seconds:.1f} s")
        print(f"test accuracy: {score:.4f} on {len(test_labels)} images", flush=True)

    if check:
        spread, difference = compare(comm, model, images, labels, batch, epochs, seed)
        if comm.rank == 0:
            print(f"largest difference of a parameter between ranks: {spread:g}")
            print(f"largest difference of a parameter from one process: {difference:g}", flush=True)
        if spread != 0 or not difference < 1e-10:
            raise SystemExit("the parameters differ" if comm.rank == 0 else 1)


if __name__ == "__main__":
    main()
