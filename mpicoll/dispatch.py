"""The one way of every operation: stage in, call, stage out.

A :class:`Call` says everything that an operation needs; its arguments have been checked and the
ranks have agreed on the sizes. :func:`run` carries it out on plain tensors; autograd is above.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch

from . import watch
from ._core import collectives, mpi
from .ops import OPERATIONS, REDUCTIONS, Operation, ReduceOp
from .staging import (
    Pipeline,
    code_of,
    contiguous,
    empty,
    is_plain,
    on_device,
    overlap,
    piece_elements,
    plan_for,
)

__all__ = ["BACKWARD", "CODES", "CONTROL", "USER", "Call", "block_piece", "run"]

#: The duplicated communicators that keep kinds of traffic apart.
USER, BACKWARD, CONTROL = 0, 1, 2
# Indexed by the reduction's value: hashing an enum member is a call into Python.
_DERIVATIVES = [REDUCTIONS[op].derivative for op in ReduceOp]
#: The numbers by which the core knows the elementwise operations.
CODES = {"Allreduce": 0, "Bcast": 1, "Reduce": 2, "Scan": 3, "Exscan": 4}


class Call:
    """One operation with its arguments, agreed by all ranks.

    Attributes
    ----------
    operation
        The row of the table of operations.
    comm
        The core communicator.
    channel
        USER, or BACKWARD for an adjoint.
    op, root
        Reduction and root; None and -1 where the operation has none.
    gatheraxis, scatteraxis
        The axes of a block operation, not negative; -1 where it has none.
    gathered, scattered
        The sizes of all ranks' blocks along those axes.
    splits
        Instead of axes: sizes along dimension 0 that go to, and come from, every rank.
    shape, dtype
        Shape and dtype of a whole tensor that this rank may not hold (the root's, for Scatter);
        with `output`, the shape of the result where the caller's tensor has another.
    reverse
        True for a prefix reduction that runs from the last rank down.
    inplace
        True if the result is written into the first tensor.
    output
        True if the last tensor is to be filled with the result.
    staged
        True if any rank stages through host memory, so that all take the same pieces.
    largest
        The largest number of elements that any rank's side of an exchange has.
    longest
        With `splits`: the largest number of elements that any rank sends to one other.
    adjoint
        Where one elementwise call is the whole adjoint and the input a plain tensor: that call's
        number, reduction, root and direction, for the core.
    divisor
        What AVG divides by; 0: the number of ranks. Set by :class:`algorithms.Join`, as is
    present
        The ranks whose tensors count; None: all.
    """

    # Defaults live on the class: a call sets what it has, and making one stays cheap.
    channel: int = USER
    op: ReduceOp | None = None
    root: int = -1
    gatheraxis: int = -1
    scatteraxis: int = -1
    gathered: Sequence[int] = ()
    scattered: Sequence[int] = ()
    splits: tuple[Sequence[int], Sequence[int]] | None = None
    shape: Sequence[int] = ()
    dtype: torch.dtype | None = None
    reverse: bool = False
    inplace: bool = False
    output: bool = False
    staged: bool = False
    largest: int = 0
    longest: int = 0
    adjoint: tuple[int, int, int, bool] | None = None
    divisor: int = 0
    present: tuple[int, ...] | None = None

    def __init__(self, operation: Operation, comm: mpi.Comm, **given: Any) -> None:
        self.operation = operation
        self.comm = comm
        self.__dict__.update(given)

    def replace(self, **changes: Any) -> Call:
        """A copy in which something is different."""
        copy = Call.__new__(Call)
        copy.__dict__.update(self.__dict__, **changes)
        return copy

    def dual(self) -> Call:
        """The operation that carries gradients back: sums, with the roles of the axes exchanged."""
        row = OPERATIONS[self.operation.dual]
        dual = Call(row, self.comm, channel=BACKWARD, root=self.root, staged=self.staged)
        if row.reduces:
            dual.op = ReduceOp.SUM
        if row.pattern == "elementwise":
            dual.reverse = row.prefix and not self.reverse
            return dual
        dual.gatheraxis, dual.scatteraxis = self.scatteraxis, self.gatheraxis
        dual.gathered, dual.scattered = self.scattered, self.gathered
        if self.splits is not None:
            dual.splits = self.splits[1], self.splits[0]
        dual.shape, dual.largest, dual.longest = self.shape, self.largest, self.longest
        return dual

    def batched(self, size: int) -> tuple[Call, int]:
        """The call for `size` tensors in one, and the position of the new dimension in it.

        It is the last one, where it changes no axis, unless the elements are pairs in the last one
        or all dimensions are alike anyway.
        """
        pairs = self.op is not None and REDUCTIONS[self.op].pairs
        if self.operation.pattern != "elementwise" and not pairs:
            shape = (*self.shape, size) if self.shape else ()
            position, axes = -1, {}
        else:
            shape = (size, *self.shape) if self.shape else ()
            position = 0
            names = ("gatheraxis", "scatteraxis")
            axes = {n: getattr(self, n) + 1 for n in names if getattr(self, n) >= 0}
        longer = {"largest": self.largest * size, "longest": self.longest * size}
        return self.replace(shape=shape, **axes, **longer), position

    @property
    def derivative(self) -> str | None:
        """How the call differentiates: ``linear``, ``winner``, ``product`` or None (not at all)."""
        if self.op is None:
            return "linear"
        return _DERIVATIVES[self.op] if self.op in self.operation.reductions else None


def run(call: Call, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Carry out `call` and return its result: a new tensor, or the one that it was to fill."""
    perform = _elementwise if call.operation.pattern == "elementwise" else _blocks
    if watch.on:
        return watch.run(call, tensors, perform)
    return perform(call, tensors)


# ---------------------------------------------------------------- the same shape on every rank


def _elementwise(call: Call, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    code = CODES[call.operation.name]
    op = -1 if call.op is None else int(call.op)
    if not call.inplace:
        made = collectives.direct(
            call.comm, call.channel, code, tensors[0], op, call.root, call.reverse
        )
        if made is not None:
            return made
    source = contiguous(tensors[0].detach())
    target = tensors[0].detach() if call.inplace else None
    if target is None:
        result = empty(source.shape, source)
    elif is_plain(target):
        result = target
    else:
        result = source  # contiguous() has copied the caller's tensor: ours to write
    host = source.device.type == "cpu"
    if host or (
        plan_for(source.device).direct
        and collectives.by_mpi_alone(
            call.comm, code, code_of(source.dtype), op, source.numel(), source.element_size(),
            call.reverse,
        )
    ):  # fmt: skip
        if not host and call.operation.name == "Bcast" and result is not source:
            source = result.copy_(source)
        with on_device(source.device):
            collectives.elementwise(
                call.comm, call.channel, code, source, result, op, call.root, call.reverse
            )
        if not host and call.op is ReduceOp.AVG:
            result.div_(call.comm.size)
    else:
        _staged_elementwise(call, code, op, source.view(-1), result.view(-1))
    if target is None or result is target:
        return result
    return target.copy_(result)


def _staged_elementwise(
    call: Call, code: int, op: int, source: torch.Tensor, result: torch.Tensor
) -> None:
    here = call.comm.rank == call.root
    reads = code != CODES["Bcast"] or here
    writes = not here if code == CODES["Bcast"] else True
    pipeline = Pipeline(source.device)
    size = piece_elements(source.element_size())
    starts = range(0, max(source.numel(), 1), size)
    hosts = [
        pipeline.buffer(min(size, source.numel()), source.dtype) for _ in range(min(2, len(starts)))
    ]

    def piece(k: int) -> tuple[torch.Tensor, torch.Tensor]:
        part = source[starts[k] : starts[k] + size]
        return part, hosts[k % 2][: part.numel()]

    def fetch(k: int) -> torch.cuda.Event | None:
        part, host = piece(k)
        return pipeline.out(host, part) if reads else None

    event = fetch(0)
    for k, start in enumerate(starts):
        _, host = piece(k)
        pipeline.ready(event)
        event = fetch(k + 1) if k + 1 < len(starts) else None
        if not reads:
            pipeline.settle()
        collectives.elementwise(
            call.comm, call.channel, code, host, host, op, call.root, call.reverse
        )
        if writes:
            pipeline.back(result[start : start + size], host)
    if not writes and not call.inplace:
        result.copy_(source)
    pipeline.drained()


# ---------------------------------------------------------------- blocks that differ in size


def _inner(shape: Sequence[int], *axes: int) -> int:
    """Elements in one step along `axes`."""
    return math.prod(size for i, size in enumerate(shape) if i not in axes)


def _front(tensor: torch.Tensor, axis: int) -> torch.Tensor:
    """`tensor` contiguous with `axis` first; no copy where only sizes of one stand before it."""
    return contiguous(tensor.movedim(axis, 0))


def _blocks(call: Call, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    source = tensors[0].detach()
    target = tensors[-1].detach() if call.output else None
    fills = target is not None and is_plain(target) and not overlap(source, target)
    if call.splits is not None:
        result = _by_splits(call, source, target if fills else None)
    elif call.operation.name in ("Gather", "Allgather"):
        result = _gathering(call, source, target if fills else None)
    elif call.operation.name == "Alltoall":
        result, fills = _alltoall(call, source), False
    else:
        result = _scattering(call, source, target if fills else None)
    if target is None:
        return result
    return target if fills else target.copy_(result.view(target.shape))


def _gathering(call: Call, source: torch.Tensor, target: torch.Tensor | None) -> torch.Tensor:
    name, rank, axis = call.operation.name, call.comm.rank, call.gatheraxis
    everywhere = name == "Allgather"
    holds = everywhere or rank == call.root
    inner = _inner(source.shape, axis)
    counts = [n * inner for n in call.gathered]
    sent = _front(source, axis)
    shape = (sum(call.gathered) if holds else 0, *sent.shape[1:])
    received = empty(shape, sent) if target is None else target.view(shape)
    sends = [counts[rank]] * (call.comm.size if everywhere else 1)
    _move(call, name, sent, sends, received, counts if holds else [], counts, max(counts))
    return _back_in_place(received, axis)


def _scattering(call: Call, source: torch.Tensor, target: torch.Tensor | None) -> torch.Tensor:
    name, rank, axis = call.operation.name, call.comm.rank, call.scatteraxis
    holds = name == "Reduce_scatter" or rank == call.root
    whole = call.shape if name == "Scatter" else source.shape
    inner = _inner(whole, axis)
    counts = [n * inner for n in call.scattered]
    sent = _front(source, axis) if holds else source.new_empty(0, dtype=call.dtype)
    shape = (call.scattered[rank], *(n for i, n in enumerate(whole) if i != axis))
    received = empty(shape, sent) if target is None else target.view(shape)
    sends = counts if holds else []
    _move(call, name, sent, sends, received, [counts[rank]], counts, max(counts))
    return _back_in_place(received, axis)


def _back_in_place(result: torch.Tensor, axis: int) -> torch.Tensor:
    return result if axis == 0 else contiguous(result.movedim(0, axis))


def _by_splits(call: Call, source: torch.Tensor, target: torch.Tensor | None) -> torch.Tensor:
    assert call.splits is not None
    sent = contiguous(source)
    inner = math.prod(sent.shape[1:])
    shape = (sum(call.splits[1]), *sent.shape[1:])
    received = empty(shape, sent) if target is None else target.view(shape)
    sends = [n * inner for n in call.splits[0]]
    receives = [n * inner for n in call.splits[1]]
    _move(call, "Alltoall", sent, sends, received, receives, receives, call.longest)
    return received


def _alltoall(call: Call, source: torch.Tensor) -> torch.Tensor:
    rank, size = call.comm.rank, call.comm.size
    gather, scatter = call.gatheraxis, call.scatteraxis
    n, m = call.gathered, call.scattered
    sent = _front(source, scatter)
    if gather == scatter:  # one axis is cut anew: what overlaps of my old and their new rows
        inner = _inner(source.shape, scatter)
        sends = [count * inner for count in _overlaps(n, m, rank)]
        receives = [_overlaps(n, m, s)[rank] * inner for s in range(size)]
        received = empty((m[rank], *sent.shape[1:]), sent)
        longest = min(max(n), max(m)) * inner
        _move(call, "Alltoall", sent, sends, received, receives, receives, longest)
        return _back_in_place(received, scatter)
    inner = _inner(source.shape, gather, scatter)
    sends = [count * n[rank] * inner for count in m]
    receives = [m[rank] * count * inner for count in n]
    received = empty((sum(receives),), sent)
    longest = max(n) * max(m) * inner
    _move(call, "Alltoall", sent, sends, received, receives, receives, longest)
    shape = list(source.shape)
    shape[gather], shape[scatter] = sum(n), m[rank]
    result = empty(shape, sent)
    place = 0
    for count, block in zip(n, received.split(receives), strict=True):
        shape[gather] = count
        front = [m[rank], *(k for i, k in enumerate(shape) if i != scatter)]
        result.narrow(gather, place, count).copy_(block.view(front).movedim(0, scatter))
        place += count
    return result


def _overlaps(old: Sequence[int], new: Sequence[int], rank: int) -> list[int]:
    """How many of `rank`'s old rows each rank gets when one axis is cut anew."""
    start = sum(old[:rank])
    stop = start + old[rank]
    edges = [0, *itertools.accumulate(new)]
    return [max(0, min(stop, b) - max(start, a)) for a, b in itertools.pairwise(edges)]


def block_piece(comm: mpi.Comm, itemsize: int) -> int:
    """Elements of every block in a piece of staged blocks."""
    return max(2, piece_elements(itemsize) // comm.size // 2 * 2)


def _move(
    call: Call,
    name: str,
    sent: torch.Tensor,
    sends: Sequence[int],
    received: torch.Tensor,
    receives: Sequence[int],
    counts: Sequence[int],
    longest: int,
) -> None:
    """Move blocks of contiguous memory, in one MPI call or, where staged, piece by piece.

    `sends` and `receives` are the sizes of this rank's blocks, `counts` those that the MPI
    function takes (all ranks' blocks, or what this rank receives of each). No block of any rank
    is longer than `longest`, which is the same on every rank.
    """
    direct = plan_for(received.device).direct
    if direct and not call.staged:
        with on_device(received.device):
            _one_call(call, name, sent, sends, received, receives, counts)
        return
    # A piece of every block fits in a chunk, and so does every rank's side of a call.
    piece = block_piece(call.comm, received.element_size())
    pipeline = Pipeline(received.device)
    replicated = name in ("Gather", "Allgather")  # one block goes to everybody

    def cut(sizes: Sequence[int], at: int) -> list[int]:
        return [max(0, min(piece, n - at)) for n in sizes]

    chunk_out = pipeline.buffer(sum(cut(sends[:1] if replicated else sends, 0)), sent.dtype)
    chunk_in = pipeline.buffer(sum(cut(receives, 0)), received.dtype)
    if longest <= piece:
        if sent.numel():
            pipeline.ready(pipeline.out(chunk_out, sent.reshape(-1)))
        _one_call(call, name, chunk_out, sends, chunk_in, receives, counts)
        if received.numel():
            pipeline.back(received.view(-1), chunk_in)
        pipeline.drained()
        return
    flat_out, flat_in = sent.reshape(-1), received.view(-1)
    for at in range(0, longest, piece):
        now_out = cut(sends[:1] if replicated else sends, at)
        now_in = cut(receives, at)
        for start, place, n in zip(_starts(sends), _starts(now_out), now_out, strict=False):
            if n:
                part = flat_out[start + at : start + at + n]
                pipeline.out(chunk_out[place : place + n], part)
        pipeline.settle()
        host_out, host_in = chunk_out[: sum(now_out)], chunk_in[: sum(now_in)]
        _one_call(call, name, host_out, now_out, host_in, now_in, cut(counts, at))
        for start, place, n in zip(_starts(receives), _starts(now_in), now_in, strict=True):
            if n:
                pipeline.back(flat_in[start + at : start + at + n], host_in[place : place + n])
    pipeline.drained()


def _starts(sizes: Sequence[int]) -> list[int]:
    return [0, *itertools.accumulate(sizes)][: len(sizes)]


def _one_call(
    call: Call,
    name: str,
    sent: torch.Tensor,
    sends: Sequence[int],
    received: torch.Tensor,
    receives: Sequence[int],
    counts: Sequence[int],
) -> None:
    comm, channel, root = call.comm, call.channel, call.root
    if name == "Allgather":
        collectives.allgatherv(comm, channel, sent, received, counts)
    elif name == "Gather":
        collectives.gatherv(comm, channel, sent, received, counts, root)
    elif name == "Scatter":
        collectives.scatterv(comm, channel, sent, received, counts, root)
    elif name == "Reduce_scatter":
        assert call.op is not None
        if sent.device.type == "cpu":
            collectives.reduce_scatter(comm, channel, sent, received, counts, int(call.op))
        else:  # most reductions are functions of the core, which works in host memory
            host = torch.empty_like(received, device="cpu")
            collectives.reduce_scatter(comm, channel, sent.cpu(), host, counts, int(call.op))
            received.copy_(host)
    else:
        large = call.largest > mpi.limits()[1]
        collectives.alltoallv(comm, channel, sent, sends, received, receives, large)
