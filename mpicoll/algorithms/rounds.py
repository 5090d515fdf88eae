"""The control protocol: every message of a Join is one all-gather of integers."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import NamedTuple

from .._core import mpi
from ..dispatch import CONTROL
from ..negotiate import agree_lists

__all__ = ["Kind", "Said", "from_text", "talk", "to_text"]

# Numbers that travel with the first message; longer rows follow in a second one.
_INLINE = 46


class Kind(enum.IntEnum):
    """What a rank says in a round."""

    ENTER = 0  # it enters the context; with what all ranks must have in common
    ITERATION = 1  # it starts an iteration
    JOINED = 2  # it has run out of inputs
    CALL = 3  # it is about to make a collective that is not shadowed
    COLLECTIVE = 4  # a collective to be shadowed: the call
    EXCHANGE = 5  # lists of tensors: the sizes
    BARRIER = 6
    NUMBERS = 7  # sizes on which the active ranks agree
    REFUSED = 8  # what it called cannot be shadowed; why
    FAILED = 9  # an exception leaves the context; its text
    DONE = 10  # its post hooks have run
    MEMBER = 11  # what one of the joinables is about to do; which, and a text


class Said(NamedTuple):
    """What one rank said in a round."""

    kind: int
    numbers: tuple[int, ...]


def talk(comm: mpi.Comm, kind: Kind, numbers: Sequence[int] = ()) -> list[Said]:
    """Say `kind` with `numbers`; return what all ranks said, in rank order.

    Always the same blocking all-gather on the control channel, whoever says what.
    """
    rows = agree_lists(comm, CONTROL, (int(kind),), numbers, _INLINE)
    return [Said(head[0], told) for head, told in rows]


def from_text(text: str) -> tuple[int, ...]:
    """A text as numbers; its end is cut off where it is very long."""
    return tuple(text.encode()[:8000])


def to_text(numbers: Sequence[int]) -> str:
    """The text that :func:`from_text` made numbers of."""
    return bytes(numbers).decode(errors="replace")
