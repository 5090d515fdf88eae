"""Random training programs under Join, against one process that knows what every rank has done.

Whatever an iteration holds: forwards with and without averages, of two models, backward through
several of them, other collectives, steps of a sharded optimizer now and then; ranks run out at
random. What one of them leaves behind another would trip over.
"""

from __future__ import annotations

import random

import pytest
import torch

from mpicoll import ReduceOp
from mpicoll.algorithms import DataParallel, Join, ZeroRedundancyOptimizer

CLOSE = {"rtol": 1e-9, "atol": 1e-11}


class Net(torch.nn.Module):
    """Layers, some of which a forward leaves out."""

    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.layers = torch.nn.ModuleList([torch.nn.Linear(2, 2).double() for _ in range(3)])

    def forward(self, x, which):
        for i in which:
            x = self.layers[i](x).tanh()
        return x


def data(seed):
    return torch.randn(3, 2, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class Program:
    """What the ranks do in an iteration; the same on all of them but for data and layers."""

    def __init__(self, draw, size):
        self.actions = []
        for _ in range(draw.randint(1, 5)):
            kind = draw.choice(
                ["backward", "backward", "gather", "two", "sum", "mixed", "look", "step"]
            )
            model = draw.randint(0, 1)
            seeds = [[draw.getrandbits(30) for _ in range(2)] for _ in range(size)]
            layers = [draw.sample(range(3), draw.randint(1, 3)) for _ in range(size)]
            self.actions.append((kind, model, seeds, layers))


def losses(models, action, rank):
    """The losses of one rank whose gradients an action adds."""
    kind, model, seeds, layers = action
    if kind in ("backward", "gather"):
        return [models[model](data(seeds[rank][0]), layers[rank]).square().sum() * (rank + 1)]
    if kind == "two":  # of both models, in one pass that comes to them in one order
        return [
            models[0](data(seeds[rank][0]), layers[0]).sum()
            * models[1](data(seeds[rank][1]), layers[0]).sum()
            + models[0](data(seeds[rank][1]), [0]).square().sum()
        ]
    if kind == "step":  # nothing, to average what has gathered
        return [0 * models[0](data(1), [0]).sum()]
    return []


def add(total, found):
    return [
        t if f is None else f if t is None else t + f for t, f in zip(total, found, strict=True)
    ]


class Alone:
    """All ranks in one process; their gradients are not averaged before they would be."""

    def __init__(self, size, lengths, shadows):
        self.size, self.lengths, self.shadows = size, lengths, shadows
        self.models = [Net(0), Net(1)]
        self.parameters = [p for m in self.models for p in m.parameters()]
        self.optimizer = torch.optim.Adam(self.models[0].parameters(), lr=0.05)
        self.clear()

    def clear(self):
        none = [None] * len(self.parameters)
        self.grads = [list(none) for _ in range(self.size)]

    def run(self, k, program):
        self.clear()
        active = [r for r in range(self.size) if self.lengths[r] > k]
        for action in program.actions:
            kind = action[0]
            for r in active:
                mine = losses(self.models, action, r)
                if kind == "mixed" and self.shadows:
                    mine = [self.mixed(action, active, r)]
                for loss in mine:
                    found = torch.autograd.grad(loss, self.parameters, allow_unused=True)
                    self.grads[r] = add(self.grads[r], found)
            if kind == "mixed" and not self.shadows:
                continue
            which = {"mixed": [action[1]], "backward": [action[1]], "two": [0, 1], "step": [0]}
            self.average(active, which.get(kind, []))
            if kind == "step":
                for p, g in zip(self.models[0].parameters(), self.grads[active[0]], strict=False):
                    p.grad = g
                self.optimizer.step()

    def mixed(self, action, active, rank):
        """All ranks' losses, as one rank's outputs change them."""
        _, model, seeds, layers = action
        outputs = {r: self.models[model](data(seeds[r][0]), layers[r]) for r in active}
        summed = sum(y if r == rank else y.detach() for r, y in outputs.items())
        return sum((summed * (r + 1)).square().sum() for r in active)

    def average(self, active, which):
        half = len(self.parameters) // 2
        for i in range(len(self.parameters)):
            if (i >= half) not in which:
                continue
            there = [self.grads[r][i] for r in active if self.grads[r][i] is not None]
            if there:
                mean = sum(there) / len(active)
                for r in active:
                    self.grads[r][i] = mean


@pytest.mark.parametrize("seed", range(16))
def test_random_program(world, works, seed):
    draw = random.Random(1000 * world.size + seed)
    rank, size = world.rank, world.size
    lengths = [draw.randint(0, 4) for _ in range(size)]
    bucket_bytes = draw.choice([1, 40, 1 << 20])
    models = [
        DataParallel(Net(10 * rank + m), bucket_bytes=bucket_bytes, find_unused_parameters=m == 0)
        for m in range(2)
    ]
    for m, model in enumerate(models):
        model.module.load_state_dict(Net(m).state_dict())
    optimizer = ZeroRedundancyOptimizer(models[0].parameters(), torch.optim.Adam, lr=0.05)
    joinables = [*models, optimizer] + ([world] if draw.random() < 0.5 else [])
    shadows = world in joinables
    alone = Alone(size, lengths, shadows)
    draw.shuffle(joinables)
    parameters = [p for m in models for p in m.parameters()]
    # propagate: so that a failure is reported by the test; the mean of those that are there: with
    # that over all, gradients to which several passes add would shrink
    with Join(joinables, on_error="propagate", divide_by_initial_world_size=False):
        for k in range(max(lengths)):
            program = Program(draw, size)
            alone.run(k, program)
            if lengths[rank] <= k:
                continue
            for p in parameters:
                p.grad = None
            for action in program.actions:
                run(world, models, optimizer, action, shadows)
            for p, wanted in zip(parameters, alone.grads[rank], strict=True):
                assert (p.grad is None) == (wanted is None)
                if wanted is not None:
                    torch.testing.assert_close(p.grad, wanted, **CLOSE)
            for p, wanted in zip(parameters, alone.parameters, strict=True):
                torch.testing.assert_close(p, wanted, **CLOSE)
    for p, wanted in zip(parameters, alone.parameters, strict=True):
        torch.testing.assert_close(p, wanted, **CLOSE)
    works()


def run(world, models, optimizer, action, shadows):
    kind, model, seeds, layers = action
    rank = world.rank
    if kind in ("backward", "two", "step"):
        for loss in losses(models, action, rank):
            loss.backward()
    elif kind == "gather":
        with models[model].no_sync():
            for loss in losses(models, action, rank):
                loss.backward()
    elif kind == "look":
        with torch.no_grad():
            models[model](data(seeds[rank][0]), [0])
    elif kind == "mixed" and shadows:  # the gradients of the outputs are exchanged, too
        summed = world.Allreduce(models[model](data(seeds[rank][0]), layers[rank]), ReduceOp.SUM)
        (summed * (rank + 1)).square().sum().backward()
    elif kind == "sum" and shadows:
        world.Allreduce(data(seeds[rank][0]), ReduceOp.AVG)
    if kind == "step":
        optimizer.step()
