"""Finds, imports and registers the plugins, and calls their hooks one plugin at a time."""

from __future__ import annotations

import dataclasses
import logging
import re
import threading
import traceback
import types
import warnings
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import EntryPoint, entry_points, version
from typing import Any

import pluggy

from .. import watch
from ..config import Settings
from ..errors import PluginError
from . import GROUP, HOOK_API, Adapted, ExtraHook, builtin, specs

__all__ = ["Manager", "Plugin"]

logger = logging.getLogger("mpicoll")

_STARTED, _FINISHED = "mpicoll_collective_started", "mpicoll_collective_finished"
_HOOKS = [name for name in specs.__all__ if name.startswith("mpicoll_")]
#: The hooks whose implementations are isolated: what they do to themselves changes nothing else.
_OBSERVERS = set(_HOOKS) - {"mpicoll_adapt_joinable", "mpicoll_join_hooks", "mpicoll_plugin_info"}


@dataclasses.dataclass
class Plugin:
    """One plugin that was found.

    Attributes
    ----------
    name
        The name of the entry point.
    distribution, version
        What brought it.
    value
        Where the entry point leads, as ``module`` or ``module:attribute``.
    state
        ``"loaded"``, ``"blocked"`` or ``"failed"``.
    reason
        Why it is not loaded.
    hooks
        The hooks that it implements.
    object
        The module or object, if loaded.
    error
        The exception for which it is not loaded.
    """

    name: str
    distribution: str
    version: str
    value: str
    state: str = "loaded"
    reason: str = ""
    hooks: tuple[str, ...] = ()
    object: Any = None
    error: BaseException | None = None

    @property
    def label(self) -> str:
        """Name and distribution, as messages show them."""
        return f"{self.name} ({self.distribution} {self.version})"


