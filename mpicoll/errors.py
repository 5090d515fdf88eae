"""The exceptions of mpicoll."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = [
    "CollectiveMismatchError",
    "JoinAborted",
    "MPIError",
    "PluginError",
    "PluginMismatchError",
]


class MPIError(RuntimeError):
    """An MPI function failed.

    Parameters
    ----------
    call
        Name of the MPI function.
    code
        The error code it returned.
    error_class
        The error class of the code.
    text
        The library's description.

    Notes
    -----
    Communicators made by mpicoll use ``MPI_ERRORS_RETURN``, so a failed call raises this
    exception on the ranks where MPI reports it.
    """

    def __init__(self, call: str, code: int, error_class: int, text: str) -> None:
        super().__init__(call, code, error_class, text)
        self.call = call
        self.code = code
        self.error_class = error_class
        self.text = text

    def __str__(self) -> str:
        return f"{self.call} failed: {self.text} (error class {self.error_class}, code {self.code})"


class PluginError(RuntimeError):
    """A plugin cannot be loaded, or an adapter of it failed; the message names it.

    Attributes
    ----------
    failures
        Where it happened on other ranks: their ranks, with class and text of their exceptions.
    """

    failures: Sequence[tuple[int, str]] = ()


class PluginMismatchError(RuntimeError):
    """The ranks have different plugins, or adapt a joinable differently; raised on all of them."""


class CollectiveMismatchError(RuntimeError):
    """The ranks of a communicator did not make the same call; raised on all of them.

    The message says what each of them was about to call. Nothing has been sent, and the
    communicator can be used again.
    """


class JoinAborted(RuntimeError):
    """Another rank left a Join context with an exception.

    Parameters
    ----------
    rank
        That rank, in the communicator of the context.
    reason
        Its exception: class and text.
    """

    def __init__(self, rank: int, reason: str) -> None:
        super().__init__(rank, reason)
        self.rank = rank
        self.reason = reason

    def __str__(self) -> str:
        return f"rank {self.rank} left the Join context with {self.reason}"
