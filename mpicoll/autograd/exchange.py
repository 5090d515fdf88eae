"""Lists of tensors: a block for every rank, and the stack of all ranks' tensors taken apart."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .. import watch
from .._core import collectives, mpi
from ..staging import Pipeline, contiguous, is_plain, on_device, overlap, plan_for
from . import lockstep, transforms
from .dummies import alias, join
from .functions import anchor, needs_graph
from .nodes import dense, node

__all__ = ["exchange", "move", "unstack"]

Shapes = Sequence[torch.Size]


def _move(comm: mpi.Comm, sends: Sequence[torch.Tensor], receives: Sequence[torch.Tensor]) -> None:
    """Send every rank its tensor and fill the contiguous `receives`."""
    if watch.on:
        watch.exchange(comm, sends, receives, lambda: move(comm, sends, receives))
    else:
        move(comm, sends, receives)


def move(comm: mpi.Comm, sends: Sequence[torch.Tensor], receives: Sequence[torch.Tensor]) -> None:
    """Send every rank its tensor and fill the contiguous `receives`."""
    device = receives[0].device
    sends = [contiguous(t.detach()) for t in sends]
    if plan_for(device).direct:
        with on_device(device):
            collectives.exchange(comm, sends, receives)
        return
    rank = comm.rank
    if receives[rank].numel():
        receives[rank].copy_(sends[rank])  # the block for this rank stays on the device
    out = [0 if s == rank else t.numel() for s, t in enumerate(sends)]
    into = [0 if s == rank else t.numel() for s, t in enumerate(receives)]
    chunk_bytes, count_limit = mpi.limits()
    # The pieces into which the core cuts the blocks of ranks whose tensors MPI reaches directly.
    piece = max(1, min(count_limit, chunk_bytes // receives[rank].element_size()))
    if sum(out) <= piece and sum(into) <= piece:
        _move_at_once(comm, sends, receives, out, into)
    else:
        _move_in_pieces(comm, sends, receives, out, into, piece)


def _move_at_once(
    comm: mpi.Comm,
    sends: Sequence[torch.Tensor],
    receives: Sequence[torch.Tensor],
    out: Sequence[int],
    into: Sequence[int],
) -> None:
    """Stage everything through two chunks: one copy out, one exchange, one copy in."""
    pipeline = Pipeline(receives[0].device)
    host_out = pipeline.buffer(sum(out), receives[0].dtype)
    host_in = pipeline.buffer(sum(into), receives[0].dtype)
    if host_out.numel():
        parts = [t.view(-1) for t, n in zip(sends, out, strict=True) if n]
        packed = parts[0] if len(parts) == 1 else torch.cat(parts)
        pipeline.follow()
        pipeline.ready(pipeline.out(host_out, packed))
    collectives.exchange(comm, host_out.split(list(out)), host_in.split(list(into)))
    places = [t.view(-1) for t, n in zip(receives, into, strict=True) if n]
    if len(places) == 1:
        pipeline.back(places[0], host_in)
        pipeline.drained()
    elif places:
        packed = receives[0].new_empty(sum(into))
        pipeline.follow()
        pipeline.back(packed, host_in)
        pipeline.drained()
        for place, part in zip(places, packed.split([n for n in into if n]), strict=True):
            place.copy_(part)


def _move_in_pieces(
    comm: mpi.Comm,
    sends: Sequence[torch.Tensor],
    receives: Sequence[torch.Tensor],
    out: Sequence[int],
    into: Sequence[int],
    piece: int,
) -> None:
    """Stage through two chunks, one for each direction, one piece of one block at a time.

    Pieces in the outer loop, peers in the inner one: a rank that is reached directly completes a
    round of pieces with all peers before it starts the next, so no peer may be served ahead.
    """
    rank, size = comm.rank, comm.size
    pipeline = Pipeline(receives[0].device)
    host_out = pipeline.buffer(min(piece, max(out)), receives[0].dtype)
    host_in = pipeline.buffer(min(piece, max(into)), receives[0].dtype)
    sent = [host_out[:0]] * size
    received = [host_in[:0]] * size
    for at in range(0, max(*out, *into), piece):
        for distance in range(1, size):
            to, source = (rank + distance) % size, (rank - distance) % size
            n = max(0, min(piece, out[to] - at))
            m = max(0, min(piece, into[source] - at))
            if n:
                part = sends[to].view(-1)[at : at + n]
                pipeline.ready(pipeline.out(host_out[:n], part))
            pipeline.settle()  # the previous piece has left host_in
            sent[to], received[source] = host_out[:n], host_in[:m]
            collectives.exchange(comm, sent, received)
            sent[to], received[source] = host_out[:0], host_in[:0]
            if m:
                pipeline.back(receives[source].view(-1)[at : at + m], host_in[:m])
    pipeline.drained()


class _Exchange(torch.autograd.Function):
    """``forward(comm, shapes, outputs, *tensors)``: tensor s to rank s, rank s's tensor here."""

    @staticmethod
    def forward(comm, shapes, outputs, *tensors):
        sends = tensors[: comm.size]
        if outputs:
            targets = [t.detach() for t in tensors[comm.size :]]
            receives = [
                t if is_plain(t) and not any(overlap(t, s) for s in sends) else t.new_empty(t.shape)
                for t in targets
            ]
        else:
            receives = [sends[0].new_empty(shape) for shape in shapes]
        _move(comm, sends, receives)
        if not outputs:
            return tuple(receives)
        for target, received in zip(targets, receives, strict=True):
            if received is not target:
                target.copy_(received)
        return tuple(tensors[comm.size :])

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        ctx.comm, _, outputs, *tensors = inputs
        size = ctx.comm.size
        ctx.shapes = [t.shape for t in tensors[:size]]
        ctx.received = inputs[1]
        ctx.dtype, ctx.device = tensors[0].dtype, tensors[0].device
        ctx.rest = [
            (t.shape, t.dtype, t.device) if t.requires_grad else None for t in tensors[size:]
        ]
        if outputs:
            ctx.mark_dirty(*tensors[size:])
        ctx.tied = transforms.active()
        if ctx.tied:
            ctx.save_for_backward(output[0])

    @staticmethod
    def backward(ctx, *gradients):
        gradients = [dense(g) for g in gradients]
        if ctx.tied:
            gradients[0] = transforms.tie(gradients[0], *ctx.saved_tensors)
        back = exchange(ctx.comm, gradients, ctx.shapes)
        # Zeros that still hang on the node that ran, so that their backward runs it, too.
        rest = (
            None if m is None else join(torch.zeros(m[0], dtype=m[1], device=m[2]), back)
            for m in ctx.rest
        )
        return None, None, None, *back, *rest

    @staticmethod
    def jvp(ctx, _comm, _shapes, _outputs, *tangents):
        zeros = torch.zeros((), dtype=ctx.dtype, device=ctx.device)
        sends = [
            zeros.expand(shape) if t is None else t
            for shape, t in zip(ctx.shapes, tangents[: ctx.comm.size], strict=True)
        ]
        return exchange(ctx.comm, sends, ctx.received)

    @staticmethod
    def vmap(info, in_dims, comm, shapes, outputs, *tensors):
        size = info.batch_size
        moved = [
            t.unsqueeze(-1).expand(*t.shape, size) if dim is None else t.movedim(dim, -1)
            for t, dim in zip(tensors, in_dims[3:], strict=True)
        ]
        results = _exchange(comm, [(*shape, size) for shape in shapes], outputs, *moved)
        return results, tuple(t.dim() - 1 for t in results)


