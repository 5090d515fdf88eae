"""Where every collective can be seen or taken over; one flag that all of them test.

While :data:`on` is False nobody is interested: a call costs one test of it, and the express lane
of the core is open. :func:`observe` (plugins) and :func:`guard` (``algorithms.Join``) turn it on.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from ._core import collectives, mpi

__all__ = [
    "Event",
    "Guard",
    "Observer",
    "agree",
    "at_first_use",
    "barrier",
    "begin",
    "complete",
    "end",
    "events",
    "exchange",
    "first_use",
    "guard",
    "guard_of",
    "observe",
    "observing",
    "order",
    "refuse",
    "release",
    "require_unobserved",
    "run",
    "stop",
    "taking_part",
]

#: Whether anybody wants to see the collectives.
on: bool = False


class Event:
    """One collective of this rank, from its start to its end.

    Attributes
    ----------
    op
        Name of the operation: ``"Allreduce"``, ``"Gather"``, ..., ``"Barrier"``.
    direction
        ``"forward"``, or ``"backward"`` for a collective that carries gradients.
    rank, size
        This rank in the communicator, and the number of its ranks.
    seq
        The number of the event in this process, from 0.
    dtype
        The dtype of the tensor that this rank gives; None for a barrier.
    count, nbytes
        Its elements and bytes.
    root
        The root; None where the operation has none.
    reduce_op
        Name of the reduction; None where the operation has none.
    t_start, t_end
        ``time.perf_counter()`` before and after; `t_end` is None until it ends.
    error
        The exception with which it ended, or None.
    """

    __slots__ = (
        "count", "direction", "dtype", "error", "nbytes", "op", "rank", "reduce_op", "root",
        "seq", "size", "t_end", "t_start",
    )  # fmt: skip

    def __init__(
        self,
        op: str,
        direction: str,
        comm: mpi.Comm,
        tensors: Sequence[torch.Tensor] = (),
        root: int | None = None,
        reduce_op: str | None = None,
    ) -> None:
        self.op = op
        self.direction = direction
        self.rank, self.size = comm.rank, comm.size
        self.seq = next(_numbers)
        self.dtype = tensors[0].dtype if tensors else None
        self.count = sum(t.numel() for t in tensors)
        self.nbytes = sum(t.numel() * t.element_size() for t in tensors)
        self.root = root
        self.reduce_op = reduce_op
        self.t_start = time.perf_counter()
        self.t_end: float | None = None
        self.error: BaseException | None = None

    def __repr__(self) -> str:
        return f"<{self.op} {self.direction}, number {self.seq}, {self.nbytes} bytes>"


_numbers = itertools.count()


class Observer(NamedTuple):
    """Two functions that are called with the same event; what :func:`stop` takes."""

    started: Callable[[Event], object]
    finished: Callable[[Event], object]


class Guard(Protocol):
    """Who takes the collectives of one communicator over; a method for each kind of message."""

    def run(
        self, call: Any, tensors: Sequence[torch.Tensor], perform: Callable[..., torch.Tensor]
    ) -> torch.Tensor:
        """Carry out `call`, by ``perform(call, tensors)`` or otherwise."""

    def exchange(
        self,
        sends: Sequence[torch.Tensor],
        receives: Sequence[torch.Tensor],
        perform: Callable[[], None],
    ) -> None:
        """Carry out an exchange of lists of tensors."""

    def barrier(self, perform: Callable[[], None]) -> None:
        """Carry out a barrier."""

    def agree(self, call: str, numbers: tuple[int, ...]) -> list[tuple[int, ...] | None] | None:
        """The numbers of all ranks, None for those that do not take part any more.

        None instead of the list: the caller is to ask the ranks itself.
        """

    def complete(self, call: str, rows: Sequence[Any]) -> list[Any]:
        """The rows of :meth:`agree` as the caller knows them, none missing."""

    def refuse(self, call: str, why: str) -> None:
        """Raise on all ranks, unless `call` is no business of the guard."""

    def taking_part(self) -> tuple[int, ...] | None:
        """The ranks that took part in the last message themselves; None: everybody."""


_observers: list[Observer] = []
_guards: dict[mpi.Comm, Guard] = {}
_observing: set[int] = set()  # the threads in which an observer runs
_waiting: list[Callable[[], object]] = []
#: Whether autograd has to put the calls in an order.
ordered: bool = False


def _switch() -> None:
    global on
    on = bool(_observers or _guards or _observing)
    collectives.open_express(not (on or ordered))


def order(value: bool) -> None:
    """Let every call take the full path, where autograd puts it in an order."""
    global ordered
    ordered = value
    _switch()


def observe(started: Callable[[Event], object], finished: Callable[[Event], object]) -> Observer:
    """Call `started` before and `finished` after every collective, with the same event.

    They must not raise and must not communicate; a collective inside them raises RuntimeError.
    """
    observer = Observer(started, finished)
    _observers.append(observer)
    _switch()
    return observer


def stop(observer: Observer) -> None:
    """Take back :func:`observe`."""
    _observers[:] = [o for o in _observers if o is not observer]
    _switch()


def guard(comm: mpi.Comm, by: Guard) -> None:
    """Let `by` carry out the collectives on `comm` until :func:`release`."""
    _guards[comm] = by
    _switch()


def release(comm: mpi.Comm) -> None:
    """Take back :func:`guard`."""
    _guards.pop(comm, None)
    _switch()


def require_unobserved() -> None:
    """Raise RuntimeError in an observer, and in a plugin that is being imported."""
    if _observing and threading.get_ident() in _observing:
        raise RuntimeError(
            "an observer must not communicate, nor a plugin while it is imported: the other ranks "
            "may not have it, or nothing to observe"
        )


def guard_of(comm: mpi.Comm) -> Guard | None:
    """Who has taken over the collectives on `comm`."""
    require_unobserved()
    return _guards.get(comm)


def at_first_use(action: Callable[[], object]) -> None:
    """Call `action` once, when mpicoll is first used to communicate."""
    _waiting.append(action)


def first_use() -> None:
    """A communicator is about to be used for the first time."""
    while _waiting:
        _waiting.pop(0)()


def begin(*about: Any) -> tuple[Event, tuple[Observer, ...]] | None:
    """Tell the observers that a collective starts; give the result to :func:`end`, once."""
    if not _observers:
        return None
    event = Event(*about)
    seen = tuple(_observers)  # always paired, also if one is stopped meanwhile
    _tell(seen, 0, event)
    event.t_start = time.perf_counter()
    return event, seen


def end(begun: tuple[Event, tuple[Observer, ...]], error: BaseException | None = None) -> None:
    """Tell those whom :func:`begin` told that it has ended, and with which error."""
    event, seen = begun
    event.error = error
    event.t_end = time.perf_counter()
    _tell(seen, 1, event)


def events(perform: Callable[[], Any], *about: Any) -> Any:
    """Carry out `perform`, between the calls of the observers; `about` makes the :class:`Event`."""
    begun = begin(*about)
    if begun is None:
        return perform()
    failure: BaseException | None = None
    try:
        return perform()
    except BaseException as error:
        failure = error
        raise
    finally:
        end(begun, failure)


def _tell(observers: Sequence[Observer], which: int, event: Event) -> None:
    with observing():
        for observer in observers:
            observer[which](event)


@contextlib.contextmanager
def observing() -> Iterator[None]:
    """Within it, what communicates in this thread raises RuntimeError before it sends anything."""
    thread = threading.get_ident()
    if thread in _observing:
        yield
        return
    _observing.add(thread)
    _switch()  # the flag is what every call tests
    try:
        yield
    finally:
        _observing.discard(thread)
        _switch()


def run(
    call: Any, tensors: Sequence[torch.Tensor], perform: Callable[..., torch.Tensor]
) -> torch.Tensor:
    """Carry out `call` by ``perform(call, tensors)``, seen by everybody who wants to."""
    keeper = guard_of(call.comm)

    def carry_out() -> torch.Tensor:
        if keeper is not None:
            return keeper.run(call, tensors, perform)
        return perform(call, tensors)

    return events(
        carry_out,
        call.operation.name,
        "backward" if call.channel else "forward",
        call.comm,
        tensors[:1],
        call.root if "root" in call.operation.arguments else None,
        None if call.op is None else call.op.name,
    )


def exchange(
    comm: mpi.Comm,
    sends: Sequence[torch.Tensor],
    receives: Sequence[torch.Tensor],
    perform: Callable[[], None],
) -> None:
    """Carry out an exchange of lists of tensors, seen by everybody who wants to."""
    keeper = guard_of(comm)

    def carry_out() -> None:
        if keeper is not None:
            keeper.exchange(sends, receives, perform)
        else:
            perform()

    inside = torch._C._current_graph_task_id() >= 0  # a node of the graph runs
    return events(carry_out, "Alltoall", "backward" if inside else "forward", comm, sends)


def barrier(comm: mpi.Comm, perform: Callable[[], None]) -> None:
    """Carry out a barrier, seen by everybody who wants to."""
    keeper = guard_of(comm)

    def carry_out() -> None:
        if keeper is not None:
            keeper.barrier(perform)
        else:
            perform()

    return events(carry_out, "Barrier", "forward", comm)


def agree(
    comm: mpi.Comm, call: str, numbers: tuple[int, ...]
) -> list[tuple[int, ...] | None] | None:
    """What the guard of `comm` says of the sizes; None where there is none, or it leaves it."""
    keeper = guard_of(comm)
    return None if keeper is None else keeper.agree(call, numbers)


def complete(comm: mpi.Comm, call: str, rows: Sequence[Any]) -> list[Any]:
    """The `rows` that a guard gave, with what the ranks that are missing would have said."""
    keeper = guard_of(comm)
    return list(rows) if keeper is None else keeper.complete(call, rows)


def taking_part(comm: mpi.Comm) -> tuple[int, ...] | None:
    """The ranks that took part in the last message on `comm` themselves; None: everybody."""
    keeper = _guards.get(comm)
    return None if keeper is None else keeper.taking_part()


def refuse(comm: mpi.Comm, call: str, why: str) -> None:
    """Raise on all ranks where a guard of `comm` cannot let `call` happen."""
    keeper = guard_of(comm)
    if keeper is not None:
        keeper.refuse(call, why)
