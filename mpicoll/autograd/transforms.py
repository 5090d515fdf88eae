"""What the transforms of torch see of a call: batches, tangents and tracked gradients.

A transform treats a tensor that does not depend on its input as a constant and skips the rule of
the operation, which one rank must not do alone. So inside transforms the ranks tell each other, in
one short exchange before each call, at which levels their tensors are batched, have tangents or
require grad. Constants are then lifted to the levels where another rank's tensor is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch._functorch import pyfunctorch
from torch.autograd import forward_ad

from .. import negotiate
from .._core import mpi
from .dummies import alias

__all__ = [
    "active",
    "align",
    "batch_size",
    "batches",
    "logical",
    "physical",
    "refuse_batches",
    "tie",
]

_functorch = torch._C._functorch
_Kind: Any = _functorch.TransformType
_are_active = torch._C._are_functorch_transforms_active
#: Whether a tensor is batched by torch's older vmap, which is_grads_batched and vectorize use.
batches: Callable[[torch.Tensor], bool] = _functorch.is_legacy_batchedtensor


def active() -> bool:
    """Whether a transform of torch.func or a level of forward-mode AD is active."""
    return _are_active() or forward_ad._current_level >= 0


def refuse_batches(name: str, why: str = "writes into a given tensor") -> None:
    """Raise RuntimeError inside torch.func.vmap."""
    if any(level.key() == _Kind.Vmap for level in _levels()):
        raise RuntimeError(
            f"{name} {why}, which torch.func.vmap cannot batch; use an operation that returns a "
            "new tensor (Bcast, Reduce, Allgather, ...), or communicate outside vmap"
        )


def _levels() -> Sequence[Any]:
    return pyfunctorch.retrieve_all_functorch_interpreters() if _are_active() else ()


def _at(level: int, tensor: torch.Tensor) -> torch.Tensor | None:
    """What a tensor is at a level of the stack; None if it is a constant there."""
    while True:
        here = _functorch.maybe_get_level(tensor)
        if here is None or here < level:
            return None
        if here == level:
            return tensor
        tensor = _functorch.get_unwrapped(tensor)


def _with_top(level: int) -> ExitStack:
    """The stack without the levels above `level`."""
    stack = ExitStack()
    for interpreter in reversed(_levels()):
        if interpreter.level() == level:
            break
        stack.enter_context(pyfunctorch.temporarily_pop_interpreter_stack())
    return stack


def _has_tangent(tensor: torch.Tensor) -> bool:
    return forward_ad.unpack_dual(tensor).tangent is not None


def _seen(kind: Any, level: int, tensors: Sequence[torch.Tensor]) -> bool:
    """Whether the transform of `kind` at `level` sees a variable among the tensors."""
    found = [t for t in (_at(level, tensor) for tensor in tensors) if t is not None]
    if kind == _Kind.Vmap:
        return bool(found)
    if kind == _Kind.Jvp:
        with _with_top(level):
            return any(map(_has_tangent, found))
    if kind == _Kind.Grad:
        return torch.is_grad_enabled() and any(t.requires_grad for t in found)
    return False


def align(name: str, comm: mpi.Comm, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Let the transforms see a call on every rank if they see it on one. Collective.

    Returns the tensors, the first of them changed where it is a constant here and a variable on
    another rank.

    Raises
    ------
    RuntimeError, on all ranks
        The ranks are inside different transforms, or the gradient that is taken on one rank does
        not depend on the tensor of another one, whose node it would wait for in vain.
    """
    levels = _levels()
    dual = forward_ad._current_level >= 0 and not levels
    kinds = [(level.key(), level.level()) for level in levels]
    stack = 1
    for kind, _ in kinds:
        stack = stack * 8 + kind.value
    seen = 0
    for i, (kind, level) in enumerate(kinds):
        seen |= _seen(kind, level, tensors) << i
    if dual:
        seen = int(any(map(_has_tangent, tensors)))
        stack = 2
    sizes = 1
    for level in levels:
        if level.key() == _Kind.Vmap:
            sizes *= level.batch_size() + 1
    rows = negotiate.agree(name, comm, (stack, seen, sizes), (stack, seen, sizes))
    where = f"{name} on rank {comm.rank} of {comm.size}"
    if len({row[0] for row in rows}) > 1 or len({row[2] for row in rows}) > 1:
        raise RuntimeError(
            f"{where}: the ranks are inside different transforms of torch, or inside vmaps over "
            "batches of different sizes; every rank must apply the same ones"
        )
    first = tensors[0]
    if dual:
        if not seen and any(row[1] for row in rows):
            first = forward_ad.make_dual(first, torch.zeros_like(first))
        return (first, *tensors[1:])
    for i, (kind, level) in enumerate(kinds):
        flags = [row[1] >> i & 1 for row in rows]
        if any(flags) and not all(flags) and kind == _Kind.Grad:
            missing = ", ".join(str(r) for r, flag in enumerate(flags) if not flag)
            raise RuntimeError(
                f"{where}: a transform of torch.func differentiates this call on some ranks, but "
                f"on rank {missing} its tensor does not depend on the transform's input, so that "
                "the others would wait for that rank in backward; let the tensor depend on the "
                "input (0 * x), or use backward()"
            )
        if any(flags) and not seen >> i & 1:
            first = _lift(kind, level, first)
    return (first, *tensors[1:])


def _lift(kind: Any, level: int, tensor: torch.Tensor) -> torch.Tensor:
    """The same value as a variable of a transform: with zero tangents, or once for each sample."""
    yes = torch.ones((), dtype=torch.bool, device=tensor.device)
    with _with_top(level):
        other = torch.zeros((), dtype=tensor.dtype, device=tensor.device)
        if kind == _Kind.Vmap:
            size = _levels()[-1].batch_size()
            yes = _functorch._add_batch_dim(yes.expand(size), 0, level)
        else:
            other = forward_ad.make_dual(other, torch.zeros_like(other))
    return torch.where(yes, tensor, other)


def _older_level() -> int:
    level = torch._C._vmapmode_increment_nesting() - 1
    torch._C._vmapmode_decrement_nesting()
    return level


def batch_size(tensors: Sequence[torch.Tensor]) -> int:
    """The size of the batch of torch's older vmap that some of the tensors belong to."""
    level = _older_level()
    found = next(t for t in tensors if batches(t))
    return torch._remove_batch_dim(found, level, 0, 0).shape[0]


def physical(tensor: torch.Tensor, size: int) -> torch.Tensor:
    """All samples of a tensor in torch's older vmap, along a new first dimension."""
    return torch._remove_batch_dim(tensor, _older_level(), size, 0)


def logical(tensor: torch.Tensor, position: int) -> torch.Tensor:
    """The inverse of :func:`physical`; the batch is dimension `position`."""
    return torch._add_batch_dim(tensor, position, _older_level())


def tie(gradient: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
    """The gradient of a result, at every level of the transforms as dependent as the result is.

    The next derivative then visits the call and its adjoint on every rank, also where this rank's
    gradient is a constant.
    """
    return alias(gradient, result.reshape(-1)[:0])
