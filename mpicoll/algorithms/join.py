"""The Join context."""

from __future__ import annotations

import types
from collections.abc import Iterable, Sequence
from typing import Any

from .. import plugins
from ..communicator import Communicator, as_communicator
from ..errors import JoinAborted, PluginError
from .joinable import Joinable, JoinHook
from .member import Announced, MemberHook
from .session import Session
from .shadow import CommunicatorHook

__all__ = ["Join"]


#: The active context of every joinable that is in one. Not kept on the joinable, whose copies (of a
#: model, for a checkpoint) are in none. The context holds the joinable, so the id stays its own.
_contexts: dict[int, Join] = {}


class Announcement:
    """What :meth:`Join.notify_join_context` returns: an announcement that all ranks have heard."""

    def wait(self) -> bool:
        """Nothing is left to wait for."""
        return True

    def is_completed(self) -> bool:
        """Always."""
        return True


class Join:
    """A context in which ranks that have run out of inputs keep the others company.

    Parameters
    ----------
    joinables
        The :class:`Joinable` objects that communicate in an iteration, in the same order on every
        rank, all on one communicator. A :class:`mpicoll.Communicator` among them is shadowed: see
        Notes. Objects of other types are adapted by plugins.
    enable
        False: the context does nothing and communicates nothing. The same on every rank.
    throw_on_early_termination
        True: all ranks raise ``RuntimeError`` as soon as one has run out of inputs, and no hook
        runs. The same on every rank.
    on_error
        What happens when an exception leaves the body or a hook on one rank only: ``"abort"``
        prints the traceback and ends the job; ``"propagate"`` lets the other ranks raise
        :class:`mpicoll.errors.JoinAborted`. The same on every rank.
    **kwargs
        Passed to every :meth:`Joinable.join_hook` and plugin, unchanged. For a shadowed
        communicator ``divide_by_initial_world_size=True`` lets AVG divide by the number of all
        ranks.

    Attributes
    ----------
    joinables
        The joinables, in the order of their hooks.
    iterations
        How many rounds this rank has announced in the context: iterations, or collectives where a
        communicator is shadowed.
    shadowed
        How many rounds of other ranks it has answered since it ran out of inputs.

    Raises
    ------
    ValueError
        `joinables` is empty, has an object twice, or they use different communicators; `on_error`
        is another word.
    RuntimeError
        The class of a joinable did not call ``Joinable.__init__``. On entry: a joinable, or their
        communicator, is in an active context already.
    TypeError
        An object is not a Joinable, and no plugin can adapt it.
    PluginMismatchError
        The ranks have different plugins: on all ranks.
    PluginError
        A plugin failed: on all ranks. With ``on_error="propagate"`` the ranks where none did
        raise :class:`mpicoll.errors.JoinAborted`.

    Notes
    -----
    One round of the control protocol per iteration: the first joinable announces it through
    :meth:`notify_join_context`; ranks that have run out run the main hooks of all joinables, in
    order. When no rank has inputs left, all post hooks run.

    With a communicator in the list, it stands first, and every collective on it is a round:
    the ranks that have run out learn what the others call and take part with the neutral
    element, forward and backward, so that the results and gradients of the others are those of
    the active ranks alone. AVG divides by their number. Gathers have no rows of the others
    (zeros in ``mpicoll.nn.functional``, whose shapes are fixed). What has no neutral element
    raises ``RuntimeError`` on all ranks: messages between two ranks, Bcast and Scatter whose root
    has run out, Alltoall with data for such a rank, Split, Dup and Free. What the others compute in
    the meantime this rank does not: a model that each rank updates by itself is behind here when
    the context ends, until a rank that ran out last broadcasts it (:class:`DataParallel` does).

    :class:`DataParallel` and :class:`ZeroRedundancyOptimizer` announce each forward, backward and
    step, in rounds that only their own hooks answer: an iteration may have any number of them.
    ``iterations`` counts what the first joinable announces. One on the communicator of the context
    that is not in the list raises ``RuntimeError`` when it is to communicate.

    Entering is collective on the communicator of the joinables. So is making the context where an
    object is to be adapted: on the communicator of the other joinables, the world if there is none.

    With ``on_error="propagate"`` every collective on the communicator of the context is preceded
    by a round, in which a failure becomes known. Where the others wait in something else for 15 s
    the job is aborted all the same.

    References
    ----------
    The protocol and the names are those of ``torch.distributed.algorithms.Join``.

    Examples
    --------
    >>> with Join([comm]):
    ...     for x in inputs:  # more on one rank than on another
    ...         total = comm.Allreduce(x, mpicoll.MPI_SUM)
    """

    def __init__(
        self,
        joinables: Sequence[Any],
        enable: bool = True,
        throw_on_early_termination: bool = False,
        *,
        on_error: str = "abort",
        **kwargs: Any,
    ) -> None:
        if on_error not in ("abort", "propagate"):
            raise ValueError(f"Join: on_error is {on_error!r}; it must be 'abort' or 'propagate'")
        if not isinstance(joinables, Iterable):
            raise TypeError(
                f"Join: joinables must be a list of joinables, not a {_name(joinables)}: Join([it])"
            )
        given = list(joinables)
        if not given:
            raise ValueError("Join: joinables is empty; it needs at least one Joinable")
        for i, thing in enumerate(given):
            if any(thing is other for other in given[:i]):
                raise ValueError(f"Join: joinables[{i}], a {_name(thing)}, is in the list twice")
        self._enable = enable
        self._throws = throw_on_early_termination
        self._propagates = on_error == "propagate"
        self._kwargs = kwargs
        self._chosen: list[str] = []
        self._failure: BaseException | None = None
        self._communicator: Communicator | None = None
        self._session: Session | None = None
        self._last: Session | None = None
        self.joinables: list[Any] = []
        # Those that need no plugin first: a failure is then told on their communicator.
        for i, thing in enumerate(given):
            if isinstance(thing, Joinable):
                self._place(i, thing)
        self.joinables = [self._adapted(i, thing) for i, thing in enumerate(given)]
        if not all(isinstance(thing, Joinable) for thing in given):
            if self._enable:
                self._agree(self._chosen, self._failure)
            elif self._failure is not None:
                raise self._failure
        # A communicator announces its collectives itself, so it comes first.
        self.joinables.sort(key=lambda thing: not isinstance(thing, Communicator))

    # ------------------------------------------------------------ construction

    def _adapted(self, i: int, thing: Any) -> Any:
        if isinstance(thing, Joinable) or self._failure is not None:
            return thing
        try:
            plugins.load()
            made = plugins.adapt(thing, self._communicator, self._options, f"joinables[{i}]")
            self._chosen.append(made.plugin)
            self._place(i, made.joinable)
        except BaseException as error:  # exits, too: the others wait for this rank
            self._failure = error
            return thing
        return made.joinable

    def _agree(self, chosen: Sequence[str], failure: BaseException | None) -> None:
        """Raise on all ranks where one has failed, or plugins differ."""
        try:
            plugins.agree(self._group, chosen, failure)
        except PluginError as error:
            if self._propagates and failure is None and error.failures:
                raise JoinAborted(*error.failures[0]) from error
            raise

    def _place(self, i: int, joinable: Any) -> None:
        """Check that a joinable can take part, on the communicator of the others."""
        if not isinstance(joinable, Communicator) and not hasattr(joinable, "_join_ready"):
            raise RuntimeError(
                f"Join: joinables[{i}], a {_name(joinable)}, has not been initialized as a "
                "Joinable; its __init__ must call super().__init__() or Joinable.__init__(self)"
            )
        comm = _communicator_of(joinable)
        if self._communicator is None:
            self._communicator = comm
        elif comm is not self._communicator:
            raise ValueError(
                f"Join: joinables[{i}], a {_name(joinable)}, uses {comm!r}, those before it "
                f"{self._communicator!r}; all must use the same communicator"
            )

    @property
    def _options(self) -> types.MappingProxyType[str, Any]:
        return types.MappingProxyType(self._kwargs)

    # ------------------------------------------------------------ what observers see

    @property
    def rank(self) -> int:
        """Rank of this process in the communicator of the joinables."""
        return self._group.rank

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self._group.size

    @property
    def iterations(self) -> int:
        """Iterations that this rank has done in the context."""
        return 0 if self._last is None else self._last.iterations

    @property
    def shadowed(self) -> int:
        """Iterations of other ranks that this rank has answered since it ran out of inputs."""
        return 0 if self._last is None else self._last.shadowed

    @property
    def _group(self) -> Communicator:
        return as_communicator("Join", self._communicator)

    # ------------------------------------------------------------ the context

    def __enter__(self) -> Join:
        if not self._enable:
            return self
        if self._session is not None or any(id(j) in _contexts for j in self.joinables):
            raise RuntimeError(
                "Join: this context, or one of its joinables, is in an active Join context already"
            )
        Session.require_free(plugins.core_of(self._group))
        self._compare_plugins()
        shadows = any(isinstance(j, Communicator) for j in self.joinables)
        by_all = bool(self._kwargs.get("divide_by_initial_world_size", False))
        session = Session(self._group._comm, shadows, self._throws, self._propagates, by_all)
        session.open(len(self.joinables))
        self._session = self._last = session
        try:
            self._hooks = self._make_hooks(session)
            for joinable in self.joinables:
                _contexts[id(joinable)] = self
            session.state = "active"
            self._tell("started")
        except BaseException as error:
            self._fail(error)
            raise
        return self

    def _compare_plugins(self) -> None:
        failure: BaseException | None = None
        extra: list[list[JoinHook]] = []
        chosen = list(self._chosen)
        try:
            plugins.load()
            for joinable in self.joinables:
                found = plugins.join_hooks(joinable, self._options)
                extra.append([hook for hook, _ in found])
                chosen += [plugin for _, plugin in found]
        except BaseException as error:
            failure = error
        self._extra = extra
        self._agree(chosen, failure)

    def _make_hooks(self, session: Session) -> list[JoinHook]:
        hooks: list[JoinHook] = []
        for i, (joinable, extra) in enumerate(zip(self.joinables, self._extra, strict=True)):
            if isinstance(joinable, Communicator):
                hook: JoinHook = CommunicatorHook(session)
            else:
                hook = joinable.join_hook(**self._kwargs)
            if not isinstance(hook, JoinHook):
                raise TypeError(
                    f"Join: join_hook of {_name(joinable)} returned a {_name(hook)}, not a JoinHook"
                )
            if isinstance(hook, MemberHook):
                session.members[i] = hook
            hooks += [hook, *extra]
        return hooks

    def __exit__(self, kind: Any, error: BaseException | None, _traceback: Any) -> None:
        session = self._session
        if session is None:
            return
        if error is not None:
            self._fail(error)
            return
        if session.state == "over":  # the body has swallowed an error of all ranks
            self._leave(session)
            return
        try:
            session.run_out(self._hooks, self._tell)
        except BaseException as failure:
            self._fail(failure)
            raise
        self._leave(session)
        self._tell("finished", is_last_joiner=session.last, shadowed=session.shadowed)

    def _fail(self, error: BaseException) -> None:
        """`error` leaves the context on this rank."""
        session = self._session
        assert session is not None
        self._tell("failed", exc=error)
        try:
            session.fail(error)
        finally:
            self._leave(session)

    def _leave(self, session: Session) -> None:
        """Take back everything that entering has set."""
        session.close()
        self._session = None
        for joinable in self.joinables:
            if _contexts.get(id(joinable)) is self:
                del _contexts[id(joinable)]

    def _tell(self, event: str, **arguments: Any) -> None:
        plugins.notify(f"join_{event}", context=self, **arguments)

    @staticmethod
    def notify_join_context(joinable: Joinable) -> Announcement | None:
        """Announce an iteration; called by a joinable before its first collective in it.

        Parameters
        ----------
        joinable
            The object that calls.

        Returns
        -------
        Announcement or None
            A handle with ``wait()``; None if `joinable` is not the first of an active context,
            or this rank has run out of inputs.

        Raises
        ------
        RuntimeError
            ``Joinable.__init__`` was not called. A rank has run out of inputs and the context was
            made with ``throw_on_early_termination``: on all ranks.
        JoinAborted
            Another rank has left the context with an exception, and ``on_error="propagate"``.

        Notes
        -----
        A shadowed communicator announces by its collectives; for it this does nothing.
        """
        if isinstance(joinable, Communicator):
            return None
        if not hasattr(joinable, "_join_ready"):
            raise RuntimeError(
                f"Join: {_name(joinable)} has not been initialized as a Joinable; its __init__ "
                "must call super().__init__() or Joinable.__init__(self)"
            )
        context = _contexts.get(id(joinable))
        if context is None or context.joinables[0] is not joinable:
            return None
        session = context._session
        if session is None or session.state != "active":
            return None
        session.iterate()
        return Announcement()

    @staticmethod
    def _require_listed(joinable: Joinable) -> None:
        """Raise where ranks that have run out of inputs could not answer what it is about to do."""
        session = Session.of(_communicator_of(joinable)._comm)
        if session is not None and session.state == "active" and id(joinable) not in _contexts:
            raise RuntimeError(
                f"Join: a {_name(joinable)} on the communicator of an active context is not among "
                "its joinables: ranks that have run out of inputs would not answer it, and the "
                "others would wait for ever; add it to the list"
            )

    @staticmethod
    def _announce(joinable: Joinable, action: str) -> Announced | None:
        """Announce what a joinable with a :class:`MemberHook` is about to do.

        None where it is in no active context, or this rank has run out of inputs.
        """
        context = _contexts.get(id(joinable))
        session = None if context is None else context._session
        if context is None or session is None or session.state != "active":
            return None
        index = next(i for i, other in enumerate(context.joinables) if other is joinable)
        return Announced(session.announce(index, action), context._options)


def _communicator_of(joinable: Any) -> Communicator:
    if isinstance(joinable, Communicator):
        return joinable
    return as_communicator("Join", joinable.join_process_group)


def _name(thing: Any) -> str:
    return f"{type(thing).__module__}.{type(thing).__qualname__}"
