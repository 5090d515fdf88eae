"""The adjoint of every call, made of differentiable calls."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .. import watch
from ..dispatch import BACKWARD, Call, block_piece
from ..ops import OPERATIONS, REDUCTIONS, ReduceOp
from ..staging import widened
from . import functions

__all__ = ["adjoint", "pushforward", "whole_adjoint"]


def adjoint(call: Call, saved: Sequence[torch.Tensor], gradient: torch.Tensor) -> torch.Tensor:
    """The gradient of the first tensor of `call`, from the gradient of its result."""
    whole = whole_adjoint(call)
    if whole is not None:
        return functions.apply(whole, gradient)
    if call.op is ReduceOp.AVG:
        return _average(call, gradient)
    if call.derivative == "winner":
        tensor, result = saved[:2]
        return _winner(call, tensor, result, gradient)
    return _product(call, saved[0], gradient)


def pushforward(call: Call, saved: Sequence[torch.Tensor], tangent: torch.Tensor) -> torch.Tensor:
    """The tangent of the result of `call`, from the tangent of its first tensor."""
    if call.derivative == "linear":
        return functions.apply(call, tangent)
    tensor = saved[0]
    if call.derivative == "winner":
        factor = _share(call, tensor, saved[1].detach())
    else:
        factor = _others(call, tensor)
    return functions.apply(call.replace(op=ReduceOp.SUM), tangent * factor)


def whole_adjoint(call: Call) -> Call | None:
    """The one call that is the adjoint; None where there is more to it."""
    if call.op is None or call.op is ReduceOp.SUM:
        return call.dual()
    if call.op is ReduceOp.AVG:
        dual = call.dual()
        divisor = call.divisor or call.comm.size
        # one rounding for 16-bit floats, as in forward
        if dual.op is ReduceOp.SUM and divisor == call.comm.size:
            dual.op, dual.divisor = ReduceOp.AVG, divisor
            return dual
    return None


def _spread(call: Call, gradient: torch.Tensor) -> torch.Tensor:
    """G: the gradients of the results, summed where an element has several, at the input."""
    return functions.apply(call.dual(), gradient)


def _average(call: Call, gradient: torch.Tensor) -> torch.Tensor:
    dual = call.dual()
    divisor = call.divisor or call.comm.size
    if dual.op is not ReduceOp.SUM:
        return functions.apply(dual, gradient) / divisor
    return (functions.apply(dual, widened(gradient)) / divisor).to(gradient.dtype)


def _require_presence(call: Call) -> tuple[int, ...] | None:
    """The ranks that still take part, under Join; an error on all if one has left since forward.

    What an absent rank contributed in forward is not known to the others.
    """
    if not watch.on:
        return None
    everybody = tuple(range(call.comm.size))
    now = watch.taking_part(call.comm)
    if (now or everybody) != (call.present or everybody):
        assert call.op is not None
        watch.refuse(
            call.comm,
            f"{call.operation.name} of {call.op.name}",
            f"its gradient is wanted from ranks {now or everybody}, but ranks "
            f"{call.present or everybody} took part in it; call backward() in the same iteration",
        )
    return now


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
    total = _spread(call, gradient)
    present = _require_presence(call)
    if present and call.root >= 0 and call.root not in present:
        return total  # zeros: nobody has the result
    # As it came out of the call; the caller's tensor that it filled may have another shape.
    return total * _share(call, tensor, result.detach().reshape(gradient.shape), present)


def _share(
    call: Call, tensor: torch.Tensor, result: torch.Tensor, present: Sequence[int] | None = None
) -> torch.Tensor:
    """MAX, MIN: how much of every element of the result came from this rank's `tensor`."""
    assert call.op is not None
    best = _replicate(call, result)
    mine = tensor.detach() == best
    if REDUCTIONS[call.op].pairs:  # both value and index decide; only the value has a gradient
        both = mine.all(-1, keepdim=True)
        mine = torch.cat([both, torch.zeros_like(both)], -1)
        count = _like(call, mine.to(torch.int32), ReduceOp.SUM).clamp(min=1)
    else:
        count = _like(call, mine.to(torch.int32), ReduceOp.SUM)
    if present:  # nobody has the pieces of ranks that are gone; theirs is the gradient zero
        count = torch.where(best.isnan(), count, count.clamp(min=1))
    return mine.to(tensor.dtype) / count


def _product(call: Call, tensor: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """PROD: times the product of the other ranks' elements, exact also where some are zero."""
    total = _spread(call, gradient)
    present = _require_presence(call)
    others = _others(call, tensor) if present is None else _present(call, tensor, present)
    return total * others.conj()


def _present(call: Call, tensor: torch.Tensor, present: Sequence[int]) -> torch.Tensor:
    """:func:`_others`, where ranks that do not take part any more count as ones."""
    size, rank = call.comm.size, call.comm.rank
    everyone = Call(
        OPERATIONS["Allgather"], call.comm, channel=BACKWARD, gatheraxis=0, gathered=[1] * size,
        shape=(size, *tensor.shape), staged=call.staged,
    )  # fmt: skip
    rows = widened(functions.apply(everyone, tensor.unsqueeze(0)))
    before = [rows[s] for s in present if s != rank]
    product = torch.stack(before).prod(0) if before else torch.ones_like(rows[0])
    return product.to(tensor.dtype)


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
        # In pieces on all ranks or on none: others may stage what this rank need not.
        staged=call.staged or block > block_piece(call.comm, tensor.element_size()),
        largest=block * size,
        longest=block,
    )
    rows = functions.apply(exchange, padded).view(size, block)
    wide = widened(rows)
    ones = torch.ones_like(wide[:1])
    before = torch.cat([ones, wide[:-1]]).cumprod(0)
    after = torch.cat([wide[1:], ones]).flip(0).cumprod(0).flip(0)
    back = functions.apply(exchange.dual(), (before * after).to(rows.dtype).reshape(-1))
    return back[: flat.numel()].view(tensor.shape)
