"""Lists of tensors: a block for every rank, and the stack of all ranks' tensors taken apart."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .._core import collectives, mpi
from ..staging import Pipeline, contiguous, is_plain, on_device, plan_for
from .functions import anchor, needs_graph

__all__ = ["exchange", "unstack"]

Shapes = Sequence[torch.Size]


def _move(
    comm: mpi.Comm, sends: Sequence[torch.Tensor], receives: Sequence[torch.Tensor]
) -> None:
    """Send every rank its tensor and fill the contiguous `receives`."""
    device = receives[0].device
    sends = [contiguous(t.detach()) for t in sends]
    if plan_for(device).direct:
        with on_device(device):
            collectives.exchange(comm, sends, receives)
        return
    pipeline = Pipeline(device)
    hosts = [pipeline.buffer(t.numel(), t.dtype) for t in sends]
    places = [pipeline.buffer(t.numel(), t.dtype) for t in receives]
    events = [
        pipeline.out(host, t.reshape(-1))
        for host, t in zip(hosts, sends, strict=True)
        if t.numel()
    ]
    for event in events:
        pipeline.ready(event)
    collectives.exchange(comm, hosts, places)
    for t, place in zip(receives, places, strict=True):
        if t.numel():
            pipeline.back(t.view(-1), place)
    pipeline.drained()


class _Exchange(torch.autograd.Function):
    """``forward(comm, shapes, outputs, *tensors)``: tensor s to rank s, rank s's tensor here."""

    @staticmethod
    def forward(comm, shapes, outputs, *tensors):
        sends = tensors[: comm.size]
        if outputs:
            targets = [t.detach() for t in tensors[comm.size :]]
            receives = [t if is_plain(t) else sends[0].new_empty(t.shape) for t in targets]
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
        ctx.rest = [
            (t.shape, t.dtype, t.device) if t.requires_grad else None for t in tensors[size:]
        ]
        if outputs:
            ctx.mark_dirty(*tensors[size:])

    @staticmethod
    def backward(ctx, *gradients):
        back = exchange(ctx.comm, gradients, ctx.shapes)
        rest = (
            None if m is None else torch.zeros(m[0], dtype=m[1], device=m[2]) for m in ctx.rest
        )
        return None, None, None, *back, *rest


_exchange = super(torch.autograd.Function, _Exchange).apply


def exchange(
    comm: mpi.Comm,
    tensors: Sequence[torch.Tensor],
    shapes: Shapes,
    outputs: Sequence[torch.Tensor] = (),
    anchored: bool = False,
) -> tuple[torch.Tensor, ...]:
    """Send `tensors[s]` to rank s; return what rank s sent, of shape `shapes[s]`, for every s.

    Fills and returns `outputs` where they are given.
    """
    if needs_graph(*tensors, *outputs):
        return _exchange(comm, shapes, bool(outputs), *tensors, *outputs)
    if anchored:
        return _exchange(comm, shapes, False, *tensors, anchor())
    result = _Exchange.forward(comm, shapes, bool(outputs), *tensors, *outputs)
    for output in outputs:
        torch.autograd.graph.increment_version(output)
    return result


class _Unstack(torch.autograd.Function):
    """The rows of a tensor as tensors of their own that share its memory; zeros without rows."""

    @staticmethod
    def forward(stacked: torch.Tensor, size: int) -> tuple[torch.Tensor, ...]:
        row = stacked.shape[1:]
        if stacked.shape[0] == 0:
            return tuple(stacked.new_zeros(row) for _ in range(size))
        if type(stacked) is not torch.Tensor:  # a wrapper's storage cannot be shared this way
            return tuple(part.clone() for part in stacked.unbind(0))
        n = row.numel()
        # Not views: an output of a node with several outputs that is a view is frozen.
        return tuple(
            stacked.new_empty(0).set_(
                stacked.untyped_storage(), stacked.storage_offset() + i * n, row
            )
            for i in range(size)
        )

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        ctx.shape = inputs[0].shape

    @staticmethod
    def backward(ctx, *gradients):
        stacked = torch.stack(gradients)
        return stacked if ctx.shape[0] else stacked[:0], None


_unstack = super(torch.autograd.Function, _Unstack).apply


def unstack(stacked: torch.Tensor, size: int) -> tuple[torch.Tensor, ...]:
    """The `size` rows of `stacked`; zeros where it has none."""
    if needs_graph(stacked):
        return _unstack(stacked, size)
    return _Unstack.forward(stacked, size)
