"""The hooks that a plugin may implement: pluggy's specifications."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import pluggy

if TYPE_CHECKING:
    from ..algorithms import Join, Joinable, JoinHook
    from ..communicator import Communicator
    from ..watch import Event

__all__ = [
    "hookimpl",
    "mpicoll_adapt_joinable",
    "mpicoll_collective_finished",
    "mpicoll_collective_started",
    "mpicoll_join_failed",
    "mpicoll_join_finished",
    "mpicoll_join_hooks",
    "mpicoll_join_rank_joined",
    "mpicoll_join_shadowed",
    "mpicoll_join_started",
    "mpicoll_plugin_info",
]

hookspec = pluggy.HookspecMarker("mpicoll")
hookimpl = pluggy.HookimplMarker("mpicoll")


# ---------------------------------------------------------------- what changes what Join does


@hookspec(firstresult=True)
def mpicoll_adapt_joinable(
    obj: Any, comm: Communicator | None, options: Mapping[str, Any]
) -> Joinable | None:
    """Make an object that is not a Joinable one, for ``Join``.

    The plugins are asked in turn until one does not return None. An exception ends the ``Join``
    on all ranks.

    Parameters
    ----------
    obj
        What was given to ``Join``.
    comm
        The communicator of the joinables so far; None if there is none yet.
    options
        The keyword arguments of ``Join``, read-only.

    Returns
    -------
    Joinable or None
        None if the plugin does not know such objects.
    """


@hookspec
def mpicoll_join_hooks(
    joinable: Joinable, options: Mapping[str, Any]
) -> JoinHook | list[JoinHook] | None:
    """Further hooks for a joinable; they run after its own.

    An exception ends the ``Join`` on all ranks.

    Parameters
    ----------
    joinable
        One of the joinables, adapted if it had to be.
    options
        The keyword arguments of ``Join``, read-only.

    Returns
    -------
    JoinHook, list of JoinHook, or None
        None if the plugin has nothing to add to this joinable.
    """


# ---------------------------------------------------------------- observers


@hookspec
def mpicoll_join_started(context: Join) -> None:
    """A ``Join`` was entered on this rank.

    Parameters
    ----------
    context
        The ``Join``.
    """


@hookspec
def mpicoll_join_rank_joined(context: Join, iterations: int) -> None:
    """The rank has run out of inputs; called once, on that rank only.

    Parameters
    ----------
    context
        The ``Join``.
    iterations
        How many iterations this rank did.
    """


@hookspec
def mpicoll_join_shadowed(context: Join, index: int, active: int) -> None:
    """The rank has run the main hooks once more.

    Parameters
    ----------
    context
        The ``Join``.
    index
        The number of the round on this rank, from 0.
    active
        How many ranks still had inputs in it.
    """


@hookspec
def mpicoll_join_finished(context: Join, is_last_joiner: bool, shadowed: int) -> None:
    """All ranks have run out of inputs and the post hooks have run.

    Parameters
    ----------
    context
        The ``Join``.
    is_last_joiner
        True if this rank ran no main hook.
    shadowed
        How many rounds of main hooks this rank ran.
    """


@hookspec
def mpicoll_join_failed(context: Join, exc: BaseException) -> None:
    """A ``Join`` ends with an exception on this rank.

    Parameters
    ----------
    context
        The ``Join``.
    exc
        The exception.
    """


@hookspec
def mpicoll_collective_started(event: Event) -> None:
    """A collective is about to be made on this rank.

    Parameters
    ----------
    event
        What is known of it. :func:`mpicoll_collective_finished` gets the same object, always.
    """


@hookspec
def mpicoll_collective_finished(event: Event) -> None:
    """A collective has ended on this rank, also with an exception.

    Parameters
    ----------
    event
        The same object as :func:`mpicoll_collective_started` got, with `t_end` and `error`.
    """


# ---------------------------------------------------------------- about the plugin


@hookspec
def mpicoll_plugin_info() -> dict[str, Any]:  # type: ignore[empty-body]
    """What ``python -m mpicoll plugins`` shows of the plugin, as names and values.

    Returns
    -------
    dict
        Anything that can be written as JSON.
    """
