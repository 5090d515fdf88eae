"""Training with a wrapped module and a sharded optimizer, on different numbers of samples per rank.

Run it with ``mpiexec -n W python examples/data_parallel.py``. Backward averages the gradients while
it goes on, every rank keeps the optimizer's state of its share of the parameters, and ranks that
have run out of samples keep the others company. The parameters at the end are those of one process
that computes the same averages.
"""

import torch

import mpicoll
from mpicoll.algorithms import DataParallel, Join, ZeroRedundancyOptimizer

SAMPLES = (100, 60, 0, 37)  # of ranks 0 to 3
BATCH, RATE = 10, 0.02


def batches(rank):
    """The batches of a rank; each rank has data of its own."""
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(SAMPLES[rank], 3, generator=generator, dtype=torch.float64)
    y = x.prod(1, keepdim=True) + 0.1 * rank
    return list(zip(x.split(BATCH), y.split(BATCH), strict=True)) if len(x) else []


def new_network():
    """Two layers; ranks need not start alike."""
    torch.manual_seed(mpicoll.COMM_WORLD.rank)
    layers = torch.nn.Linear(3, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1)
    return torch.nn.Sequential(*layers).double()


def train(network, rank):
    """Train on this rank's batches, together with the other ranks."""
    model = DataParallel(network)  # all take the parameters of rank 0
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=RATE)
    with Join([model, optimizer]) as context:
        for x, y in batches(rank):
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
    return context.iterations, context.shadowed


def train_alone(network, size):
    """What one process computes for the same schedule of averages."""
    optimizer = torch.optim.Adam(network.parameters(), lr=RATE)
    shards = [batches(rank) for rank in range(size)]
    for k in range(max(map(len, shards))):
        optimizer.zero_grad()
        for x, y in (shard[k] for shard in shards if len(shard) > k):
            (torch.nn.functional.mse_loss(network(x), y) / size).backward()
        optimizer.step()


def main():
    """Train, and compare."""
    comm = mpicoll.COMM_WORLD
    if comm.size > len(SAMPLES):
        raise SystemExit(f"this example has samples for at most {len(SAMPLES)} ranks")
    network, alone = new_network(), new_network()
    for parameter in alone.parameters():
        comm.Bcast_(parameter.data, 0)
    own, answered = train(network, comm.rank)
    train_alone(alone, comm.size)
    for parameter, expected in zip(network.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(parameter, expected, rtol=1e-9, atol=1e-9)
    print(
        f"rank {comm.rank} of {comm.size}: {own} batches of its own, {answered} of the others, "
        "right",
        flush=True,
    )


if __name__ == "__main__":
    main()
