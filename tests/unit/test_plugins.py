"""Plugins: finding, blocking, order, versions, what is refused, and the isolation of observers."""

from __future__ import annotations

import inspect
import itertools
import logging
import re
import sys
import types
from pathlib import Path

import pluggy
import pytest
import torch
from plugin_folder import distribution

import mpicoll
from mpicoll import config, plugins, watch
from mpicoll.algorithms import Joinable, JoinHook
from mpicoll.plugins import specs
from mpicoll.plugins.manager import Manager

QUIET = "import mpicoll\n"
OBSERVER = """
import mpicoll
events = []

@mpicoll.hookimpl
def mpicoll_join_started(context):
    events.append(context)
"""


@pytest.fixture(autouse=True, scope="module")
def used():
    """The process has its own plugins (none) before the tests install any."""
    mpicoll.COMM_SELF.Barrier()


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Install a distribution for one test: ``install(name, {entry point: source})``."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(tmp_path)

    def add(name, sources, **more):
        distribution(tmp_path, name, sources, **more)

    yield add
    for name in set(sys.modules) - before:
        if getattr(sys.modules[name], "__file__", None) and str(tmp_path) in str(
            sys.modules[name].__file__
        ):
            del sys.modules[name]


@pytest.fixture
def managed():
    """Load the installed plugins under some settings: ``managed(MPICOLL_PLUGINS="")``."""
    made = []

    def load(complain=True, **environment):
        manager = Manager(config.read(environment))
        made.append(manager)
        manager.load()
        if complain:
            manager.complain()
        manager.observe()
        return manager

    yield load
    for manager in made:
        if manager._watched is not None:
            watch.stop(manager._watched)
    assert not watch.on


def states(manager):
    return {p.name: p.state for p in manager.plugins if p.name != "builtin"}


def reason(manager, name):
    return next(p.reason for p in manager.plugins if p.name == name)


class Thing(Joinable):
    """A joinable without anything to do."""

    def join_hook(self, **kwargs):
        return JoinHook()

    @property
    def join_device(self):
        return torch.device("cpu")

    @property
    def join_process_group(self):
        return None


# ---------------------------------------------------------------- finding and blocking


def test_nothing_installed(managed):
    manager = managed()
    assert [p.name for p in manager.plugins] == ["builtin"]
    assert manager.identities() == []
    assert not watch.on


def test_order_is_by_distribution_then_name(install, managed):
    note = "import mpicoll, sys\nsys.modules.setdefault('order', []).append({!r})\n"
    # written in another order than the one in which they are to be found
    for name, points in (("Zeta", "ba"), ("alpha_x", "dc"), ("alpha.b", "e")):
        install(name, {point: note.format(point) for point in points})
    try:
        manager = managed()
        assert sys.modules["order"] == list("ecdab")
    finally:
        sys.modules.pop("order", None)
    assert list(states(manager)) == list("ecdab")
    assert manager.identities() == [
        "e (alpha.b 1.0)", "c (alpha_x 1.0)", "d (alpha_x 1.0)", "a (Zeta 1.0)", "b (Zeta 1.0)",
    ]  # fmt: skip


def test_calls_follow_the_order_and_the_marks(install, managed):
    for name, mark in (("a", ""), ("b", "(trylast=True)"), ("c", "(tryfirst=True)"), ("d", "")):
        install(
            f"dist-{name}",
            {
                name: f"""
                import mpicoll
                @mpicoll.hookimpl{mark}
                def mpicoll_join_hooks(joinable, options):
                    options["called"].append({name!r})
                """
            },
        )
    called: list[str] = []
    assert managed().join_hooks(Thing(), {"called": called}) == []
    assert called == ["c", "a", "d", "b"]


