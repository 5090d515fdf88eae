"""Helpers for common programs, on top of the communicators."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .arguments import check_reducible
from .autograd import copy_to, reduce_from
from .communicator import Communicator, as_communicator
from .ops import ReduceOp
from .staging import Bucket, check_tensor, partition

__all__ = ["copy_to_group", "reduce_from_group"]


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
