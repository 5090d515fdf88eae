"""The order of backward: a scope in which every call depends on the one before it.

A chain of empty tensors runs through the calls. A call takes the tip of the chain as one more
input, and the new tip is made from its result; so autograd reaches the last call first, and each
call in turn, whatever a rank did with the results. Calls that backward itself makes for a higher
derivative join the same chain, at its end.
"""

from __future__ import annotations

import torch

from .. import watch
from .._core import mpi
from .nodes import node

__all__ = ["Chain", "chain_of", "enter", "leave"]


class _Tip(torch.autograd.Function):
    """An empty tensor that depends on a result; the gradient that it gives back is undefined."""

    @staticmethod
    def forward(result: torch.Tensor) -> torch.Tensor:
        return torch.empty(0, device="cpu")

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        pass

    @staticmethod
    def backward(ctx, gradient):
        return None


_tip = node(_Tip)


class Chain:
    """The calls of one scope; `comm` is None where those of all communicators belong to it.

    Attributes
    ----------
    tip
        What the next call is to depend on.
    """

    def __init__(self, comm: mpi.Comm | None) -> None:
        self.comm = comm
        self.entered = 0
        self._higher = False
        self._restart()

    def _restart(self) -> None:
        self._root = self.tip = torch.empty(0, device="cpu").requires_grad_()

    def advance(self, result: torch.Tensor) -> None:
        """`result` is that of the call which took the tip as an input."""
        self.tip = _tip(result)

    def takes(self) -> bool:
        """Whether a call that is made now belongs to the chain."""
        # Without a graph of gradients, a call in backward is a gradient, or recomputes a part of
        # forward whose calls are in the chain already.
        return self._higher or torch._C._current_graph_task_id() < 0

    def backward(
        self, loss: torch.Tensor | None, create_graph: bool, retain_graph: bool | None
    ) -> None:
        """Run the backward of all calls of the chain, the last one first."""
        roots, gradients = [self.tip], [torch.zeros(0, device="cpu")]
        if loss is not None and loss.requires_grad:
            roots.append(loss)
            gradients.append(torch.ones_like(loss))
        self._higher = create_graph
        try:
            torch.autograd.backward(
                roots, gradients, retain_graph=retain_graph, create_graph=create_graph
            )
        finally:
            self._higher = False
            self._root.grad = None  # with a graph of gradients it would hold itself
        if not (create_graph if retain_graph is None else retain_graph):
            self._restart()


#: The chains of the scopes that are active in this process, at most one for a communicator.
_chains: list[Chain] = []


def enter(comm: mpi.Comm | None) -> Chain:
    """Begin a scope, or enter the one around it that orders the same calls."""
    for chain in _chains:
        if chain.comm is None or chain.comm is comm:
            break
        if comm is None:
            raise RuntimeError(
                "lockstep: all communicators inside a lockstep of one of them, whose calls would "
                "be in two orders; make the outer one the one of all communicators"
            )
    else:
        chain = Chain(comm)
        _chains.append(chain)
        watch.order(True)
    chain.entered += 1
    return chain


def leave(chain: Chain) -> None:
    """End what :func:`enter` has begun."""
    chain.entered -= 1
    if not chain.entered:
        _chains.remove(chain)
        watch.order(bool(_chains))


def chain_of(comm: mpi.Comm, dtype: torch.dtype, differentiates: bool = True) -> Chain | None:
    """The chain that a call on `comm` has to be part of, if any.

    What decides is known to all ranks: whether the operation `differentiates`, and the dtype.
    """
    if not _chains or not torch.is_grad_enabled() or not differentiates:
        return None
    if not (dtype.is_floating_point or dtype.is_complex):
        return None
    for chain in _chains:
        if chain.comm is None or chain.comm is comm:
            if not chain.takes():
                return None
            if torch._C._are_functorch_transforms_active():
                raise RuntimeError(
                    "lockstep: inside a transform of torch.func torch runs only the nodes that "
                    "lead to the transform's input; use step.backward() instead"
                )
            if watch.guard_of(comm) is not None:
                raise RuntimeError(
                    "lockstep: this communicator is in a Join context, in which ranks that have "
                    "run out answer the others' calls; leave the one or the other"
                )
            return chain
    return None
