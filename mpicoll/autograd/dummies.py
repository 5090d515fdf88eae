"""Dependencies of the graph that carry no data."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .nodes import node

__all__ = ["JoinDummies", "join"]


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(loopthrough: torch.Tensor, *dummies: torch.Tensor) -> torch.Tensor:
        return loopthrough.detach()

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        ctx.like = output.shape, output.dtype, output.device
        ctx.metas = [(d.shape, d.dtype, d.device) for d in inputs[1:]]
        ctx.wanted = [d.requires_grad for d in inputs[1:]]

    @staticmethod
    def backward(ctx, gradient):
        # The zeros carry the dependency on, reversed, for the next derivative.
        zeros = (
            join(torch.zeros(shape, dtype=dtype, device=device), [gradient]) if wanted else None
            for (shape, dtype, device), wanted in zip(ctx.metas, ctx.wanted, strict=True)
        )
        return gradient, *zeros

    @staticmethod
    def jvp(ctx, tangent, *_):
        if tangent is None:  # only the dummies have one
            shape, dtype, device = ctx.like
            return torch.zeros(shape, dtype=dtype, device=device)
        return tangent.view_as(tangent)

    @staticmethod
    def vmap(info, in_dims, loopthrough, *dummies):
        moved = [
            t if dim is None else t.movedim(dim, 0)
            for t, dim in zip((loopthrough, *dummies), in_dims, strict=True)
        ]
        return _join(*moved), None if in_dims[0] is None else 0


_join = node(_Join)
#: The same memory and history, without being a view; further arguments are dummies.
alias = _join


def join(loopthrough: torch.Tensor, dummies: Sequence[torch.Tensor]) -> torch.Tensor:
    """`loopthrough` with every dummy as a dependency; itself if no dummy requires grad."""
    if not torch.is_grad_enabled() or not any(d.requires_grad for d in dummies):
        return loopthrough
    return _join(loopthrough, *dummies)


def JoinDummies(loopthrough: torch.Tensor, dummies: Sequence[torch.Tensor]) -> torch.Tensor:
    """Make tensors dependencies of another tensor, without changing its value.

    Parameters
    ----------
    loopthrough
        The tensor that is passed through. Its gradient passes unchanged.
    dummies
        Tensors whose producers must run in backward before those of `loopthrough`. Each gets a
        zero gradient of its own shape.

    Returns
    -------
    torch.Tensor
        A tensor that shares the storage of `loopthrough`; `loopthrough` itself if grad mode is off
        or no dummy requires grad.

    Raises
    ------
    TypeError
        An argument is not a tensor, or a dummy requires grad and `loopthrough` is of a dtype that
        cannot carry a graph (integers, bool).

    Notes
    -----
    **Adjoint**: the identity for `loopthrough`, zeros for the dummies. Nothing is communicated.
    """
    if not isinstance(loopthrough, torch.Tensor):
        raise TypeError(
            f"JoinDummies: loopthrough must be a torch.Tensor, not {type(loopthrough).__name__}"
        )
    if isinstance(dummies, torch.Tensor):
        raise TypeError("JoinDummies: dummies must be a sequence of tensors, not one tensor")
    dummies = list(dummies)
    for i, dummy in enumerate(dummies):
        if not isinstance(dummy, torch.Tensor):
            raise TypeError(
                f"JoinDummies: dummies[{i}] must be a torch.Tensor, not {type(dummy).__name__}"
            )
    if torch.is_grad_enabled() and any(d.requires_grad for d in dummies):
        if not (loopthrough.is_floating_point() or loopthrough.is_complex()):
            raise TypeError(
                f"JoinDummies: loopthrough of dtype {loopthrough.dtype} cannot carry a graph; "
                "pass a floating point or complex tensor"
            )
        return _join(loopthrough, *dummies)
    return loopthrough
