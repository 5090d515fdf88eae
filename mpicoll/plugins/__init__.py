"""Plugins: what other distributions add to Join, and who watches the collectives.

A plugin is a module or an object to which an entry point of the group ``mpicoll.plugins`` leads,
with functions that :data:`mpicoll.hookimpl` marks. They are found, imported and registered at the
first ``Join`` or communicating call, once; nothing of this module is needed before, and importing
it does not import pluggy.

For ``algorithms.Join``: :func:`load` first, :func:`adapt` for every object that is not a
Joinable, :func:`join_hooks` for every joinable, :func:`agree` once on entry, and :func:`notify` at
each event.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from .. import watch

if TYPE_CHECKING:
    from .._core import mpi
    from ..algorithms import Joinable, JoinHook
    from ..communicator import Communicator
    from .manager import Manager

__all__ = [
    "GROUP",
    "HOOK_API",
    "Adapted",
    "ExtraHook",
    "adapt",
    "agree",
    "join_hooks",
    "load",
    "notify",
]

#: The entry-point group in which plugins are found.
GROUP = "mpicoll.plugins"
#: The version of the hooks; a plugin may declare the one it was written for as `mpicoll_hook_api`.
HOOK_API = 1

_lock = threading.RLock()
_manager: Manager | None = None
_problem: BaseException | None = None
_agreeing = False


class Adapted(NamedTuple):
    """A joinable, and the plugin that made it."""

    joinable: Joinable
    plugin: str


class ExtraHook(NamedTuple):
    """A join hook, and the plugin that added it."""

    hook: JoinHook
    plugin: str


def __getattr__(name: str) -> Any:
    if name == "hookimpl":
        from .specs import hookimpl

        return hookimpl
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def load() -> None:
    """Find, import and register the plugins, once; not collective.

    Raises
    ------
    PluginError
        A plugin cannot be loaded, and ``MPICOLL_PLUGIN_ERRORS`` is not ``warn``. Raised again at
        every call.
    ValueError
        A variable of the environment has a value that means nothing.
    """
    global _manager, _problem
    with _lock:
        if _problem is not None:
            raise _problem
        if _manager is not None:
            return
        from .. import config
        from .manager import Manager

        try:
            _manager = Manager(config.read())
            _manager.load()
            _manager.complain()
            _manager.observe()
        except BaseException as error:
            _manager, _problem = None, error
            raise


def _at_first_use() -> None:
    try:
        load()
    except BaseException:
        if not _agreeing:
            watch.at_first_use(_at_first_use)  # the next attempt fails, too
            raise


watch.at_first_use(_at_first_use)


def _loaded() -> Manager:
    load()
    assert _manager is not None
    return _manager


def adapt(
    obj: Any, comm: Communicator | None, options: Mapping[str, Any], where: str = "joinables"
) -> Adapted:
    """The joinable that the first plugin which knows `obj` makes of it.

    Parameters
    ----------
    obj
        An object that is not a Joinable.
    comm
        The communicator of the joinables so far, or None.
    options
        The keyword arguments of ``Join``.
    where
        How messages call `obj`, as in ``joinables[1]``.

    Returns
    -------
    Adapted
        The joinable and the name of the plugin, for :func:`agree`.

    Raises
    ------
    TypeError
        No plugin knows such objects; the message names those that were asked. Or one returned
        something that is not a Joinable.
    PluginError
        A plugin failed; its exception is the cause.
    """
    return _loaded().adapt(obj, comm, options, where)


def join_hooks(joinable: Joinable, options: Mapping[str, Any]) -> list[ExtraHook]:
    """The hooks that plugins add to a joinable, in the order in which they run after its own.

    Raises
    ------
    TypeError
        A plugin returned something that is not a JoinHook, a list of them, or None.
    PluginError
        A plugin failed; its exception is the cause.
    """
    return _loaded().join_hooks(joinable, options)


def notify(event: str, **arguments: Any) -> None:
    """Tell the observers of ``mpicoll_`` `event`, as in ``notify("join_started", context=self)``.

    Never raises: an observer that does is logged once and switched off.
    """
    if _manager is not None:
        _manager.notify("mpicoll_" + event, arguments)


def core_of(comm: Communicator) -> mpi.Comm:
    """The core of a communicator, also where the plugins cannot be loaded: agree() tells that."""
    global _agreeing
    _agreeing = True
    try:
        return comm._comm
    finally:
        _agreeing = False


def agree(comm: Communicator, chosen: Sequence[str], failure: BaseException | None = None) -> None:
    """Let the ranks compare their plugins and what they chose. Collective.

    Every rank calls it once per ``Join``, also one where :func:`load`, :func:`adapt` or
    :func:`join_hooks` has failed: it gives the exception as `failure`, so that no rank waits for
    it in vain.

    Parameters
    ----------
    comm
        The communicator of the ``Join``.
    chosen
        The plugins that adapted the joinables and added hooks, in order.
    failure
        What went wrong on this rank.

    Raises
    ------
    PluginMismatchError
        On all ranks, if the ranks have different plugins, or chose differently.
    BaseException
        `failure` itself on the ranks that gave one; the other ranks raise `PluginError`.
    """
    from .agreement import compare

    core = core_of(comm)
    watch.require_unobserved()
    compare(core, None if _manager is None else _manager.identities(), chosen, failure)
