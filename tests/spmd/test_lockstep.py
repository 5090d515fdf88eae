"""``lockstep``: every call's backward once, in reverse order, against one process of all."""

from __future__ import annotations

import contextlib

import pytest
import torch

import mpicoll
import mpicoll.nn.functional as F
from mpicoll import MPI_MAX, MPI_SUM, watch
from mpicoll.ops import ReduceOp


def leaf(r, seed, requires_grad=True):
    made = torch.Generator().manual_seed(100 * seed + r)
    return torch.randn(3, generator=made, dtype=torch.float64).requires_grad_(requires_grad)


@contextlib.contextmanager
def logged():
    """The collectives in the order in which this rank makes them: name and direction."""
    log = []
    observer = watch.observe(lambda e: log.append((e.op, e.direction)), lambda e: None)
    try:
        yield log
    finally:
        watch.stop(observer)


def program(r, size, ops, a, b):
    """The loss of rank r; `ops` communicate, for real or in one process with all ranks at once."""
    total = ops.sum(a * (r + 1))
    largest = ops.max(b)  # off rank 0 the result is not used
    whole = ops.gather(total * b)  # of use on the root only
    parts = ops.all_gather(largest.sin() if r == 0 else b * 1.5)
    ops.sum(torch.full((3,), 2.0, dtype=torch.float64))  # nobody uses it, nothing requires grad
    turned = ops.ring(parts[-1] * a)
    last = ops.sum(turned.detach() if r else turned)
    if r == 0:
        return (whole**2).sum() + (total * largest).sum() + (last * turned).sum()
    if r == 1:
        return (parts[0] ** 3).sum() + (turned * b).sum()
    return None if r == 2 else (total**2).sum()


class Real:
    def __init__(self, comm):
        self.comm = comm

    def sum(self, x):
        return self.comm.Allreduce(x, MPI_SUM)

    def max(self, x):
        return F.all_reduce(x, ReduceOp.MAX, self.comm)

    def gather(self, x):
        return self.comm.Gather(x, 0, 0)

    def all_gather(self, x):
        return F.all_gather(x, self.comm)

    def ring(self, x):
        rank, size = self.comm.rank, self.comm.size
        handle = self.comm.Isend(x, (rank + 1) % size, 5)
        made = self.comm.Recv(torch.empty(3, dtype=torch.float64), (rank - 1) % size, 5)
        self.comm.Wait(handle)
        return made


def oracle(size, a, b):
    """The losses of all ranks, by plain torch."""
    total = sum(x * (r + 1) for r, x in enumerate(a))
    largest = torch.stack(b).amax(0)
    whole = torch.cat([total * x for x in b])
    parts = [largest.sin() if r == 0 else x * 1.5 for r, x in enumerate(b)]
    turned = [parts[-1] * a[(r - 1) % size] for r in range(size)]
    last = sum(t.detach() if r else t for r, t in enumerate(turned))
    losses = [(whole**2).sum() + (total * largest).sum() + (last * turned[0]).sum()]
    if size > 1:
        losses.append((parts[0] ** 3).sum() + (turned[1] * b[1]).sum())
    losses += [(total**2).sum() for r in range(3, size)]
    return sum(losses)


@pytest.mark.parametrize("whose", ["all", "one"])
def test_ranks_with_different_losses(world, everyone, whose):
    size, rank = world.size, world.rank
    wants = [(r != 1, r != 2) for r in range(size)]  # some inputs require no grad
    a, b = ([leaf(r, s, wants[r][s]) for r in range(size)] for s in (0, 1))
    oracle(size, a, b).backward()
    x, y = leaf(rank, 0, wants[rank][0]), leaf(rank, 1, wants[rank][1])
    with logged() as log, mpicoll.lockstep(None if whose == "all" else world) as step:
        loss = program(rank, size, Real(world), x, y)
        step.backward(loss)
    for mine, expected in ((x, a[rank]), (y, b[rank])):
        if mine.requires_grad:
            torch.testing.assert_close(mine.grad, expected.grad)
    assert len(set(map(tuple, everyone(log)))) == 1
    made = [op for op, direction in log if direction == "backward"]
    assert [op for op in made if op == "Scatter"] == ["Scatter"]
    assert made[0] == "Allreduce"
    assert made.index("Reduce_scatter") < made.index("Scatter")


def test_second_derivatives(world):
    """The calls of the first backward are calls of the scope."""
    size, rank = world.size, world.rank

    def losses(xs, sums):
        total, cubes = sums([x * x for x in xs]), sums([x**3 for x in xs])
        return [
            (cubes * total).sum() if r == 0 else (total * x).sum()
            for r, x in zip(ranks, xs, strict=True)
        ]

    ranks = range(size)
    xs = [leaf(r, 2) for r in ranks]
    total = sum(losses(xs, lambda t: sum(t)))
    gradients = torch.autograd.grad(total, xs, create_graph=True)
    expected = torch.autograd.grad(gradients[0].square().sum(), xs)
    ranks, x = [rank], leaf(rank, 2)
    with mpicoll.lockstep() as step:
        (loss,) = losses([x], lambda t: world.Allreduce(t[0], MPI_SUM))
        step.backward(loss, create_graph=True)
        gradient, x.grad = x.grad, None
        torch.testing.assert_close(gradient, gradients[rank])
        step.backward(gradient.square().sum() if rank == 0 else None)
    torch.testing.assert_close(x.grad, expected[rank])


