"""How a Function becomes a node of the graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["dense", "node"]

_transforms = torch._C._are_functorch_transforms_active


def node(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """`function.apply`, in a quarter of the time where no transform of torch.func is active.

    ``Function.apply`` binds default arguments and asks for transforms; the method of its base
    class does neither. All arguments are given by position.
    """
    base: Any = super(torch.autograd.Function, function)
    plain = base.apply
    full = function.apply

    def apply(*arguments: Any) -> Any:
        return full(*arguments) if _transforms() else plain(*arguments)

    return apply


def dense(gradient: torch.Tensor) -> torch.Tensor:
    """A gradient with strided memory; torch makes sparse ones, for instance of an embedding."""
    return gradient if gradient.layout is torch.strided else gradient.to_dense()
