"""Says at exit what a rank has communicated: how often, how much, and how long it took.

Nothing is communicated for it. Rank 0 speaks for itself, or the ranks that ``MPICOLL_METRICS``
names.
"""

from __future__ import annotations

import atexit
import dataclasses
import os
from typing import Any

import mpicoll
from mpicoll.watch import Event

__all__ = ["Metrics", "Total", "chosen", "plugin"]

mpicoll_hook_api = 1


@dataclasses.dataclass
class Total:
    """What one kind of call adds up to.

    Attributes
    ----------
    calls, failed
        How many there were, and how many of them raised.
    nbytes
        The bytes of the tensors that this rank gave.
    seconds, longest
        From start to end, waiting included: of all, and of the longest.
    """

    calls: int = 0
    failed: int = 0
    nbytes: int = 0
    seconds: float = 0.0
    longest: float = 0.0

    def add(self, other: Total) -> None:
        """Take in another total."""
        self.calls += other.calls
        self.failed += other.failed
        self.nbytes += other.nbytes
        self.seconds += other.seconds
        self.longest = max(self.longest, other.longest)


class Metrics:
    """The plugin: totals by operation, direction and reduction.

    Parameters
    ----------
    ranks
        The ranks of the world that print their table; None: all.
    """

    def __init__(self, ranks: frozenset[int] | None = frozenset({0})) -> None:
        self.ranks = ranks
        self.totals: dict[tuple[str, str], Total] = {}
        self._pid = self._rank = -1

    @mpicoll.hookimpl
    def mpicoll_collective_finished(self, event: Event) -> None:
        """Add an event to its total."""
        if self._pid < 0:
            self._begin()
        assert event.t_end is not None
        seconds = event.t_end - event.t_start
        name = event.op if event.reduce_op is None else f"{event.op} {event.reduce_op}"
        key = name, event.direction
        self.totals.setdefault(key, Total()).add(
            Total(1, int(event.error is not None), event.nbytes, seconds, seconds)
        )

    def _begin(self) -> None:
        from mpi4py import MPI

        self._pid, self._rank = os.getpid(), MPI.COMM_WORLD.Get_rank()
        atexit.register(self.report)

    def report(self) -> None:
        """Print the table to stderr, on the ranks that are to."""
        forked = os.getpid() != self._pid
        if forked or not (self.ranks is None or self._rank in self.ranks):
            return
        from rich.console import Console

        Console(stderr=True).print(self.table())

    def table(self) -> Any:
        """The totals as a table of rich, longest time first."""
        from rich.table import Table

        title = f"mpicoll: collectives on rank {self._rank}"
        table = Table(title=title, title_justify="left", box=None, padding=(0, 2, 0, 0))
        for name in ("collective", "direction"):
            table.add_column(name)
        for name in ("calls", "failed", "bytes", "seconds", "mean ms", "longest ms"):
            table.add_column(name, justify="right", no_wrap=True)
        everything = Total()
        rows = sorted(self.totals.items(), key=lambda item: -item[1].seconds)
        for key, total in rows:
            everything.add(total)
            table.add_row(*key, *_numbers(total))
        table.add_row("all", "", *_numbers(everything))
        return table


def _numbers(total: Total) -> list[str]:
    mean = total.seconds / total.calls if total.calls else 0.0
    return [
        f"{total.calls}",
        f"{total.failed}",
        f"{total.nbytes:,}",
        f"{total.seconds:.3f}",
        f"{mean * 1e3:.3f}",
        f"{total.longest * 1e3:.3f}",
    ]


def chosen(text: str) -> frozenset[int] | None:
    """The ranks that ``MPICOLL_METRICS`` names: ``all``, or numbers separated by commas.

    Raises
    ------
    ValueError
        It is something else.
    """
    if text == "all":
        return None
    try:
        return frozenset(map(int, text.split(",")))
    except ValueError:
        raise ValueError(
            f"MPICOLL_METRICS is {text!r}; it must be 'all', or ranks separated by commas"
        ) from None


plugin = Metrics(chosen(os.environ.get("MPICOLL_METRICS") or "0"))