_exchange = node(_Exchange)


def exchange(
    comm: mpi.Comm,
    tensors: Sequence[torch.Tensor],
    shapes: Shapes,
    outputs: Sequence[torch.Tensor] = (),
    anchored: bool = False,
    dummies: Sequence[torch.Tensor] = (),
) -> tuple[torch.Tensor, ...]:
    """Send `tensors[s]` to rank s; return what rank s sent, of shape `shapes[s]`, for every s.

    Fills and returns `outputs` where they are given. `anchored` puts it in the graph though no
    tensor here requires grad; `dummies` are then inputs of the node and get zero gradients.
    """
    if any(map(transforms.batches, tensors)):
        return _older_batch(comm, tensors, shapes)
    if transforms.active():
        if outputs:
            transforms.refuse_batches("all_to_all")
            made = exchange(comm, tensors, shapes)
            return tuple(o.copy_(m) for o, m in zip(outputs, made, strict=True))
        aligned = transforms.align("exchange", comm, [*tensors, *dummies])
        return _exchange(comm, shapes, False, *aligned)
    chain = lockstep.chain_of(comm, tensors[0].dtype) if watch.ordered else None
    if chain is not None:
        first = join(tensors[0], [chain.tip])
        rest = outputs or dummies
        results = _exchange(comm, shapes, bool(outputs), first, *tensors[1:], *rest)
        chain.advance(results[0])
        return results
    if needs_graph(*tensors, *outputs):
        return _exchange(comm, shapes, bool(outputs), *tensors, *outputs)
    if anchored:
        return _exchange(comm, shapes, False, *tensors, *(dummies or [anchor()]))
    result = _Exchange.forward(comm, shapes, bool(outputs), *tensors, *outputs)
    for output in outputs:
        torch.autograd.graph.increment_version(output)
    return result


