"""The beginning and the end of communicators: their channels, and what was dropped or forgotten."""

from __future__ import annotations

import atexit
import warnings
import weakref
from typing import TYPE_CHECKING, Any, NamedTuple

from ._core import collectives, mpi, point_to_point
from ._core.shared_memory import segment
from .dispatch import CONTROL, USER

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["Remains", "bury", "drop", "keep", "report_unanswered", "with_channels"]

#: Every core communicator, for the report at exit.
_alive: weakref.WeakSet[mpi.Comm] = weakref.WeakSet()


def with_channels(base: MPI.Comm, owned: bool, shared_bytes: int) -> mpi.Comm:
    """A core communicator around `base`. Collective."""
    from mpi4py import MPI

    if base.Is_inter():
        raise ValueError("mpicoll works on intracommunicators; this is an intercommunicator")
    channels = [base if owned else base.Dup(), base.Dup(), base.Dup()]
    for channel in channels:
        channel.Set_errhandler(MPI.ERRORS_RETURN)
    made = mpi.Comm(base, channels, segment(channels[CONTROL], shared_bytes))
    _alive.add(made)
    return made


class Remains(NamedTuple):
    """What is left of a communicator that was dropped: enough to free it later."""

    base: Any
    channels: tuple[Any, ...]
    name: str
    dropped: dict[int, Remains]


def keep(dropped: dict[int, Remains], number: int, remains: Remains) -> None:
    """Remember a communicator that nobody refers to any more, to free it later."""
    dropped[number] = remains


def drop(dropped: dict[int, Remains], number: int, remains: Remains) -> None:
    """:func:`keep` one that the user should have freed, and say so."""
    warnings.warn(
        f"mpicoll: a communicator ({remains.name}) was dropped without Free(); it is freed at the "
        "next collective act on its parent, or at exit",
        ResourceWarning,
        stacklevel=2,
    )
    keep(dropped, number, remains)


def bury(comm: mpi.Comm, dropped: dict[int, Remains]) -> None:
    """Free what was dropped on every rank of `comm`, and their own dropped children."""
    mine = sorted(dropped)
    # On the user's channel: ranks that call something else there meanwhile are found out.
    longest = max(count for (count,) in collectives.agree(comm, USER, (len(mine),)))
    if longest == 0:
        return
    padded = (*mine, *(0,) * (longest - len(mine)))
    rows = collectives.agree(comm, USER, padded)
    for number in sorted(set.intersection(*(set(row) for row in rows)) - {0}):
        remains = dropped.pop(number)
        dead = mpi.Comm(remains.base, remains.channels)
        bury(dead, remains.dropped)
        report_unanswered(dead, remains.name)
        dead.free()
        remains.base.Free()


def report_unanswered(comm: mpi.Comm, name: str) -> None:
    """Warn of gradients that were sent to this rank and that nobody asked for."""
    if point_to_point.unanswered(comm):
        warnings.warn(
            f"mpicoll: rank {comm.rank} of {name} has a gradient message that no node received: "
            "the result of a send did not reach this rank's loss, so its gradient is incomplete; "
            "let the result of Wait reach it, for example with JoinDummies",
            RuntimeWarning,  # shown by default: a wrong gradient is no matter of tidiness
            stacklevel=3,
        )


@atexit.register
def _at_exit() -> None:
    """Report what was left behind; leave nothing that MPI_Finalize could trip over."""
    if not mpi.is_bound():
        return
    for comm in list(_alive):
        if not comm.freed:
            report_unanswered(comm, comm.base.Get_name() or "a communicator")
    for request in point_to_point.in_flight():
        if not request.comm.freed and not request.test():
            request.cancel()