@pytest.mark.parametrize(
    ("environment", "loaded"),
    [
        ({}, {"one", "two", "three"}),
        ({"MPICOLL_DISABLE_PLUGINS": ""}, {"one", "two", "three"}),
        ({"MPICOLL_DISABLE_PLUGINS": "all"}, set()),
        ({"MPICOLL_DISABLE_PLUGINS": "two"}, {"one", "three"}),
        ({"MPICOLL_DISABLE_PLUGINS": "First_Dist"}, {"three"}),
        ({"MPICOLL_DISABLE_PLUGINS": " one , second-dist,unheard-of"}, {"two"}),
        ({"MPICOLL_PLUGINS": ""}, set()),
        ({"MPICOLL_PLUGINS": "two,second.dist"}, {"two", "three"}),
        ({"MPICOLL_PLUGINS": "first-dist", "MPICOLL_DISABLE_PLUGINS": "one"}, {"two"}),
    ],
)
def test_what_is_blocked_is_not_imported(install, managed, environment, loaded):
    install("first-dist", {"one": QUIET, "two": QUIET})
    install("second-dist", {"three": QUIET})
    manager = managed(**environment)
    assert {n for n, state in states(manager).items() if state == "loaded"} == loaded
    modules = {"one": "first_dist_one", "two": "first_dist_two", "three": "second_dist_three"}
    for name, module in modules.items():
        assert (module in sys.modules) == (name in loaded)
        assert ("MPICOLL_" in reason(manager, name)) == (name not in loaded)


def test_a_name_that_nothing_brings_is_told(install, managed):
    install("first-dist", {"one": QUIET})
    with pytest.raises(mpicoll.PluginError, match="MPICOLL_PLUGINS names 'too'"):
        managed(MPICOLL_PLUGINS="one,too")


# ---------------------------------------------------------------- what is refused

