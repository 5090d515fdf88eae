"""Helpers for common programs, on top of the communicators."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .arguments import check_reducible
from .autograd import copy_to, reduce_from
from .autograd import lockstep as chains
from .communicator import Communicator, as_communicator
from .ops import ReduceOp
from .staging import Bucket, check_tensor, partition

__all__ = ["copy_to_group", "lockstep", "reduce_from_group"]


def copy_to_group(tensor: torch.Tensor, group: Any = None) -> torch.Tensor:
    """Enter a part of the program that the ranks share, for a loss that every rank computes alike.

    Parameters
    ----------
    tensor
        The same on every rank.
    group
        The communicator; None: the world.

    Returns
    -------
    torch.Tensor
        A new tensor equal to `tensor`.

    Raises
    ------
    TypeError
        `tensor` is not a strided tensor, or `group` is no communicator.

    Notes
    -----
    Forward is the identity. Backward sums the gradients of all ranks, since each rank's part of
    the program contributes. Together with :func:`reduce_from_group` it gives the gradient of the
    *one* loss that all ranks computed, instead of the sum of W equal losses.

    References
    ----------
    The functions f and g of M. Shoeybi et al., "Megatron-LM", 2019, section 3.
    """
    check_tensor("copy_to_group", "tensor", tensor)
    return copy_to(tensor, as_communicator("copy_to_group", group)._comm)


def reduce_from_group(tensor: torch.Tensor, group: Any = None) -> torch.Tensor:
    """Leave a part of the program that the ranks share: sum the ranks' contributions.

    Parameters
    ----------
    tensor
        This rank's contribution; same shape and dtype on every rank.
    group
        The communicator; None: the world.

    Returns
    -------
    torch.Tensor
        The sum over all ranks, equal on every rank.

    Raises
    ------
    TypeError
        `tensor` is not a strided tensor of a dtype that can be added, or `group` is no
        communicator.

    Notes
    -----
    Forward is an all-reduce. Backward is the identity: every rank computes the same loss from the
    sum, and its gradient counts once. See :func:`copy_to_group`.
    """
    check_tensor("reduce_from_group", "tensor", tensor)
    check_reducible("reduce_from_group", ReduceOp.SUM, tensor)
    return reduce_from(tensor, as_communicator("reduce_from_group", group)._comm)


class lockstep:
    """Run the backward of every call in the reverse order of issue, on every rank.

    A context manager: ``with mpicoll.lockstep() as step:``, in which
    :meth:`step.backward <backward>` takes the place of ``loss.backward()``.

    Parameters
    ----------
    comm
        The communicator whose calls are put in order; None: those of all communicators.

    Raises
    ------
    TypeError
        `comm` is no communicator.
    RuntimeError
        All communicators, inside a scope of one of them. In ``torch.compile``. In a call inside
        the scope: a transform of torch.func, or a ``Join`` context of the same communicator.

    Notes
    -----
    Every differentiable call inside the scope runs its backward exactly once, whether or not its
    result reached this rank's loss or its input needs a gradient here; which calls these are is
    decided by the operation, the reduction and the dtype, which all ranks know, never by
    ``requires_grad``. So their results require grad. The ranks may compute different things as
    long as they communicate in the same order. A message for which the sender wants no gradient
    has no backward, and both ranks know.

    Not in the order are calls under ``torch.no_grad``, and what ``torch.autograd.grad`` or
    ``loss.backward()`` runs inside the scope: torch then runs what leads to the loss only. Of
    activation checkpoints use those with ``use_reentrant=False``.

    A scope of the same communicator within it is the same scope. Scopes hold for the whole
    process, because autograd computes in threads of its own: communicate in one thread. A scope
    that is left without :meth:`backward` has no effect on the gradients.

    Examples
    --------
    >>> with mpicoll.lockstep() as step:
    ...     y = mpicoll.COMM_WORLD.Allreduce(x, mpicoll.MPI_SUM)
    ...     z = mpicoll.COMM_WORLD.Allreduce(x * x, mpicoll.MPI_SUM)
    ...     step.backward(y.sum() if mpicoll.COMM_WORLD.rank == 0 else z.sum())
    """

    def __init__(self, comm: Any = None) -> None:
        self._comm = None if comm is None else as_communicator("lockstep", comm)
        self._chain: chains.Chain | None = None

    def __enter__(self) -> lockstep:
        if torch.compiler.is_compiling():
            raise RuntimeError("lockstep: not in torch.compile; compile what lies between calls")
        if self._chain is not None:
            raise RuntimeError("lockstep: this scope is active already; make another one")
        self._chain = chains.enter(None if self._comm is None else self._comm._comm)
        return self

    def __exit__(self, *error: object) -> None:
        assert self._chain is not None
        chains.leave(self._chain)
        self._chain = None

    def backward(
        self,
        loss: torch.Tensor | None,
        create_graph: bool = False,
        retain_graph: bool | None = None,
    ) -> None:
        """Compute the gradients, through every call of the scope. Collective.

        Parameters
        ----------
        loss
            This rank's loss, one number; None, or one that does not require grad, where it has
            none.
        create_graph, retain_graph
            As for ``torch.Tensor.backward``, the same on every rank. Without them the calls so
            far have had their backward, and the next :meth:`backward` runs those issued since:
            what they use of earlier results has to be detached. With them, it runs all again,
            those that this one has made included.

        Raises
        ------
        TypeError, ValueError
            `loss` is not a tensor, or has more than one element.
        RuntimeError
            Outside the ``with`` block.
        """
        if self._chain is None:
            raise RuntimeError("lockstep: backward belongs inside the with block")
        if loss is not None:
            if not isinstance(loss, torch.Tensor):
                raise TypeError(
                    f"lockstep: loss must be a torch.Tensor or None, not {type(loss).__name__}"
                )
            if loss.numel() != 1:
                raise ValueError(
                    f"lockstep: loss has shape {tuple(loss.shape)}; it must be one number"
                )
        self._chain.backward(loss, create_graph, retain_graph)


@torch.no_grad()
def broadcast_tensors(
    comm: Communicator,
    tensors: Sequence[torch.Tensor],
    root: int,
    bucket_bytes: int,
    if_changed: bool = False,
) -> None:
    """Give `tensors` the values that they have on `root`, many of them in one message.

    With `if_changed`, a tensor that has them already is not written.
    """
    for members in partition(tensors, bucket_bytes):
        some = [tensors[i] for i in members]
        bucket = Bucket(some)
        flat = bucket.gather(some)
        before = flat.clone() if if_changed else None
        comm.Bcast_(flat, root)
        if comm.rank != root:
            bucket.scatter(some, before)
