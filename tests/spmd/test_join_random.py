"""Random programs under ``Join([comm])`` against one process that knows all active ranks' tensors.

Several operations in an iteration, of both families, with their backward at once or all together
at its end; ranks run out at random. What one operation leaves behind another would trip over.
"""

from __future__ import annotations

import random

import pytest
import torch

import mpicoll.nn.functional as F
from mpicoll.algorithms import Join
from mpicoll.ops import OPERATIONS, REDUCTIONS, ReduceOp

DTYPES = [torch.float64, torch.float32, torch.complex128, torch.bfloat16]
REDUCED = [ReduceOp.SUM, ReduceOp.AVG, ReduceOp.MAX, ReduceOp.MIN, ReduceOp.PROD]
CLOSE = {
    torch.float32: {"rtol": 1e-5, "atol": 1e-4},
    torch.bfloat16: {"rtol": 2e-2, "atol": 1e-1},
}


def values(seed, shape, dtype):
    """Small integers, so that ties and zeros occur."""
    made = torch.Generator().manual_seed(seed)
    real = torch.randint(-4, 5, shape, generator=made)
    if dtype.is_complex:
        return torch.complex(real.double(), torch.randint(-4, 5, shape, generator=made).double())
    return real.to(dtype)


class Step:
    """One operation: what a rank calls, and what all active ranks get."""

    def __init__(self, draw, world, active):
        self.world, self.active = world, active
        self.name = draw.choice(sorted(STEPS))
        self.dtype = draw.choice(DTYPES)
        self.op = draw.choice(REDUCED)
        if self.dtype.is_complex and self.op in (ReduceOp.MAX, ReduceOp.MIN):
            self.op = ReduceOp.PROD
        self.axis = draw.randint(0, 1)
        self.counts = [draw.randint(0, 3) for _ in range(world.size)]
        # A reduction or a gather to a rank that has run out is dropped there.
        ranks = active if self.name in ("Bcast", "broadcast", "Scatter") else range(world.size)
        self.root = draw.choice(list(ranks))
        self.differentiates, self.waits = draw.random() < 0.8, draw.random() < 0.4
        self.transposed = draw.random() < 0.3
        self.seed = draw.getrandbits(40)

    def __repr__(self):
        return (
            f"{self.name} {self.op.name} {self.dtype} root {self.root} axis {self.axis} "
            f"counts {self.counts} active {self.active}"
        )

    def along(self, n):
        return (n, 2) if self.axis == 0 else (2, n)

    @property
    def cut(self):
        """The pieces of a whole that was cut for all ranks: the active ones keep theirs."""
        absent = [r for r in range(self.world.size) if r not in self.active]
        counts, rest = list(self.counts), sum(self.counts[r] for r in absent)
        for i, r in enumerate(absent):
            counts[r] = (rest + len(absent) - 1 - i) // len(absent)
        return counts

    def leaf(self, r):
        shape = {
            "Gather": self.along(self.counts[r]),
            "Allgather": self.along(self.counts[r]),
            "Reduce_scatter": self.along(sum(self.counts)),
            "Scatter": self.along(sum(self.counts)) if r == self.root else (1,),
            "reduce_scatter": (self.world.size, 2, 2),
        }.get(self.name, (3, 2))
        return values(7 * self.seed + r, shape, self.dtype).requires_grad_(self.differentiates)

    def call(self, x):
        return STEPS[self.name](
            self, x.mT.contiguous().mT if self.transposed and x.dim() > 1 else x
        )

    def expected(self, leaves):
        """The results of the active ranks, in their order."""
        xs = [leaves[r] for r in self.active]
        name = NAMES.get(self.name, self.name)
        if name in ("Scan", "Exscan"):
            return OPERATIONS[name].reference(xs, op=ReduceOp.SUM)
        if name in ("Allreduce", "Reduce"):
            whole = REDUCTIONS[self.op].reference(torch.stack(xs))
            keeps = name == "Allreduce"
            return [whole if keeps or r == self.root else 0 * whole for r in self.active]
        if name == "Bcast":
            return [1 * leaves[self.root] for _ in xs]
        if name in ("Gather", "Allgather"):
            whole = torch.cat(xs, self.axis)
            keeps = name == "Allgather"
            return [
                whole if keeps or r == self.root else whole.narrow(self.axis, 0, 0)
                for r in self.active
            ]
        if name == "all_gather":
            zero = torch.zeros(3, 2, dtype=self.dtype)
            return [torch.stack([leaves.get(r, zero) for r in range(self.world.size)])] * len(xs)
        if name == "reduce_scatter":
            whole = REDUCTIONS[self.op].reference(torch.stack(xs))
            return [whole[r] for r in self.active]
        if name == "Scatter":
            whole = leaves[self.root]
        else:
            whole = REDUCTIONS[self.op].reference(torch.stack(xs))
        pieces = whole.split(self.cut, self.axis)
        return [pieces[r] for r in self.active]


