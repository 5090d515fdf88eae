"""The pair for losses that every rank computes alike."""

from __future__ import annotations

import torch

from .._core import mpi
from ..dispatch import BACKWARD, USER, Call
from ..ops import OPERATIONS, ReduceOp
from . import transforms
from .functions import apply, needs_graph
from .nodes import dense, node

__all__ = ["copy_to", "reduce_from"]


def _sum(tensor: torch.Tensor, comm: mpi.Comm, channel: int) -> torch.Tensor:
    call = Call(OPERATIONS["Allreduce"], comm, channel=channel, op=ReduceOp.SUM)
    return apply(call, tensor.detach())


class _CopyTo(torch.autograd.Function):
    @staticmethod
    def forward(tensor: torch.Tensor, comm: mpi.Comm, channel: int) -> torch.Tensor:
        return tensor.clone(memory_format=torch.contiguous_format)

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        ctx.comm = inputs[1]
        ctx.tied = transforms.active()
        if ctx.tied:
            ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx, gradient):
        gradient = dense(gradient)
        if ctx.tied:
            gradient = transforms.tie(gradient, *ctx.saved_tensors)
        return reduce_from(gradient, ctx.comm, BACKWARD), None, None

    @staticmethod
    def jvp(ctx, tangent, *_):
        return copy_to(tangent, ctx.comm)

    @staticmethod
    def vmap(info, in_dims, tensor, comm, channel):
        return copy_to(tensor.movedim(in_dims[0], 0), comm, channel), 0


class _ReduceFrom(torch.autograd.Function):
    @staticmethod
    def forward(tensor: torch.Tensor, comm: mpi.Comm, channel: int) -> torch.Tensor:
        return _sum(tensor, comm, channel)

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        ctx.comm = inputs[1]

    @staticmethod
    def backward(ctx, gradient):
        return copy_to(dense(gradient), ctx.comm, BACKWARD), None, None

    @staticmethod
    def jvp(ctx, tangent, *_):
        return reduce_from(tangent, ctx.comm)

    @staticmethod
    def vmap(info, in_dims, tensor, comm, channel):
        return _reduce_from(tensor.movedim(in_dims[0], 0), comm, channel), 0


_copy_to = node(_CopyTo)
_reduce_from = node(_ReduceFrom)


def copy_to(tensor: torch.Tensor, comm: mpi.Comm, channel: int = USER) -> torch.Tensor:
    """Identity in forward, all-reduce in backward."""
    if not needs_graph(tensor):
        return tensor.clone(memory_format=torch.contiguous_format)
    return _copy_to(tensor, comm, channel)


def reduce_from(tensor: torch.Tensor, comm: mpi.Comm, channel: int = USER) -> torch.Tensor:
    """All-reduce in forward, identity in backward."""
    if not needs_graph(tensor) or transforms.batches(tensor):
        return _sum(tensor, comm, channel)
    if transforms.active():
        (tensor,) = transforms.align("reduce_from_group", comm, [tensor])
    return _reduce_from(tensor, comm, channel)