def normalized(name: str) -> str:
    """A distribution's name as package indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


class Manager:
    """The plugins of this process.

    Parameters
    ----------
    settings
        What the environment says: which plugins are blocked, which are allowed, and what happens
        when one cannot be loaded.

    Attributes
    ----------
    plugins
        All plugins, those of mpicoll itself first, then in the order in which they are called.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.plugins: list[Plugin] = []
        self.unknown: list[str] = []
        self._pluggy = pluggy.PluginManager("mpicoll")
        self._pluggy.add_hookspecs(specs)
        self._off: set[str] = set()
        self._watched: watch.Observer | None = None
        self._observed: dict[str, list[pluggy.HookImpl]] = {}

    # ------------------------------------------------------------ loading

    def load(self) -> None:
        """Import and register everything that is neither blocked nor broken."""
        own = Plugin("builtin", "mpicoll", version("mpicoll"), builtin.__name__, object=builtin)
        self._register(own)
        points = self._found()
        found = [self._describe(point) for point in points]
        for plugin, point in zip(found, points, strict=True):
            if plugin.state == "loaded":
                self._import(plugin, point)
        # pluggy calls what was registered last first: backwards, so that the order is ours.
        for plugin in reversed(found):
            if plugin.state == "loaded":
                self._register(plugin)
        self.plugins = [own, *found]
        self.unknown = self._unknown(found)

    def problems(self) -> list[str]:
        """What cannot be loaded, and why."""
        failed = [p for p in self.plugins if p.state == "failed"]
        return [f"the plugin {p.label} cannot be loaded: {p.reason}" for p in failed] + [
            f"MPICOLL_PLUGINS names {name!r}, but no installed distribution brings such a plugin"
            for name in self.unknown
        ]

    def complain(self) -> None:
        """Raise, or warn, if there are problems.

        Raises
        ------
        PluginError
            There is one, and the settings do not say ``warn``.
        """
        for problem in self.problems():
            if self.settings.plugin_errors == "raise":
                causes = [p.error for p in self.plugins if p.error is not None]
                raise PluginError(
                    f"{problem}; MPICOLL_PLUGIN_ERRORS=warn goes on without it, "
                    "MPICOLL_DISABLE_PLUGINS does not even try those that it names"
                ) from (causes[0] if causes else None)
            warnings.warn(f"mpicoll: {problem}", RuntimeWarning, stacklevel=2)

    def observe(self) -> None:
        """Let the observers see what happens from now on."""
        for name in _OBSERVERS:
            self._observed[name] = self._implementations(name)
        if self._observed[_STARTED] or self._observed[_FINISHED]:
            self._watched = watch.observe(self._started, self._finished)

    @staticmethod
    def _found() -> list[EntryPoint]:
        def order(point: EntryPoint) -> tuple[str, str, str]:
            return normalized(point.dist.name if point.dist else ""), point.name, point.value

        return sorted(entry_points(group=GROUP), key=order)

    def _describe(self, point: EntryPoint) -> Plugin:
        name = point.dist.name if point.dist else "unknown"
        release = point.dist.version if point.dist else "unknown"
        plugin = Plugin(point.name, name, release, point.value)
        names = {plugin.name, normalized(plugin.distribution)}
        disabled = self.settings.disabled_plugins
        allowed = self.settings.allowed_plugins
        if "all" in disabled:
            plugin.state, plugin.reason = "blocked", "MPICOLL_DISABLE_PLUGINS says all"
        elif names & _both(disabled):
            plugin.state, plugin.reason = "blocked", "MPICOLL_DISABLE_PLUGINS names it"
        elif allowed is not None and not names & _both(allowed):
            plugin.state, plugin.reason = "blocked", "MPICOLL_PLUGINS does not name it"
        return plugin

    def _import(self, plugin: Plugin, point: EntryPoint) -> None:
        try:
            with watch.observing():  # what is imported on this rank only must not communicate
                plugin.object = point.load()
        except (Exception, SystemExit) as error:
            _fail(plugin, f"importing {plugin.value} raised {type(error).__name__}: {error}", error)
            return
        declared = getattr(plugin.object, "mpicoll_hook_api", HOOK_API)
        if declared != HOOK_API:
            _fail(
                plugin,
                f"it is written for mpicoll_hook_api {declared!r}, but this mpicoll has {HOOK_API}",
            )

    def _register(self, plugin: Plugin) -> None:
        """Register its object, unless something is wrong with the hooks."""
        thing, label = plugin.object, plugin.label
        problem = _unmarked(thing)
        if problem:
            _fail(plugin, problem)
            return
        try:
            self._pluggy.register(thing, name=label)
            self._pluggy.check_pending()
            _refuse_wrappers(thing, self._of(thing))
        except (ValueError, pluggy.PluginValidationError) as error:
            if self._pluggy.get_name(thing) == label:  # not under another plugin's name
                self._pluggy.unregister(thing)
            _fail(plugin, " ".join(str(error).split()), error)
            return
        implemented = {caller.name for caller in self._pluggy.get_hookcallers(thing) or ()}
        plugin.hooks = tuple(name for name in _HOOKS if name in implemented)

    def _of(self, thing: Any) -> Iterator[pluggy.HookImpl]:
        for caller in self._pluggy.get_hookcallers(thing) or ():
            yield from (i for i in caller.get_hookimpls() if i.plugin is thing)

    def _unknown(self, found: Sequence[Plugin]) -> list[str]:
        """What the allow-list names and nothing brings: a slip of the pen would go unnoticed."""
        known = {name for p in found for name in (p.name, normalized(p.distribution))}
        allowed = self.settings.allowed_plugins or ()
        return [name for name in allowed if name not in known and normalized(name) not in known]

    # ------------------------------------------------------------ asking

    def _implementations(self, hook: str) -> list[pluggy.HookImpl]:
        """In the order in which they are called: tryfirst, then the others, then trylast."""
        return list(reversed(getattr(self._pluggy.hook, hook).get_hookimpls()))

    def identities(self) -> list[str]:
        """What has to be the same on every rank: the installed plugins that are loaded."""
        return [p.label for p in self.plugins if p.state == "loaded" and p.object is not builtin]

    def adapt(self, obj: Any, comm: Any, options: Mapping[str, Any], where: str) -> Adapted:
        """See :func:`mpicoll.plugins.adapt`."""
        from ..algorithms import Joinable

        given = {"obj": obj, "comm": comm, "options": types.MappingProxyType(dict(options))}
        asked = []
        for implementation in self._implementations("mpicoll_adapt_joinable"):
            name = implementation.plugin_name
            asked.append(name)
            made = _loudly(implementation, given, f"adapt {where}, a {_type(obj)}")
            if made is None:
                continue
            if not isinstance(made, Joinable):
                raise TypeError(
                    f"Join: the plugin {name} made of {where}, a {_type(obj)}, a {_type(made)}, "
                    "which is not a Joinable"
                )
            return Adapted(made, name)
        absent = "".join(
            f"; {p.label} is {p.state}: {p.reason}" for p in self.plugins if p.state != "loaded"
        )
        raise TypeError(
            f"Join: {where} is a {_type(obj)}, which is not a Joinable, and no plugin can adapt "
            f"it (asked: {', '.join(asked) or 'none'}{absent}); mpicoll.algorithms.DataParallel "
            "wraps a module, and the plugin mpicoll-torch-joinable takes torch's own wrapper and "
            "optimizers"
        )

    def join_hooks(self, joinable: Any, options: Mapping[str, Any]) -> list[ExtraHook]:
        """See :func:`mpicoll.plugins.join_hooks`."""
        from ..algorithms import JoinHook

        given = {"joinable": joinable, "options": types.MappingProxyType(dict(options))}
        found = []
        for implementation in self._implementations("mpicoll_join_hooks"):
            name = implementation.plugin_name
            made = _loudly(implementation, given, f"give the hooks for a {_type(joinable)}")
            for hook in made if isinstance(made, (list, tuple)) else [made]:
                if hook is None:
                    continue
                if not isinstance(hook, JoinHook):
                    raise TypeError(
                        f"Join: the plugin {name} gave for a {_type(joinable)} a {_type(hook)}; "
                        "it must be a JoinHook, a list of them, or None"
                    )
                found.append(ExtraHook(hook, name))
        return found

    def info(self, plugin: Plugin) -> dict[str, Any]:
        """What the plugin says of itself; empty if it says nothing."""
        for implementation in self._implementations("mpicoll_plugin_info"):
            if implementation.plugin_name == plugin.label:
                try:
                    said: Any = implementation.function()
                    return dict(said)
                except Exception as error:
                    return {"mpicoll_plugin_info": f"raised {type(error).__name__}: {error}"}
        return {}

    # ------------------------------------------------------------ observers

    def notify(self, hook: str, given: Mapping[str, Any]) -> None:
        """Call the observers of one event; whatever goes wrong in one ends with it."""
        if self._observed.get(hook):
            with watch.observing():
                self._call(hook, given)

    def _started(self, event: watch.Event) -> None:
        self._call(_STARTED, {"event": event})  # watch sees to it that nobody communicates

    def _finished(self, event: watch.Event) -> None:
        self._call(_FINISHED, {"event": event})

    def _call(self, hook: str, given: Mapping[str, Any]) -> None:
        for implementation in self._observed[hook]:
            if implementation.plugin_name in self._off:
                continue
            try:
                implementation.function(*(given[name] for name in implementation.argnames))
            except BaseException as error:  # also exits: an observer does not end the job
                self._switch_off(implementation.plugin_name, hook, error)

    def _switch_off(self, name: str, hook: str, error: BaseException) -> None:
        with _lock:
            if name in self._off:
                return
            self._off.add(name)
        place = traceback.extract_tb(error.__traceback__)[-1]
        logger.error(
            "the plugin %s raised %s in %s (%s:%s); its observers are switched off",
            name, " ".join(repr(error).split()), hook, place.filename, place.lineno,
            exc_info=error if logger.isEnabledFor(logging.DEBUG) else None,
        )  # fmt: skip
        left = [
            i for h in (_STARTED, _FINISHED) for i in self._observed[h]
            if i.plugin_name not in self._off
        ]  # fmt: skip
        if not left and self._watched is not None:
            watch.stop(self._watched)
            self._watched = None


