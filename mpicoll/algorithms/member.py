"""Joinables that announce all that they do: nobody has to know what an iteration consists of."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from .joinable import JoinHook

__all__ = ["Announced", "MemberHook"]


class Announced(NamedTuple):
    """What an announcement has told.

    Attributes
    ----------
    present
        The ranks that take part by themselves: those that have not run out of inputs.
    options
        The keyword arguments of the context.
    """

    present: tuple[int, ...]
    options: Mapping[str, Any]


class MemberHook(JoinHook):
    """The hook of a joinable that announces its messages one by one.

    :meth:`Join._announce` on the ranks that have inputs is answered by :meth:`answer` on the
    others, in the same order, whatever an iteration consists of. There is nothing left for
    :meth:`main_hook` to do.
    """

    def answer(self, action: str, present: tuple[int, ...]) -> bool:
        """Take part in `action`, which the ranks `present` do by themselves.

        Returns
        -------
        bool
            Whether it is the last that the joinable does in an iteration.
        """
        raise NotImplementedError

    def abandon(self) -> None:
        """Complete what has been announced and begun; all ranks leave the context with an error."""
