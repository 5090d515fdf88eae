"""``lockstep``: every call's backward once, in reverse order, against one process of all."""

from __future__ import annotations

import contextlib
import random

import pytest
import torch

import mpicoll
import mpicoll.nn.functional as F
from mpicoll import MPI_MAX, MPI_SUM, watch
from mpicoll.algorithms import Join
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


def outcome(name, root, given):
    """What all ranks get, from what all ranks give."""
    size = len(given)
    if name == "sum":
        return [sum(given)] * size
    if name == "product":
        return [torch.stack(given).prod(0)] * size
    if name == "bcast":
        return [given[root]] * size
    if name == "shift":
        return [given[r - 1] for r in range(size)]
    return [torch.stack(given).sin().sum(0)] * size


def call(comm, name, root, x):
    rank, size = comm.rank, comm.size
    if name == "sum":
        return comm.Allreduce(x, MPI_SUM)
    if name == "product":
        return F.all_reduce(x, ReduceOp.PRODUCT, comm)
    if name == "bcast":
        return comm.Bcast(x, root)
    if name == "all_gather":
        return torch.stack(F.all_gather(x, comm)).sin().sum(0)
    handle = comm.Isend(x, (rank + 1) % size, 7)
    into = comm.Recv(torch.empty(3, dtype=x.dtype), (rank - 1) % size, 7)
    comm.Wait(handle)
    return into


def random_losses(seed, size, xs, ranks, apply):
    """The loss of each of `ranks`, None where it uses nothing, in a random program."""
    draw, made = random.Random(seed), []

    def given(i, picks, frozen, r):
        source = xs[i] if picks[r] < 0 else made[picks[r]][i]
        value = source.cos() * (0.5 + r)
        return value.detach() if frozen[r] else value

    for _ in range(6):
        name = draw.choice(["sum", "product", "bcast", "shift", "all_gather"])
        root = draw.randrange(size)
        picks = [draw.choice([-1, *range(len(made))]) for _ in range(size)]
        frozen = [draw.random() < 0.3 for _ in range(size)]
        made.append(apply(name, root, [given(i, picks, frozen, r) for i, r in enumerate(ranks)]))
    used = [draw.sample(range(6), draw.randint(0, 2)) for _ in range(size)]
    return [
        sum((made[k][i] ** 2).sum() for k in used[r]) if used[r] else None
        for i, r in enumerate(ranks)
    ]


@pytest.mark.parametrize("seed", range(12))
def test_random_programs(world, everyone, seed):
    """First and second derivatives of programs in which each rank goes its own way."""
    size, rank = world.size, world.rank
    xs = [leaf(r, seed) for r in range(size)]
    total = sum(
        (x - x).sum() if loss is None else loss
        for x, loss in zip(xs, random_losses(seed, size, xs, range(size), outcome), strict=True)
    ) + sum((x * 0).sum() for x in xs)
    first = torch.autograd.grad(total, xs, create_graph=True)
    second = torch.autograd.grad(first[0].square().sum() + sum((x * 0).sum() for x in xs), xs)
    x = leaf(rank, seed)
    with logged() as log, mpicoll.lockstep() as step:
        (loss,) = random_losses(
            seed, size, [x], [rank], lambda name, root, t: [call(world, name, root, t[0])]
        )
        step.backward(loss, create_graph=True)
        gradient = torch.zeros_like(x) if x.grad is None else x.grad
        x.grad = None
        torch.testing.assert_close(gradient, first[rank])
        step.backward(gradient.square().sum() if rank == 0 else None)
    torch.testing.assert_close(torch.zeros_like(x) if x.grad is None else x.grad, second[rank])
    assert len(set(map(tuple, everyone(log)))) == 1


def test_join_refuses(world):
    sub = world.Dup()
    with Join([sub], on_error="propagate") as context, mpicoll.lockstep():
        context.notify_join_context(sub)
        with pytest.raises(RuntimeError, match="in a Join context"):
            sub.Allreduce(torch.ones(1), MPI_SUM)
    sub.Free()