def _older_batch(
    comm: mpi.Comm, tensors: Sequence[torch.Tensor], shapes: Shapes
) -> tuple[torch.Tensor, ...]:
    """:func:`exchange` of tensors some of which torch's older vmap has batched."""
    size = transforms.batch_size(tensors)
    wholes = [transforms.physical(t, size) for t in tensors]
    made = exchange(
        comm, [t.movedim(0, -1) for t in wholes], [torch.Size((*s, size)) for s in shapes]
    )
    return tuple(transforms.logical(t, t.dim() - 1) for t in made)


class _Unstack(torch.autograd.Function):
    """The rows of a tensor as tensors of their own that share its memory; zeros without rows."""

    @staticmethod
    def forward(stacked: torch.Tensor, size: int) -> tuple[torch.Tensor, ...]:
        row = stacked.shape[1:]
        if stacked.shape[0] == 0:
            return tuple(stacked.new_zeros(row) for _ in range(size))
        if type(stacked) is not torch.Tensor:  # a wrapper's storage cannot be shared this way
            return tuple(part.clone() for part in stacked.unbind(0))
        n, strides = row.numel(), stacked.stride()[1:]
        # Not views: an output of a node with several outputs that is a view is frozen.
        return tuple(
            stacked.new_empty(0).set_(
                stacked.untyped_storage(), stacked.storage_offset() + i * n, row, strides
            )
            for i in range(size)
        )

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        ctx.shape = inputs[0].shape

    @staticmethod
    def backward(ctx, *gradients):
        stacked = torch.stack([dense(g) for g in gradients])
        return stacked if ctx.shape[0] else stacked[:0], None


_unstack = node(_Unstack)


def unstack(stacked: torch.Tensor, size: int) -> tuple[torch.Tensor, ...]:
    """The `size` rows of `stacked`; zeros where it has none."""
    if transforms.active() or transforms.batches(stacked):
        rows = stacked
        if rows.shape[0] == 0:
            rows = alias(stacked.new_zeros(size, *stacked.shape[1:]), stacked)
        return tuple(row.clone() for row in rows.unbind(0))
    if needs_graph(stacked):
        return _unstack(stacked, size)
    return _Unstack.forward(stacked, size)
