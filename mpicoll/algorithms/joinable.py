"""What takes part in a Join."""

from __future__ import annotations

import abc
from typing import Any

import torch

__all__ = ["JoinHook", "Joinable"]


class JoinHook:
    """What a rank that has run out of inputs does for a :class:`Joinable`.

    Both methods do nothing by default.
    """

    def main_hook(self) -> None:
        """Answer the collectives of one iteration of the ranks that still have inputs.

        Called once for every iteration that another rank does after this one has run out.
        """

    def post_hook(self, is_last_joiner: bool) -> None:
        """Finish, once all ranks have run out of inputs.

        Parameters
        ----------
        is_last_joiner
            True on the ranks that ran out last, and so called no :meth:`main_hook`.
        """


class Joinable(abc.ABC):
    """Base of the classes whose iterations :class:`Join` can keep company.

    A subclass calls ``Joinable.__init__``, and in every iteration
    :meth:`Join.notify_join_context` before its first collective.
    """

    def __init__(self) -> None:
        super().__init__()
        self._join_ready = True  # tells Join that this __init__ was called

    @abc.abstractmethod
    def join_hook(self, **kwargs: Any) -> JoinHook:
        """The hook of this object for one context; called on entry.

        Parameters
        ----------
        **kwargs
            The keyword arguments of :class:`Join`, unchanged; those of other joinables are to be
            ignored.

        Returns
        -------
        JoinHook
            What this rank does once it has run out of inputs.
        """

    @property
    @abc.abstractmethod
    def join_device(self) -> torch.device:
        """The device of the tensors that it communicates."""

    @property
    @abc.abstractmethod
    def join_process_group(self) -> Any:
        """The communicator that it uses: what ``group=`` takes; None: the world."""
