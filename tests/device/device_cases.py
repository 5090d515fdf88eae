"""Calls and tensors that the tests of devices are made of; `put` brings a tensor to its device."""

from __future__ import annotations

import contextlib

import numpy as np
import torch

import mpicoll
from mpicoll import ReduceOp
from mpicoll._core import collectives
from mpicoll.nn import functional as F
from mpicoll.ops import OPERATIONS

WORLD = mpicoll.COMM_WORLD
RANK, SIZE = WORLD.rank, WORLD.size
TOTAL = SIZE * (SIZE + 1) // 2  # what all ranks' numelem = rank + 1 add up to
DTYPES = (
    torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool, torch.complex64,
    torch.complex128,
)  # fmt: skip
MOVING = (
    "elementwise", "allgatherv", "gatherv", "scatterv", "alltoallv", "reduce_scatter", "exchange",
)  # fmt: skip


def as_is(tensor: torch.Tensor) -> torch.Tensor:
    """Put a tensor where it is: on the CPU."""
    return tensor.detach().requires_grad_(tensor.requires_grad)


def values(shape, dtype: torch.dtype, seed: int = RANK) -> torch.Tensor:
    """Small whole numbers that differ between ranks (for `seed`) and places."""
    whole = (torch.arange(int(np.prod(shape)), dtype=torch.int64) * 7 + seed * 5) % 11 - 4
    whole = whole.view(shape)
    if dtype.is_complex:
        return torch.complex(whole.double(), (whole * 3 % 5).double()).to(dtype)
    return whole % 2 == 0 if dtype == torch.bool else whole.to(dtype)


def transposed(x: torch.Tensor) -> torch.Tensor:
    return x.t().contiguous().t()


def sliced(x: torch.Tensor) -> torch.Tensor:
    room = torch.zeros(2 * x.shape[0], x.shape[1] + 1, dtype=x.dtype)
    room[::2, 1:] = x
    return room[::2, 1:]


LAYOUTS = {
    "contiguous": lambda x: x,
    "transposed": transposed,
    "sliced": sliced,
    "expanded": lambda x: x[:1].expand(x.shape),
    "conjugated": lambda x: x.conj() if x.is_complex() else x,
    "empty": lambda x: x[:, :0],
}
WRITABLE = ("contiguous", "transposed", "sliced", "empty")


def arguments(name: str, op: ReduceOp = ReduceOp.SUM, root: int = SIZE - 1) -> dict:
    """Arguments of an operation on a tensor with TOTAL rows."""
    every = {
        "op": op, "root": root, "gatheraxis": 1, "scatteraxis": 0, "numelem": RANK + 1,
    }  # fmt: skip
    return {word: every[word] for word in OPERATIONS[name].arguments}


def columns(name: str) -> int:
    """Columns of the tensor: uneven where the operation joins columns."""
    return 2 * RANK + 1 if "gatheraxis" in OPERATIONS[name].arguments else 3


@contextlib.contextmanager
def counted(names=MOVING):
    """List the calls into the core, by name, while the block runs."""
    made: list[str] = []
    kept = {name: getattr(collectives, name) for name in names}

    def counting(name):
        def call(*args, **kwargs):
            made.append(name)
            return kept[name](*args, **kwargs)

        return call

    for name in names:
        setattr(collectives, name, counting(name))
    try:
        yield made
    finally:
        for name, function in kept.items():
            setattr(collectives, name, function)


def gradients(results, inputs, weigh) -> list[torch.Tensor | None]:
    """Gradients of a loss whose every element has its own weight."""
    loss = sum((weigh(y) * y).sum() for y in results if y.requires_grad)
    if isinstance(loss, torch.Tensor):
        (loss.real if loss.is_complex() else loss).backward()
    return [x.grad for x in inputs]


def wanting(put):
    """`put` for the inputs: leaves that require grad."""
    return lambda x: put(x).requires_grad_()


def weights(put):
    return lambda y: put(values(tuple(y.shape), y.dtype, RANK + 2))


# ---------------------------------------------------------------- nn.functional