REFUSED = {
    "raises when imported": ("1 / 0", "importing .* raised ZeroDivisionError"),
    "exits when imported": ("raise SystemExit(0)", "importing .* raised SystemExit"),
    "communicates when imported": (
        "import torch, mpicoll; mpicoll.COMM_SELF.Allreduce(torch.ones(1))",
        "nor a plugin while it is imported",
    ),
    "hook of another version": ("mpicoll_hook_api = 2", "mpicoll_hook_api 2, but .* has 1"),
    "unknown hook": (
        "import mpicoll\n@mpicoll.hookimpl\ndef mpicoll_join_begun(context): pass",
        "unknown hook 'mpicoll_join_begun'",
    ),
    "unknown argument": (
        "import mpicoll\n@mpicoll.hookimpl\ndef mpicoll_join_started(ctx): pass",
        r"Argument\(s\) {'ctx'}",
    ),
    "no marker": (
        "def mpicoll_join_started(context): pass",
        "mpicoll_join_started is not marked with mpicoll.hookimpl",
    ),
    "wrapper": (
        "import mpicoll\n@mpicoll.hookimpl(wrapper=True)\n"
        "def mpicoll_join_started(context): return (yield)",
        "mpicoll_join_started is a wrapper",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(install, managed, case):
    source, message = REFUSED[case]
    install("bad-dist", {"bad": source})
    install("good-dist", {"good": OBSERVER})
    with pytest.raises(mpicoll.PluginError, match=rf"bad \(bad-dist 1.0\).*: .*{message}") as told:
        managed()
    assert "MPICOLL_PLUGIN_ERRORS=warn" in str(told.value)
    with pytest.warns(RuntimeWarning, match=message):
        manager = managed(MPICOLL_PLUGIN_ERRORS="warn")
    assert states(manager) == {"bad": "failed", "good": "loaded"}
    assert manager.identities() == ["good (good-dist 1.0)"]
    manager.notify("mpicoll_join_started", {"context": 1})
    assert sys.modules["good_dist_good"].events == [1]
    del sys.modules["good_dist_good"]


def test_the_declared_version_and_optional_hooks_are_accepted(install, managed):
    source = """
    import mpicoll
    mpicoll_hook_api = 1
    @mpicoll.hookimpl(optionalhook=True)
    def mpicoll_of_the_future(): pass
    """
    install("new-dist", {"new": source})
    assert states(managed()) == {"new": "loaded"}


def test_one_object_under_two_names(install, managed):
    install("twin-dist", {"a=twin": QUIET, "b=twin": QUIET})
    with pytest.warns(RuntimeWarning, match="already registered under a different name"):
        manager = managed(MPICOLL_PLUGIN_ERRORS="warn")
    assert sorted(states(manager).values()) == ["failed", "loaded"]


def test_an_object_can_be_a_plugin(install, managed):
    install(
        "object-dist",
        {
            "thing=object_dist:plugin": """
            import mpicoll
            class Counter:
                seen = 0
                @mpicoll.hookimpl
                def mpicoll_join_started(self, context):
                    self.seen += 1
                @mpicoll.hookimpl
                def mpicoll_plugin_info(self):
                    return {"seen": self.seen}
            plugin = Counter()
            """
        },
    )
    manager = managed()
    thing = next(p for p in manager.plugins if p.name == "thing")
    assert thing.hooks == ("mpicoll_join_started", "mpicoll_plugin_info")
    manager.notify("mpicoll_join_started", {"context": None})
    assert manager.info(thing) == {"seen": 1}


@pytest.mark.parametrize("value", ["ignore", "RAISE", "1"])
def test_the_error_policy_has_two_words(value):
    with pytest.raises(ValueError, match=f"MPICOLL_PLUGIN_ERRORS is '{value}'"):
        config.read({"MPICOLL_PLUGIN_ERRORS": value})


def test_a_failure_is_raised_again(install, monkeypatch):
    """Whoever catches it does not go on without the plugins, unnoticed."""
    install("bad-dist", {"bad": "1 / 0"})
    monkeypatch.setattr(plugins, "_manager", None)
    monkeypatch.setattr(plugins, "_problem", None)
    for _ in range(2):
        with pytest.raises(mpicoll.PluginError, match="ZeroDivisionError") as told:
            plugins.load()
        assert isinstance(told.value.__cause__, ZeroDivisionError)


# ---------------------------------------------------------------- adapters and hooks

ADAPTER = """
import mpicoll
from mpicoll.algorithms import Joinable, JoinHook

class Adapted(Joinable):
    def __init__(self, obj):
        super().__init__()
        self.obj = obj
    def join_hook(self, **kwargs): return JoinHook()
    join_device = join_process_group = None

@mpicoll.hookimpl
def mpicoll_adapt_joinable(obj, options):
    if isinstance(obj, str):
        raise KeyError(obj)
    if isinstance(obj, complex):
        return obj
    if isinstance(obj, int):
        options["scale"]
        return Adapted(obj)

@mpicoll.hookimpl
def mpicoll_join_hooks(joinable, options):
    return options.get("hooks")
"""


def test_adapting(install, managed):
    install("first-dist", {"adapter": ADAPTER})
    manager = managed()
    made, plugin = manager.adapt(5, None, {"scale": 2}, "joinables[0]")
    assert isinstance(made, Joinable)
    assert made.obj == 5
    assert plugin == "adapter (first-dist 1.0)"
    with pytest.raises(TypeError, match=r"joinables\[3\] is a builtins.float.*asked: adapter"):
        manager.adapt(0.5, None, {}, "joinables[3]")
    with pytest.raises(mpicoll.PluginError, match=r"adapter .*adapt j.*KeyError: 'x'") as told:
        manager.adapt("x", None, {}, "joinables[0]")
    assert isinstance(told.value.__cause__, KeyError)
    with pytest.raises(TypeError, match=r"made of .*complex, which is not a Joinable"):
        manager.adapt(1j, None, {}, "joinables[0]")


def test_what_is_blocked_is_named_when_nobody_can_adapt(install, managed):
    install("first-dist", {"adapter": ADAPTER})
    manager = managed(MPICOLL_DISABLE_PLUGINS="adapter")
    with pytest.raises(TypeError, match=r"adapter .* is blocked: MPICOLL_DISABLE_PLUGINS names it"):
        manager.adapt(5, None, {}, "joinables[0]")


def test_options_are_read_only(install, managed):
    change = "import mpicoll\n@mpicoll.hookimpl\ndef mpicoll_join_hooks(options): options['x'] = 1"
    install("first-dist", {"change": change})
    options = {"x": 0}
    with pytest.raises(mpicoll.PluginError, match="does not support item assignment"):
        managed().join_hooks(Thing(), options)
    assert options == {"x": 0}


def test_further_hooks(install, managed):
    install("first-dist", {"adapter": ADAPTER})
    manager = managed()
    one, two = JoinHook(), JoinHook()
    for given, expected in ((None, []), (one, [one]), ([one, two], [one, two]), ([], [])):
        found = manager.join_hooks(Thing(), {"hooks": given})
        assert [hook for hook, _ in found] == expected
        assert {plugin for _, plugin in found} <= {"adapter (first-dist 1.0)"}
    with pytest.raises(TypeError, match=r"gave for a .*Thing a builtins.int"):
        manager.join_hooks(Thing(), {"hooks": [one, 3]})


def test_mpi4py_communicators_are_adapted_by_the_builtin_plugin(managed):
    from mpi4py import MPI

    made, plugin = managed().adapt(MPI.COMM_SELF, None, {}, "joinables[0]")
    assert made is mpicoll.COMM_SELF
    assert plugin == f"builtin (mpicoll {mpicoll.__version__})"


# ---------------------------------------------------------------- observers

BAD = """
import mpicoll
calls = []

@mpicoll.hookimpl
def mpicoll_collective_started(event):
    calls.append("started")
    {action}

@mpicoll.hookimpl
def mpicoll_collective_finished(event):
    calls.append("finished")

@mpicoll.hookimpl
def mpicoll_join_started(context):
    calls.append("join")
"""
GOOD = """
import mpicoll
seen = []

@mpicoll.hookimpl
def mpicoll_collective_started(event):
    seen.append(event)

@mpicoll.hookimpl(trylast=True)
def mpicoll_collective_finished(event):
    seen.append(event)
"""
MISCHIEF = {
    "raises": ("raise ValueError('mine')", ValueError),
    "exits": ("raise SystemExit(3)", SystemExit),
    "interrupts": ("raise KeyboardInterrupt", KeyboardInterrupt),
    "reduces": ("import torch; mpicoll.COMM_SELF.Allreduce(torch.ones(1))", RuntimeError),
    "waits": ("mpicoll.COMM_SELF.Barrier()", RuntimeError),
    "sends": (
        "import torch; mpicoll.COMM_SELF.Isend(torch.ones(1), None, 0)", RuntimeError,
    ),
    "gathers": ("import torch; mpicoll.COMM_SELF.Allgather(torch.ones(1), 0)", RuntimeError),
    "duplicates": ("mpicoll.COMM_SELF.Dup()", RuntimeError),
    "wraps": (
        "from mpi4py import MPI; mpicoll.comm_from_mpi4py(MPI.COMM_SELF.Dup())", RuntimeError,
    ),
    "splits": ("mpicoll.COMM_SELF.Split(0)", RuntimeError),
}  # fmt: skip


@pytest.mark.parametrize("case", MISCHIEF)
def test_an_observer_harms_only_itself(install, managed, caplog, case):
    action, error = MISCHIEF[case]
    install("bad-dist", {"bad": BAD.replace("{action}", action)})
    install("good-dist", {"good": GOOD})
    comm = mpicoll.COMM_SELF
    manager = managed()
    with caplog.at_level(logging.INFO, "mpicoll"):
        for _ in range(3):
            assert comm.Allreduce(torch.ones(2)).tolist() == [1.0, 1.0]
        manager.notify("mpicoll_join_started", {"context": None})
    assert sys.modules["bad_dist_bad"].calls == ["started"]
    (record,) = caplog.records
    assert record.name == "mpicoll"
    assert record.levelno == logging.ERROR
    assert "bad (bad-dist 1.0)" in record.getMessage()
    assert f"raised {error.__name__}(" in record.getMessage()
    assert "\n" not in record.getMessage()
    assert record.exc_info is None  # the traceback is for those who debug
    seen = sys.modules["good_dist_good"].seen
    assert len(seen) == 6
    assert all(seen[i] is seen[i + 1] for i in (0, 2, 4))  # paired
    assert [e.op for e in seen[::2]] == ["Allreduce"] * 3


def test_join_observers_may_not_communicate_either(install, managed, caplog):
    """Also where nobody observes the collectives, so that nothing else closes the express lane."""
    source = OBSERVER.replace("events.append(context)", "mpicoll.COMM_SELF.Allreduce(context)")
    install("bad-dist", {"bad": source})
    manager = managed()
    assert not watch.on
    manager.notify("mpicoll_join_started", {"context": torch.ones(1)})
    assert not watch.on
    assert len(caplog.records) == 1
    assert "RuntimeError('an observer must not communicate" in caplog.text


def test_without_observers_the_express_lane_opens_again(install, managed, caplog):
    install("bad-dist", {"bad": BAD.replace("{action}", "1 / 0")})
    managed()
    assert watch.on
    mpicoll.COMM_SELF.Allreduce(torch.ones(2))
    assert not watch.on
    assert len(caplog.records) == 1


def test_the_traceback_is_logged_for_debugging(install, managed, caplog):
    install("bad-dist", {"bad": BAD.replace("{action}", "1 / 0")})
    managed()
    with caplog.at_level(logging.DEBUG, "mpicoll"):
        mpicoll.COMM_SELF.Allreduce(torch.ones(2))
    assert caplog.records[0].exc_info[0] is ZeroDivisionError
    assert "bad_dist_bad.py:8" in caplog.records[0].getMessage()


def test_events(install, managed):
    install("good-dist", {"good": GOOD})
    managed()
    comm = mpicoll.COMM_SELF
    x = torch.ones(3, dtype=torch.float64, requires_grad=True)
    comm.Allreduce(x, mpicoll.MPI_MAX).sum().backward()
    comm.Bcast(torch.ones(2, dtype=torch.int8), 0)
    comm.Barrier()
    seen = sys.modules["good_dist_good"].seen
    events = seen[::2]
    assert all(a is b for a, b in zip(events, seen[1::2], strict=True))
    first, barrier = events[0], events[-1]
    names = ("op", "direction", "rank", "size", "dtype", "count", "nbytes", "root", "reduce_op")
    assert [getattr(first, n) for n in names] == [
        "Allreduce", "forward", 0, 1, torch.float64, 3, 24, None, "MAX",
    ]  # fmt: skip
    assert {e.direction for e in events[1:-2]} == {"backward"}
    assert [getattr(events[-2], n) for n in names] == [
        "Bcast", "forward", 0, 1, torch.int8, 2, 2, 0, None,
    ]  # fmt: skip
    assert [barrier.op, barrier.dtype, barrier.count, barrier.nbytes] == ["Barrier", None, 0, 0]
    assert {b.seq - a.seq for a, b in itertools.pairwise(events)} == {1}
    assert all(e.t_start <= e.t_end and e.error is None for e in events)


# ---------------------------------------------------------------- the specifications


def test_the_marker_is_pluggys():
    assert isinstance(mpicoll.hookimpl, pluggy.HookimplMarker)
    assert mpicoll.hookimpl is plugins.hookimpl is specs.hookimpl


def test_every_hook_is_documented():
    page = Path(__file__).resolve().parents[2] / "docs" / "reference" / "plugins.rst"
    documented = re.findall(r"^\.\. autofunction:: (mpicoll_\w+)$", page.read_text(), re.MULTILINE)
    assert sorted(documented) == [n for n in specs.__all__ if n.startswith("mpicoll_")]
    for name in documented:
        described = re.findall(
            r"^(\w+)\n    \S", inspect.cleandoc(getattr(specs, name).__doc__), re.M
        )
        arguments = list(inspect.signature(getattr(specs, name)).parameters)
        assert described[: len(arguments)] == arguments, name


def test_the_hooks():
    manager = pluggy.PluginManager("mpicoll")
    manager.add_hookspecs(specs)
    hooks = {n: getattr(manager.hook, n).spec for n in vars(manager.hook) if n[0] != "_"}
    assert {name: spec.argnames for name, spec in hooks.items()} == {
        "mpicoll_adapt_joinable": ("obj", "comm", "options"),
        "mpicoll_join_hooks": ("joinable", "options"),
        "mpicoll_join_started": ("context",),
        "mpicoll_join_rank_joined": ("context", "iterations"),
        "mpicoll_join_shadowed": ("context", "index", "active"),
        "mpicoll_join_finished": ("context", "is_last_joiner", "shadowed"),
        "mpicoll_join_failed": ("context", "exc"),
        "mpicoll_collective_started": ("event",),
        "mpicoll_collective_finished": ("event",),
        "mpicoll_plugin_info": (),
    }
    assert {n for n, spec in hooks.items() if spec.opts["firstresult"]} == {
        "mpicoll_adapt_joinable"
    }
    assert all(isinstance(vars(specs)[name], types.FunctionType) for name in hooks)