def test_retain_graph(world):
    x = leaf(world.rank, 3)
    with logged() as log, mpicoll.lockstep() as step:
        y = world.Allreduce(x, MPI_SUM)
        loss = (y**2).sum() if world.rank == 0 else None
        step.backward(loss, retain_graph=True)
        once = x.grad.clone()
        step.backward(loss)
        torch.testing.assert_close(x.grad, 2 * once)
        z = world.Allreduce(x * 2, MPI_SUM)
        step.backward(z.sum() if world.rank == world.size - 1 else None)
        torch.testing.assert_close(x.grad, 2 * once + 2)
    assert [d for _, d in log] == ["forward", "backward", "backward", "forward", "backward"]


def test_every_kind_of_call(world):
    """Calls whose results nobody uses give zeros, whatever they are."""
    rank, size = world.rank, world.size
    x = leaf(rank, 4, rank % 2 == 0)
    with logged() as log, mpicoll.lockstep() as step:
        world.Bcast_(x * 1, 0)
        world.Reduce_(x * 1, MPI_MAX, 0)
        world.Reduce_scatter(torch.stack([x] * size), 0, 1, MPI_SUM)
        world.Scatter(torch.stack([x] * size) if rank == 0 else torch.zeros(1), 0, 1, 0)
        world.Alltoall(x.reshape(1, 3), 0, 1, 3 if rank == 0 else 0)
        world.Scan(x, MPI_SUM)
        F.all_to_all([torch.empty_like(x) for _ in range(size)], [x] * size, world)
        F.scatter([x] * size if rank == 0 else None, 0, world)
        F.all_to_all_single(torch.empty(size, 3, dtype=x.dtype), torch.stack([x] * size))
        F.reduce_scatter(torch.empty(4, 3, dtype=x.dtype)[0], [x] * size, group=world)
        world.Sendrecv(x, (rank + 1) % size, torch.empty_like(x), (rank - 1) % size)
        mpicoll.copy_to_group(x, world)
        mpicoll.reduce_from_group(x, world)
        world.Allreduce(torch.ones(2, dtype=torch.int64), mpicoll.MPI_BAND)
        world.Allreduce(torch.ones(2), mpicoll.MPI_LAND)
        before = len(log)
        step.backward(None)
    if x.requires_grad:
        assert x.grad.tolist() == [0.0, 0.0, 0.0]
    assert [op for op, _ in log[before:]] == [
        "Allreduce",  # of copy_to_group; reduce_from_group has none, Sendrecv is not observed
        "Allgather", "Alltoall", "Alltoall", "Alltoall", "Scan", "Alltoall", "Gather", "Allgather",
        "Bcast", "Bcast", "Allreduce", "Reduce",  # the first three: MAX on a root
    ]  # fmt: skip


def test_scopes(world, works):
    sub = world.Split(world.rank % 2)
    x = leaf(world.rank, 5)
    with mpicoll.lockstep(sub) as step, mpicoll.lockstep(sub) as same:
        with pytest.raises(RuntimeError, match="make the outer one"):
            mpicoll.lockstep().__enter__()
        with mpicoll.lockstep(world) as other:
            y = world.Allreduce(x.detach(), MPI_SUM)
            assert y.requires_grad
            other.backward(None)
        sub.Allreduce(x, MPI_SUM)
        with torch.no_grad():
            assert not sub.Allreduce(x, MPI_SUM).requires_grad
        assert not world.Allreduce(x.detach(), MPI_SUM).requires_grad
        same.backward(None)
        with pytest.raises(RuntimeError, match="inside a transform"):
            torch.func.grad(lambda t: sub.Allreduce(t, MPI_SUM).sum())(x)
        with pytest.raises(ValueError, match="one number"):
            step.backward(x)
        with pytest.raises(TypeError, match="not float"):
            step.backward(1.0)
    assert x.grad.tolist() == [0.0, 0.0, 0.0]
    with pytest.raises(RuntimeError, match="inside the with block"):
        step.backward(None)
    with pytest.raises(KeyError), mpicoll.lockstep():
        raise KeyError
    assert not watch.ordered
    assert not world.Allreduce(x.detach(), MPI_SUM).requires_grad
    sub.Free()
    works()


def test_checkpoint(world):
    from torch.utils.checkpoint import checkpoint

    x = leaf(world.rank, 6)
    with mpicoll.lockstep() as step:
        y = checkpoint(lambda t: world.Allreduce(t.sin(), MPI_SUM).exp(), x, use_reentrant=False)
        z = world.Allreduce(x, MPI_SUM)
        step.backward((y + z).sum())
    xs = [leaf(r, 6) for r in range(world.size)]
    total = world.size * (sum(t.sin() for t in xs).exp().sum() + sum(xs).sum())
    (expected,) = torch.autograd.grad(total, [xs[world.rank]])
    torch.testing.assert_close(x.grad, expected)