STEPS = {
    "Allreduce": lambda s, x: s.world.Allreduce(x, s.op),
    "all_reduce": lambda s, x: F.all_reduce(x, s.op),
    "Reduce": lambda s, x: s.world.Reduce(x, s.op, s.root),
    "Reduce_": lambda s, x: s.world.Reduce_(1 * x, s.op, s.root),
    "Bcast": lambda s, x: s.world.Bcast(x, s.root),
    "broadcast": lambda s, x: F.broadcast(x, s.root),
    "Gather": lambda s, x: s.world.Gather(x, s.axis, s.root),
    "Allgather": lambda s, x: s.world.Allgather(x, s.axis),
    "all_gather": lambda s, x: torch.stack(F.all_gather(x)),
    "Scatter": lambda s, x: s.world.Scatter(x, s.axis, s.counts[s.world.rank], s.root),
    "Reduce_scatter": lambda s, x: s.world.Reduce_scatter(
        x, s.axis, s.counts[s.world.rank], s.op
    ),
    "reduce_scatter": lambda s, x: F.reduce_scatter(
        torch.empty(2, 2, dtype=s.dtype), list(x.unbind(0)), s.op
    ),
    "Scan": lambda s, x: s.world.Scan(x, ReduceOp.SUM),
    "Exscan": lambda s, x: s.world.Exscan(x, ReduceOp.SUM),
}  # fmt: skip
#: Steps that another one explains.
NAMES = {"all_reduce": "Allreduce", "Reduce_": "Reduce", "broadcast": "Bcast"}


def loss(step, r, y):
    total = (y * values(step.seed + r, tuple(y.shape), step.dtype)).sum()
    return (total.real if total.is_complex() else total).double()


def check(step, got, want):
    close = CLOSE.get(step.dtype, {"rtol": 1e-10, "atol": 1e-10})
    torch.testing.assert_close(got, want, **close, msg=lambda text: f"{step}: {text}")


def backward(waiting):
    sum(mine for _, _, mine, _ in waiting).backward()
    for step, x, _, gradient in waiting:
        check(step, x.grad, gradient)
    waiting.clear()


@pytest.mark.parametrize("seed", range(24))
def test_random_program(world, works, seed):
    draw = random.Random(1000 * world.size + seed)
    rank = world.rank
    lengths = [draw.randint(0, 4) for _ in range(world.size)]
    with Join([world], on_error="propagate"):  # so that a failure is reported by the test
        for k in range(max(lengths)):
            active = [r for r, n in enumerate(lengths) if n > k]
            program = [Step(draw, world, active) for _ in range(draw.randint(0, 3))]
            waiting = []
            for step in program if rank in active else ():
                leaves = {r: step.leaf(r) for r in active}
                x = step.leaf(rank)
                y, results = step.call(x), step.expected(leaves)
                check(step, y.detach(), results[active.index(rank)].detach())
                if not step.differentiates:
                    continue
                total = sum(loss(step, r, want) for r, want in zip(active, results, strict=True))
                gradient = torch.zeros_like(x)
                if total.requires_grad:
                    (found,) = torch.autograd.grad(total, leaves[rank], allow_unused=True)
                    gradient = gradient if found is None else found
                waiting.append((step, x, loss(step, rank, y), gradient))
                if not step.waits:
                    backward(waiting)
            if waiting:
                backward(waiting)
    works()
