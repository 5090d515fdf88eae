"""Gradients and parameters that are staged through the host: as on the CPU, in few copies."""

from __future__ import annotations

import pytest
import torch
from device_cases import RANK, SIZE, WORLD
from simulated import DEVICE, raw_of, traffic

from mpicoll._core import nonblocking
from mpicoll.algorithms import DataParallel, Join, ZeroRedundancyOptimizer


class Net(torch.nn.Module):
    """Made of what the device can do."""

    def __init__(self, device, dtype, rank=0):
        super().__init__()
        made = torch.Generator().manual_seed(rank)
        for name, n in (("a", 5), ("b", 700), ("unused", 3)):
            value = torch.randint(-4, 5, (n,), generator=made).to(dtype)
            setattr(self, name, torch.nn.Parameter(value.to(device)))
        self.register_buffer("seen", torch.full((2,), float(rank)).to(device))

    def forward(self, x):
        if self.training:
            self.seen.add_(1.0)
        return (self.a * x[:5]).sum() * 2 + (self.b * x).sum()


def data(rank, k, dtype):
    made = torch.Generator().manual_seed(100 * rank + k)
    return torch.randint(-4, 5, (700,), generator=made).to(dtype)


def host(tensor):
    return tensor if tensor.device.type == "cpu" else raw_of(tensor)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("bucket_bytes", [1, 25 << 20])
def test_gradients(dtype, bucket_bytes):
    results = []
    for device in ("cpu", DEVICE):
        model = DataParallel(Net(device, dtype, RANK), bucket_bytes=bucket_bytes)
        assert model.join_device == torch.device(device)
        for k in range(2):
            model.zero_grad()
            model(data(RANK, k, dtype).to(device)).backward()
        assert model.module.unused.grad is None
        results.append(
            [host(t.detach()) for t in (*model.parameters(), *model.buffers())]
            + [host(p.grad) for p in (model.module.a, model.module.b)]
        )
    for cpu, device in zip(*results, strict=True):
        torch.testing.assert_close(device, cpu, rtol=0, atol=0)
    assert results[0][3].tolist() == [2.0, 2.0], "the buffer of rank 0, after two forwards"
    parts = torch.stack([2 * data(r, 1, dtype)[:5].double() for r in range(SIZE)])
    torch.testing.assert_close(results[1][4], parts.mean(0).to(dtype), rtol=0, atol=0)
    assert nonblocking.in_flight() == []


def test_copies():
    """A bucket goes out once and comes back once."""
    model = DataParallel(Net(DEVICE, torch.float32), broadcast_buffers=False)
    output = model(data(RANK, 0, torch.float32).to(DEVICE))
    traffic.clear()
    output.backward()
    bucket = (5 + 700 + 3 + 3 + 1) * 4
    assert [n for n in traffic.to_host if n > 100] == [bucket]
    assert [n for n in traffic.to_device if n > 100] == [bucket]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_join(dtype):
    """Ranks that have run out stage zeros; shares and options travel, too."""
    results = []
    for device in ("cpu", DEVICE):
        model = DataParallel(Net(device, dtype), bucket_bytes=1)
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, WORLD, lr=0.25)
        with Join([model, optimizer]):
            for k in range(RANK + 1):
                optimizer.zero_grad()
                model(data(RANK, k, dtype).to(device)).backward()
                optimizer.param_groups[0]["lr"] /= 2
                optimizer.step()
        results.append([host(t.detach()) for t in (*model.parameters(), *model.buffers())])
    for cpu, device in zip(*results, strict=True):
        torch.testing.assert_close(device, cpu, rtol=0, atol=0)
    alone = Net("cpu", torch.float64)
    for k in range(SIZE):
        total = sum(2 * data(r, k, dtype)[:5].double() for r in range(k, SIZE)) / SIZE
        alone.a.data -= 0.25 / 2 ** (k + 1) * total
    torch.testing.assert_close(
        results[1][0].double(), alone.a.detach(), rtol=0.05 if dtype == torch.bfloat16 else 1e-5,
        atol=0.05 if dtype == torch.bfloat16 else 1e-5,
    )  # fmt: skip
