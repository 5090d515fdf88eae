"""The adjoint of every call, made of differentiable calls."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..dispatch import BACKWARD, Call
from ..ops import OPERATIONS, REDUCTIONS, ReduceOp
from . import functions

__all__ = ["adjoint", "whole_adjoint"]


def adjoint(call: Call, saved: Sequence[torch.Tensor], gradient: torch.Tensor) -> torch.Tensor:
    """The gradient of the first tensor of `call`, from the gradient of its result."""
    whole = whole_adjoint(call)
    if whole is not None:
        return functions.apply(whole, gradient)
    if call.op is ReduceOp.AVG:
        return _spread(call, gradient) / call.comm.size
    if call.derivative == "winner":
        tensor, result = saved
        return _winner(call, tensor, result, gradient)
    return _product(call, saved[0], gradient)


def whole_adjoint(call: Call) -> Call | None:
    """The one call that is the adjoint; None where there is more to it."""
    if call.op is None or call.op is ReduceOp.SUM:
        return call.dual()
    if call.op is ReduceOp.AVG:
        dual = call.dual()
        if dual.op is ReduceOp.SUM:  # one rounding for 16-bit floats, as in forward
            dual.op = ReduceOp.AVG
            return dual
    return None


def _spread(call: Call, gradient: torch.Tensor) -> torch.Tensor:
    """G: the gradients of the results, summed where an element has several, at the input."""
    return functions.apply(call.dual(), gradient)


def _replicate(call: Call, result: torch.Tensor) -> torch.Tensor:
    """The result as every rank's whole tensor, without history."""
    if call.operation.name == "Allreduce":
        return result
    return functions.apply(call.dual(), result.detach())


def _like(call: Call, tensor: torch.Tensor, op: ReduceOp) -> torch.Tensor:
    """An Allreduce of `tensor` on the backward channel."""
    return functions.apply(
        Call(OPERATIONS["Allreduce"], call.comm, channel=BACKWARD, op=op), tensor
    )


def _winner(
    call: Call, tensor: torch.Tensor, result: torch.Tensor, gradient: torch.Tensor
) -> torch.Tensor:
    """MAX, MIN: to the ranks whose element is the result, ties share evenly."""
    assert call.op is not None
    total = _spread(call, gradient)
    # As it came out of the call; the caller's tensor that it filled may have another shape.
    best = _replicate(call, result.detach().reshape(gradient.shape))
    mine = tensor.detach() == best
    if REDUCTIONS[call.op].pairs:  # both value and index decide; only the value has a gradient
        both = mine.all(-1, keepdim=True)
        mine = torch.cat([both, torch.zeros_like(both)], -1)
        count = _like(call, mine.to(torch.int32), ReduceOp.SUM).clamp(min=1)
    else:
        count = _like(call, mine.to(torch.int32), ReduceOp.SUM)
    return total * (mine.to(total.dtype) / count)


def _product(call: Call, tensor: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """PROD: times the product of the other ranks' elements, exact also where some are zero."""
    total = _spread(call, gradient)
    return total * _others(call, tensor).conj()


def _others(call: Call, tensor: torch.Tensor) -> torch.Tensor:
    """The product of all other ranks' elements, differentiable.

    Every rank gets one block of all ranks' tensors, multiplies there, and sends the results
    back: as much traffic as an all-reduce, and no division.
    """
    size = call.comm.size
    flat = tensor.reshape(-1)
    block = -(-flat.numel() // size)
    padded = torch.nn.functional.pad(flat, (0, block * size - flat.numel()), value=1)
    exchange = Call(
        OPERATIONS["Alltoall"],
        call.comm,
        channel=BACKWARD,
        splits=([block] * size, [block] * size),
        staged=call.staged,
        largest=block * size,
        longest=block,
    )
    rows = functions.apply(exchange, padded).view(size, block)
    wide = rows.float() if rows.dtype in (torch.float16, torch.bfloat16) else rows
    ones = torch.ones_like(wide[:1])
    before = torch.cat([ones, wide[:-1]]).cumprod(0)
    after = torch.cat([wide[1:], ones]).flip(0).cumprod(0).flip(0)
    back = functions.apply(exchange.dual(), (before * after).to(rows.dtype).reshape(-1))
    return back[: flat.numel()].view(tensor.shape)
