"""Data-parallel training where the ranks have different numbers of samples.

Run it with ``mpiexec -n W python examples/uneven.py``. A rank that has run out of samples keeps the
others company until all have: no rank hangs, and every average is one over the ranks that had a
batch. The parameters at the end are those of one process that computes the same averages.
"""

import torch

import mpicoll
from mpicoll.algorithms import Join

SAMPLES = (100, 60, 0, 37)  # of ranks 0 to 3
BATCH, RATE = 10, 0.1


def batches(rank):
    """The batches of a rank; each rank has data of its own."""
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(SAMPLES[rank], 3, generator=generator, dtype=torch.float64)
    y = x @ torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64) + 0.1 * rank
    return list(zip(x.split(BATCH), y.split(BATCH), strict=True)) if len(x) else []


def new_model():
    """The same on every rank."""
    model = torch.nn.Linear(3, 1).double()
    for parameter in model.parameters():
        torch.nn.init.constant_(parameter, 0.1)
    return model


def gradients(model, x, y):
    """The gradients of the mean loss of one batch."""
    loss = torch.nn.functional.mse_loss(model(x).squeeze(1), y)
    return torch.autograd.grad(loss, list(model.parameters()))


@torch.no_grad()
def step(model, averages):
    """One step of gradient descent."""
    for parameter, average in zip(model.parameters(), averages, strict=True):
        parameter -= RATE * average


def train(comm):
    """Train on this rank's batches, together with the other ranks."""
    model = new_model()
    with Join([comm]) as context:
        for x, y in batches(comm.rank):
            averages = [comm.Allreduce(g, mpicoll.ReduceOp.AVG) for g in gradients(model, x, y)]
            step(model, averages)
    # Whoever ran out last has made all steps; the others take its parameters.
    mine = torch.tensor([context.iterations, comm.rank])
    _, last = comm.Allreduce(mine, mpicoll.MPI_MAXLOC).tolist()
    with torch.no_grad():
        for parameter in model.parameters():
            comm.Bcast_(parameter, last)
    return model


def train_alone(size):
    """What one process computes for the same schedule of averages."""
    model = new_model()
    shards = [batches(rank) for rank in range(size)]
    for k in range(max(map(len, shards))):
        active = [gradients(model, *shard[k]) for shard in shards if len(shard) > k]
        step(model, [torch.stack(parts).mean(0) for parts in zip(*active, strict=True)])
    return model


def main():
    """Train, and compare."""
    comm = mpicoll.COMM_WORLD
    if comm.size > len(SAMPLES):
        raise SystemExit(f"this example has samples for at most {len(SAMPLES)} ranks")
    model, alone = train(comm), train_alone(comm.size)
    for parameter, expected in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(parameter, expected, rtol=1e-12, atol=1e-12)
    steps = len(batches(comm.rank))
    print(f"rank {comm.rank} of {comm.size}: {steps} batches of its own, right", flush=True)


if __name__ == "__main__":
    main()
