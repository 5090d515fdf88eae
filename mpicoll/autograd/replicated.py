"""The pair for losses that every rank computes alike."""

from __future__ import annotations

import torch

from .._core import mpi
from ..dispatch import BACKWARD, USER, Call
from ..ops import OPERATIONS, ReduceOp
from .functions import apply, needs_graph
from .nodes import dense

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

    @staticmethod
    def backward(ctx, gradient):
        return reduce_from(dense(gradient), ctx.comm, BACKWARD), None, None


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


def copy_to(tensor: torch.Tensor, comm: mpi.Comm, channel: int = USER) -> torch.Tensor:
    """Identity in forward, all-reduce in backward."""
    if not needs_graph(tensor):
        return tensor.clone(memory_format=torch.contiguous_format)
    return _CopyTo.apply(tensor, comm, channel)


def reduce_from(tensor: torch.Tensor, comm: mpi.Comm, channel: int = USER) -> torch.Tensor:
    """All-reduce in forward, identity in backward."""
    if not needs_graph(tensor):
        return _sum(tensor, comm, channel)
    return _ReduceFrom.apply(tensor, comm, channel)