def _broadcast(put, leaf, dtype, k=1):
    x = leaf(values((TOTAL * k, 3), dtype))
    return [x], [F.broadcast(x * 1, SIZE - 1)]


def _reduce(put, leaf, dtype, k=1):
    x = leaf(values((TOTAL * k, 3), dtype))
    return [x], [F.reduce(x * 1, SIZE - 1)]


def _all_reduce(put, leaf, dtype, k=1):
    x = leaf(values((TOTAL * k, 3), dtype))
    return [x], [F.all_reduce(x * 1)]


def _gather(put, leaf, dtype, k=1):
    x = leaf(values((2 * k, 3), dtype))
    return [x], F.gather(x * 1, SIZE - 1)


def _all_gather(put, leaf, dtype, k=1):
    x = leaf(values((2 * k, 3), dtype))
    return [x], F.all_gather(x * 1)


def _all_gather_single(put, leaf, dtype, k=1):
    x = leaf(values((2 * k, 3), dtype))
    output = put(transposed(values((2 * k * SIZE, 3), dtype)))
    result = F.all_gather_single(output, x * 1)
    assert result is output
    return [x], [result]


def _scatter(put, leaf, dtype, k=1):
    # Off the source the list does not count, but tells the device.
    xs = [leaf(values((2 * k, s + 1), dtype, RANK + s)) for s in range(SIZE)]
    return xs, [F.scatter([x * 1 for x in xs], SIZE - 1)]


def _reduce_scatter(put, leaf, dtype, k=1):
    xs = [leaf(values((2 * k, 3), dtype, RANK + 3 * s)) for s in range(SIZE)]
    output = put(transposed(values((2 * k, 3), dtype)))
    result = F.reduce_scatter(output, [x * 1 for x in xs])
    assert result is output
    return xs, [result]


def _all_to_all(put, leaf, dtype, k=1):
    # The block of rank r for rank s has k (2r + s) rows: uneven, some empty, both ways.
    xs = [leaf(values((k * (2 * RANK + s), 2), dtype, RANK + 3 * s)) for s in range(SIZE)]
    outputs = [put(transposed(values((k * (2 * s + RANK), 2), dtype))) for s in range(SIZE)]
    results = F.all_to_all(outputs, [x * 1 for x in xs])
    assert all(result is output for result, output in zip(results, outputs, strict=True))
    return xs, results


def _all_to_all_single(put, leaf, dtype, k=1):
    sends = [k * (2 * RANK + s) for s in range(SIZE)]
    receives = [k * (2 * s + RANK) for s in range(SIZE)]
    x = leaf(values((sum(sends), 2), dtype))
    output = put(transposed(values((sum(receives), 2), dtype)))
    result = F.all_to_all_single(output, x * 1, receives, sends)
    assert result is output
    return [x], [result]


FUNCTIONS = {
    "broadcast": _broadcast, "reduce": _reduce, "all_reduce": _all_reduce, "gather": _gather,
    "all_gather": _all_gather, "all_gather_single": _all_gather_single, "scatter": _scatter,
    "reduce_scatter": _reduce_scatter, "all_to_all": _all_to_all,
    "all_to_all_single": _all_to_all_single,
}  # fmt: skip

# ---------------------------------------------------------------- point to point

AHEAD, BEHIND = (RANK + 1) % SIZE, (RANK - 1) % SIZE


def _isend_irecv(x, into):
    receive = WORLD.Irecv(into, BEHIND, 3)
    send = WORLD.Isend(x, AHEAD, 3)
    sent = WORLD.Wait(send)
    return WORLD.Wait(mpicoll.JoinDummiesHandle(receive, [sent]))


def _send_recv(x, into):
    if RANK % 2 == 0 and RANK + 1 < SIZE:
        sent = WORLD.Send(x, RANK + 1, 4)
        return mpicoll.JoinDummies(into, [sent])
    if RANK % 2:
        return WORLD.Recv(into, RANK - 1, 4)
    return into


def _sendrecv(x, into):
    return WORLD.Sendrecv(x, AHEAD, into, BEHIND, 5, 5)


MESSAGES = {"Isend, Irecv": _isend_irecv, "Send, Recv": _send_recv, "Sendrecv": _sendrecv}
