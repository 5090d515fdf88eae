"""One passage through a Join context on this rank: its rounds, its end, and its failure."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Sequence
from typing import NoReturn

import torch

from .. import failure, watch
from .._core import mpi
from ..dispatch import Call
from ..errors import CollectiveMismatchError, JoinAborted
from ..negotiate import Row
from . import shadow
from .joinable import JoinHook
from .member import MemberHook
from .rounds import Kind, Said, from_text, talk, to_text

__all__ = ["Session"]

#: A rank that fails with ``on_error="propagate"`` ends the job where the others do not hear of it
#: within so many seconds: they wait in something that mpicoll does not see.
PATIENCE = 15.0
_WHERE = "inside a Join context"
#: Shadowed iterations after which a rank warns.
BEHIND = 1000

_sessions: dict[mpi.Comm, Session] = {}


class Session:
    """The state of an entered context; takes over the collectives where it must.

    Parameters
    ----------
    comm
        The core communicator.
    shadows
        Whether it answers collectives of the active ranks by itself.
    throws
        Whether all ranks stop when the first runs out of inputs.
    propagates
        Whether a failure is told to the other ranks, instead of ending the job.
    by_all
        Whether a shadowed AVG divides by the number of all ranks.
    """

    def __init__(
        self, comm: mpi.Comm, shadows: bool, throws: bool, propagates: bool, by_all: bool
    ) -> None:
        self.comm = comm
        self.shadows = shadows
        self.throws = throws
        self.propagates = propagates
        self.by_all = by_all
        self.state = "entering"  # then active, joined, post, over
        self.serving = False
        self.iterations = 0
        self.shadowed = 0
        self.said: list[Said] = []
        self.agreed: BaseException | None = None
        self.last = True  # no other rank has had inputs since this one ran out of them
        self.members: dict[int, MemberHook] = {}  # by the number of the joinable
        self._ahead: list[Said] | None = None  # a round that is still to be answered

    # ------------------------------------------------------------ life

    @staticmethod
    def require_free(comm: mpi.Comm) -> None:
        """Raise where a context on `comm` is active; ranks that ran out would not enter another."""
        if comm in _sessions:
            raise RuntimeError(
                "Join: this communicator is in an active Join context already; nested contexts "
                "need communicators of their own (Dup or Split)"
            )

    @staticmethod
    def of(comm: mpi.Comm) -> Session | None:
        """That of the active context on `comm`."""
        return _sessions.get(comm)

    def open(self, joinables: int) -> None:
        """Enter, together with all ranks."""
        _sessions[self.comm] = self
        if self.shadows or self.propagates:
            watch.guard(self.comm, self)
        flags = (self.shadows, self.throws, self.propagates, self.by_all)
        said = self.round(Kind.ENTER, (joinables, *map(int, flags)))
        if len({row.numbers for row in said}) > 1:
            self.end(ValueError("Join: the ranks disagree on the arguments of the context"))

    def close(self) -> None:
        """Take back what :meth:`open` set."""
        self.state = "over"
        if _sessions.get(self.comm) is self:
            del _sessions[self.comm]
            watch.release(self.comm)

    def end(self, error: BaseException) -> NoReturn:
        """Leave the context with an error that all ranks raise in this round."""
        self.agreed = error
        self.close()
        for hook in self.members.values():
            hook.abandon()
        raise error

    # ------------------------------------------------------------ rounds

    def round(self, kind: Kind, numbers: Sequence[int] = ()) -> list[Said]:
        """Say something, hear what all ranks say, and raise with all of them where it is bad."""
        self.said = talk(self.comm, kind, numbers)
        failed = [r for r, row in enumerate(self.said) if row.kind == Kind.FAILED]
        if failed:
            if kind is Kind.FAILED:
                return self.said
            rank = failed[0]
            self.end(JoinAborted(rank, to_text(self.said[rank].numbers)))
        refused = [row for row in self.said if row.kind == Kind.REFUSED]
        if refused:
            self.end(RuntimeError(to_text(refused[0].numbers)))
        kinds = {row.kind for row in self.said}
        if len(kinds - {Kind.JOINED}) > 1 or kinds == {Kind.CALL, Kind.JOINED}:
            self.end(CollectiveMismatchError(shadow.mismatch(self.said)))
        if Kind.MEMBER in kinds and len({r.numbers for r in self.said if r.numbers}) > 1:
            self.end(CollectiveMismatchError(shadow.mismatch(self.said)))
        if self.throws and len(kinds) > 1:
            if kind is Kind.JOINED:
                self.end(RuntimeError(f"Rank {self.comm.rank} exhausted all inputs."))
            self.end(
                RuntimeError(
                    "Detected at least one rank that exhausted inputs. Throwing across all ranks."
                )
            )
        return self.said

    def iterate(self) -> None:
        """Announce an iteration."""
        self.round(Kind.ITERATION)
        self.iterations += 1

    def announce(self, index: int, action: str) -> tuple[int, ...]:
        """Announce what a joinable is about to do; the ranks that take part by themselves."""
        self.round(Kind.MEMBER, (index, *from_text(action)))
        return self._active()

    def _active(self) -> tuple[int, ...]:
        return tuple(r for r, row in enumerate(self.said) if row.kind != Kind.JOINED)

    def _hear(self) -> Kind:
        """What the ranks that still have inputs do next; JOINED where there are none."""
        if self._ahead is None:
            self.round(Kind.JOINED)
        else:
            self.said, self._ahead = self._ahead, None
        active = self._active()
        self.last = self.last and not active
        return Kind(self.said[active[0]].kind) if active else Kind.JOINED

    def _answer(self) -> MemberHook | None:
        """Take part in what one joinable does; its hook if that ends an iteration of it."""
        active = self._active()
        index, *action = self.said[active[0]].numbers
        hook = self.members[index]
        return hook if hook.answer(to_text(action), active) else None

    def _main_hooks(self, hooks: Sequence[JoinHook]) -> None:
        """Run all main hooks.

        A joinable that announces what it does is answered meanwhile only where the hook of one that
        does not comes after it.
        """
        for i, hook in enumerate(hooks):
            hook.main_hook()
            if not isinstance(hook, MemberHook):
                continue
            if all(isinstance(other, MemberHook) for other in hooks[i:]):
                continue
            while self._ahead is None:
                if self._hear() is not Kind.MEMBER:
                    self._ahead = self.said
                elif self._answer() is hook:
                    break

    def run_out(self, hooks: Sequence[JoinHook], told: Callable[..., object]) -> None:
        """Keep the other ranks company until all have run out of inputs; then finish."""
        self.state = "joined"
        told("rank_joined", iterations=self.iterations)
        while True:
            kind = self._hear()
            if kind is Kind.JOINED:
                break
            if kind is Kind.NUMBERS:
                continue  # the first half of a collective
            if kind is Kind.MEMBER:
                self._answer()
                continue
            active = self._active()
            if self.shadows:
                shadow.check(self)
                for hook in hooks:
                    hook.main_hook()
            else:
                self._main_hooks(hooks)
            self.shadowed += 1
            told("shadowed", index=self.shadowed - 1, active=len(active))
            if self.shadowed == BEHIND + 1:
                warnings.warn(
                    f"Join: rank {self.comm.rank} ran out of inputs more than {BEHIND} iterations "
                    "before the others; distribute the inputs more evenly, since it only waits",
                    stacklevel=4,
                )
        self.state = "post"
        for hook in hooks:
            hook.post_hook(self.last)
        if self.propagates:
            self.round(Kind.DONE)

    # ------------------------------------------------------------ failure

    def fail(self, error: BaseException) -> None:
        """An exception leaves the context on this rank: no other rank may wait for it for ever."""
        if self.state == "over" or self.comm.size == 1:
            return
        if not self.propagates:
            failure.abort(error, _WHERE)
        timer = threading.Timer(PATIENCE, failure.abort, (error, _WHERE))
        timer.daemon = True
        timer.start()
        try:
            self.round(Kind.FAILED, from_text(f"{type(error).__name__}: {error}"))
            for hook in self.members.values():
                hook.abandon()  # as the others do, who have heard of it
        finally:
            timer.cancel()
            self.close()

    # ------------------------------------------------------------ the guard of the communicator

    @property
    def _shadowing(self) -> bool:
        """Whether collectives are announced to the ranks that answer them by themselves."""
        if self.shadows and self.state == "joined":
            raise RuntimeError(
                "Join: a hook communicates on the communicator whose collectives are shadowed; "
                "leave the communicator out of the list, or give the hook one of its own"
            )
        return self.shadows and self.state == "active"

    def _announce(self, call: str) -> None:
        """Tell the others of a collective, so that none waits in it for a rank that failed."""
        if self.propagates:
            said = self.round(Kind.CALL, from_text(call))
            if len({row.numbers for row in said}) > 1:
                self.end(CollectiveMismatchError(shadow.mismatch(said)))

    def run(
        self, call: Call, tensors: Sequence[torch.Tensor], perform: Callable[..., torch.Tensor]
    ) -> torch.Tensor:
        """Carry out a collective of this rank; :class:`watch.Guard`."""
        if self.serving:
            return shadow.carry_out(call, tensors, perform)
        if self._shadowing:
            return shadow.run(self, call, tensors, perform)
        self._announce(call.operation.name)
        return perform(call, tensors)

    def exchange(
        self,
        sends: Sequence[torch.Tensor],
        receives: Sequence[torch.Tensor],
        perform: Callable[[], None],
    ) -> None:
        """Carry out an exchange of lists; :class:`watch.Guard`."""
        if not self.serving:
            if self._shadowing:
                self.round(Kind.EXCHANGE, shadow.sizes(sends, receives))
                self.iterations += 1
                shadow.check(self)
            else:
                self._announce("Alltoall")
        perform()

    def barrier(self, perform: Callable[[], None]) -> None:
        """Carry out a barrier; :class:`watch.Guard`."""
        if not self.serving:
            if self._shadowing:
                self.round(Kind.BARRIER)
                self.iterations += 1
            else:
                self._announce("Barrier")
        perform()

    def agree(self, call: str, numbers: tuple[int, ...]) -> list[tuple[int, ...] | None] | None:
        """The sizes of the active ranks; :class:`watch.Guard`."""
        if not self._shadowing:
            self._announce(call)
            return None
        name = from_text(call)
        n = len(name) + 1
        said = self.round(Kind.NUMBERS, (len(name), *name, *numbers))
        if len({row.numbers[:n] for row in said if row.kind == Kind.NUMBERS}) > 1:
            self.refuse(call, f"the ranks disagree: {shadow.mismatch(said)}")
        return [row.numbers[n:] if row.kind == Kind.NUMBERS else None for row in said]

    def complete(self, call: str, rows: Sequence[Row | None]) -> list[Row]:
        """What the ranks that ran out give and take; :class:`watch.Guard`."""
        return shadow.with_absent(call, self.comm, rows)

    def refuse(self, call: str, why: str) -> None:
        """Raise on all ranks; :class:`watch.Guard`."""
        if self._shadowing:
            text = f"Join: {call} cannot be shadowed: {why}"
            self.round(Kind.REFUSED, from_text(text))

    def taking_part(self) -> tuple[int, ...] | None:
        """The ranks that have not run out; :class:`watch.Guard`."""
        present = tuple(r for r, row in enumerate(self.said) if row.kind != Kind.JOINED)
        whole = not self.shadows or self.state != "active" or len(present) == self.comm.size
        return None if whole else present
