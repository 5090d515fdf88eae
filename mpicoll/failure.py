"""One rank that fails ends the job, instead of leaving the others to wait for it for ever."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import Any, NoReturn

from . import config
from ._core import mpi

__all__ = ["abort", "allow_exceptions", "watch_this_rank"]

_ALLOWED = "_mpicoll_allowed"  # set on exceptions that end no job
#: Programs that report the failures of what they run themselves.
_RUNNERS = ("pytest", "py.test", "unittest", "nose2", "green", "stestr")

_installed = False
_allowed = 0  # how many `allow_exceptions` are entered
_exit_code: int | None = None  # with which the interpreter has begun to end


class allow_exceptions(contextlib.ContextDecorator):
    """A context, or a decorator, in which an exception on one rank does not end the job.

    Exceptions that leave it, and those that end the program or a thread while it is entered, are
    treated as Python does without mpicoll: the traceback is printed, and this rank alone ends.
    The other ranks may then wait for it for ever.

    Notes
    -----
    Without it, an exception that nobody catches, in the main program or in a thread, prints its
    traceback, marked with the rank, and ends all ranks of the job (``MPI_Abort``); so does
    ``sys.exit`` with a status that is not zero. An exception that is caught ends nothing.
    Interactive sessions and test runners are left alone, and so are jobs of one rank. The
    environment variable ``MPICOLL_ABORT_ON_ERROR=0`` switches all of it off.

    Examples
    --------
    >>> import mpicoll
    >>> with mpicoll.allow_exceptions():
    ...     comm = mpicoll.COMM_SELF.Dup()
    """

    def __enter__(self) -> allow_exceptions:
        global _allowed
        _allowed += 1
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        global _allowed
        _allowed -= 1
        if error is not None:
            with contextlib.suppress(AttributeError):  # a class with slots
                setattr(error, _ALLOWED, True)


def watch_this_rank() -> None:
    """From now on, a failure of this rank ends the job, unless the settings say otherwise."""
    global _installed
    if _installed or not config.read().abort_on_error:
        return
    _installed = True
    sys.excepthook = _after(sys.excepthook, _uncaught)
    if threading.excepthook is threading.__excepthook__:  # else a test runner looks after threads
        threading.excepthook = _after(threading.excepthook, _uncaught_in_thread)
    sys.exit = _Exit.leave
    atexit.register(_at_exit)


def _after(before: Callable[..., Any], why: Callable[..., str | None]) -> Callable[..., None]:
    """A hook that does what was done before, and ends the job where `why` gives a reason."""

    def hook(*about: Any) -> None:
        reason = why(*about)
        if reason is None:
            before(*about)
        elif before is sys.__excepthook__:
            abort(about[1], reason)
        else:
            sys.stderr.write(_mark())
            before(*about)
            _end(reason)

    return hook


def _concerns_others() -> bool:
    if not mpi.is_bound() or _allowed or hasattr(sys, "ps1") or sys.flags.interactive:
        return False
    main = os.path.basename(sys.argv[0] if sys.argv else "")
    package = getattr(sys.modules.get("__main__"), "__package__", "") or ""
    if main.removesuffix(".exe") in _RUNNERS or package.partition(".")[0] in _RUNNERS:
        return False
    from mpi4py import MPI

    return bool(MPI.COMM_WORLD.size > 1)


def _uncaught(
    kind: type[BaseException], error: BaseException, where: TracebackType | None
) -> str | None:
    if not _concerns_others() or getattr(error, _ALLOWED, False):
        return None
    return "with an exception that nobody caught"


def _uncaught_in_thread(about: threading.ExceptHookArgs) -> str | None:
    if issubclass(about.exc_type, SystemExit):  # ends the thread, quietly
        return None
    if not _concerns_others() or getattr(about.exc_value, _ALLOWED, False):
        return None
    daemon = about.thread is not None and about.thread.daemon
    if daemon and not threading.main_thread().is_alive():  # the program has ended
        return None
    name = "" if about.thread is None else f" {about.thread.name}"
    return f"in its thread{name}, with an exception that nobody caught"


class _Exit(SystemExit):
    """A ``SystemExit`` that knows when the interpreter ends with it.

    The interpreter asks for the status, from no Python code, when it has begun to end; code that
    catches the exception asks from a frame of its own.
    """

    def __init__(self, status: object = None) -> None:
        super().__init__(*(() if status is None else (status,)))
        self._status = status

    @property
    def code(self) -> Any:
        """The status."""
        global _exit_code
        if sys._getframe().f_back is None and threading.current_thread() is threading.main_thread():
            _exit_code = self._as_number()
        return self._status

    @code.setter
    def code(self, status: object) -> None:
        self._status = status

    def _as_number(self) -> int:
        if getattr(self, _ALLOWED, False) or self._status is None:
            return 0
        return self._status if isinstance(self._status, int) else 1

    @staticmethod
    def leave(status: object = None, /) -> NoReturn:
        """``sys.exit``."""
        raise _Exit(status)


def _at_exit() -> None:
    if _exit_code and _concerns_others():
        _end(f"with the exit status {_exit_code}", _exit_code)


def abort(error: BaseException, why: str) -> NoReturn:
    """Print the traceback of `error`, and end the job; `why` goes on after "the rank failed"."""
    sys.stdout.flush()
    words = traceback.format_exception(type(error), error, error.__traceback__)
    sys.stderr.write(_mark() + "".join(words))  # at once: other ranks write too
    _end(why)


def _mark() -> str:
    """The beginning of a line that says whose words follow."""
    from mpi4py import MPI

    return f"[rank {MPI.COMM_WORLD.rank} of {MPI.COMM_WORLD.size}] "


def _end(why: str, status: int = 1) -> NoReturn:
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    sys.stdout.flush()
    sys.stderr.write(
        f"mpicoll: rank {world.rank} of {world.size} failed {why}; the job is aborted\n"
    )
    sys.stderr.flush()
    time.sleep(0.5)  # launchers drop what they have not read yet when they hear of an abort
    world.Abort(status & 255 or 1)
    os._exit(1)  # some libraries return from MPI_Abort
