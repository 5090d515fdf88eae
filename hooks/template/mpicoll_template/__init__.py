"""A mean over everything that all ranks have seen. It knows nothing of Join, nor of the plugin."""

from __future__ import annotations

from collections.abc import Callable

import torch

import mpicoll

__all__ = ["RunningMean"]


class RunningMean:
    """The mean of all numbers of all ranks so far, the same on every rank.

    Parameters
    ----------
    comm
        The communicator.
    """

    def __init__(self, comm: mpicoll.Communicator) -> None:
        self.comm = comm
        self.sums = torch.zeros(2, dtype=torch.float64)  # the total, and how many
        self.before_update: list[Callable[[], object]] = []

    def update(self, values: torch.Tensor) -> float:
        """Add the numbers of this rank; every rank must call it equally often."""
        for function in self.before_update:
            function()
        mine = torch.tensor([values.sum().item(), values.numel()], dtype=torch.float64)
        self.sums += self.comm.Allreduce(mine, mpicoll.MPI_SUM)
        return self.mean

    @property
    def mean(self) -> float:
        """Not a number before the first update."""
        return (self.sums[0] / self.sums[1]).item()
