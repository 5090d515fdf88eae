"""Ranks that have run out of inputs answer from host memory what the others stage, in pieces."""

from __future__ import annotations

import pytest
import torch
from device_cases import RANK, SIZE, WORLD
from simulated import DEVICE

import mpicoll.nn.functional as F
from mpicoll import ReduceOp
from mpicoll.algorithms import Join

ROWS = 3 * SIZE


def tensor(r, k, n):
    return (torch.arange(n * 2, dtype=torch.float64) * (r + 1) + k).view(n, 2)


CALLS = {
    "Allreduce": lambda x, root: WORLD.Allreduce(x, ReduceOp.SUM),
    "average": lambda x, root: WORLD.Allreduce(x, ReduceOp.AVG),
    "maximum": lambda x, root: WORLD.Allreduce(x, ReduceOp.MAX),
    "product": lambda x, root: WORLD.Allreduce(x, ReduceOp.PROD),
    "Reduce": lambda x, root: WORLD.Reduce(x, ReduceOp.SUM, root),
    "Bcast": lambda x, root: WORLD.Bcast(x, root),
    "Scan": lambda x, root: WORLD.Scan(x, ReduceOp.SUM),
    "Allgather": lambda x, root: WORLD.Allgather(x, 1),
    "Gather": lambda x, root: WORLD.Gather(x, 0, root),
    "Scatter": lambda x, root: WORLD.Scatter(x, 0, len(x) // SIZE, root),
    "Reduce_scatter": lambda x, root: WORLD.Reduce_scatter(x, 0, len(x) // SIZE, ReduceOp.SUM),
    "all_gather": lambda x, root: torch.stack(F.all_gather(x)),
    "scatter": lambda x, root: F.scatter(list(x.split(len(x) // SIZE)), root),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("scale", [1, 200])
def test_equals_the_cpu(name, scale, limits, works):
    """The same as with CPU tensors, which `tests/spmd` shows to be right; forward and backward."""
    limits(chunk_bytes=1024)
    call, root, rows = CALLS[name], SIZE - 1, ROWS * scale
    with Join([WORLD]):
        for k in range(1 + RANK):
            results = []
            for device in ("cpu", DEVICE):
                x = tensor(RANK, k, rows)
                x = x.to(device).requires_grad_()
                y = call(x, root)
                assert y.device.type == torch.device(device).type
                (y * (RANK + 1)).sum().backward()
                grad = torch.zeros_like(x) if x.grad is None else x.grad
                results.append((y.detach().cpu(), grad.cpu()))
            torch.testing.assert_close(results[1], results[0], rtol=0, atol=0)
    works()