_lock = threading.Lock()


def _both(names: Sequence[str]) -> set[str]:
    """Names as entry points have them, and as distributions are compared."""
    return {*names, *map(normalized, names)}


def _fail(plugin: Plugin, reason: str, error: BaseException | None = None) -> None:
    plugin.state, plugin.reason, plugin.object, plugin.error = "failed", reason, None, error


def _type(thing: Any) -> str:
    kind = type(thing)
    return f"{kind.__module__}.{kind.__qualname__}"


def _unmarked(thing: Any) -> str:
    """A function with the name of a hook that nothing will call, because it lacks the marker."""
    for name in _HOOKS:
        function = getattr(thing, name, None)
        if callable(function) and not hasattr(function, "mpicoll_impl"):
            return f"{name} is not marked with mpicoll.hookimpl"
    return ""


def _refuse_wrappers(thing: Any, implementations: Iterator[pluggy.HookImpl]) -> None:
    """A wrapper would stand around all plugins, whose calls are kept apart here."""
    for implementation in implementations:
        if implementation.wrapper or implementation.hookwrapper:
            name = implementation.function.__name__
            raise pluggy.PluginValidationError(thing, f"{name} is a wrapper, which no hook takes")


def _loudly(implementation: pluggy.HookImpl, given: Mapping[str, Any], what: str) -> Any:
    try:
        return implementation.function(*(given[name] for name in implementation.argnames))
    except Exception as error:
        raise PluginError(
            f"Join: the plugin {implementation.plugin_name} failed to {what}: "
            f"{type(error).__name__}: {error}"
        ) from error
