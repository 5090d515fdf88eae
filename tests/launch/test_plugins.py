"""Plugins across ranks: what differs is told on all of them, and an observer harms nobody."""

from __future__ import annotations

import json
import sys

import pytest
from launcher import mpiexec, python, start
from plugin_folder import distribution

LIMIT = 120  # seconds; a launch takes about three

#: Every rank sees the folder; those that the test names see the other one, too.
PROLOGUE = """
import os, sys, time
from mpi4py import MPI
world = MPI.COMM_WORLD
if world.rank in {ranks}:
    sys.path.insert(0, {folder!r})
import torch, mpicoll
from mpicoll.algorithms import Join, Joinable, JoinHook
comm = mpicoll.COMM_WORLD

def say(text):  # in one piece, so that the ranks do not write into each other's lines
    sys.stdout.write(f"rank {{world.rank}}: {{text}}\\n")
    sys.stdout.flush()

def works():
    assert comm.Allreduce(torch.ones(2), mpicoll.MPI_SUM).tolist() == [world.size] * 2
    comm.Barrier()
"""
QUIET = "import mpicoll\n"


def launch(folder, program, *, only=range(9), ranks=2, limit=LIMIT, **environment):
    return python(
        PROLOGUE.format(folder=str(folder), ranks=tuple(only)) + program,
        ranks=ranks, limit=limit, **environment,
    )  # fmt: skip


# ---------------------------------------------------------------- loading

COUNTS = """
import mpicoll, sys
sys.stderr.write("loaded\\n")

@mpicoll.hookimpl
def mpicoll_collective_finished(event):
    sys.stderr.write(f"saw {event.op}\\n")
"""


def test_loaded_at_the_first_communicating_call_and_once(tmp_path):
    distribution(tmp_path, "counting", {"counts": COUNTS})
    done = python(
        f"""
        import sys
        sys.path.insert(0, {str(tmp_path)!r})
        import torch, mpicoll, mpicoll.algorithms
        repr(mpicoll.COMM_WORLD)
        assert "pluggy" not in sys.modules
        sys.stderr.write("used\\n")
        mpicoll.COMM_WORLD.Allreduce(torch.ones(1), mpicoll.MPI_SUM)
        mpicoll.COMM_SELF.Barrier()
        mpicoll.COMM_WORLD.Dup().Free()
    """
    ).check()
    assert done.err.splitlines() == ["used", "loaded", "saw Allreduce", "saw Barrier"]


@pytest.mark.parametrize("setting", ["MPICOLL_DISABLE_PLUGINS=all", "MPICOLL_PLUGINS="])
def test_blocked(tmp_path, setting):
    distribution(tmp_path, "counting", {"counts": COUNTS})
    name, _, value = setting.partition("=")
    done = launch(
        tmp_path,
        "works()\nassert not mpicoll.watch.on\nassert 'counting_counts' not in sys.modules",
        ranks=0, **{name: value},
    ).check()  # fmt: skip
    assert "loaded" not in done.err


def test_without_collective_observers_the_express_lane_stays_open(tmp_path):
    hooks = "import mpicoll\n@mpicoll.hookimpl\ndef mpicoll_join_started(context): pass\n"
    distribution(tmp_path, "joining", {"joins": hooks})
    launch(
        tmp_path,
        "works()\nassert 'joining_joins' in sys.modules\nassert not mpicoll.watch.on",
        ranks=0,
    ).check()


@pytest.mark.parametrize("policy", ["raise", "warn"])
def test_a_broken_plugin(tmp_path, policy):
    distribution(tmp_path, "broken", {"breaks": "1 / 0"})
    program = """
for call in (works, works, lambda: Join([comm]).__enter__()):
    try:
        call()
    except mpicoll.PluginError as error:
        print("told", error)
"""
    done = launch(tmp_path, program, ranks=0, MPICOLL_PLUGIN_ERRORS=policy).check()
    assert done.out.count("told the plugin breaks (broken 1.0) cannot be loaded") == (
        3 if policy == "raise" else 0
    )
    assert done.err.count("RuntimeWarning: mpicoll: the plugin breaks") == (policy == "warn")


# ---------------------------------------------------------------- what differs between the ranks

TOLD = """
begin = time.monotonic()
try:
    with Join([comm]):
        raise SystemExit("entered")
except mpicoll.{error} as error:
    say(error)
assert time.monotonic() - begin < 10
works()
"""


@pytest.mark.parametrize(("rank", "source"), [(0, QUIET), (1, COUNTS)])
def test_a_plugin_on_one_rank_only(tmp_path, rank, source):
    distribution(tmp_path, "lonely", {"lone": source})
    done = launch(tmp_path, TOLD.format(error="PluginMismatchError"), only=[rank], limit=30).check()
    for r in (0, 1):
        assert done.out.count("Join on rank") == 2, done
        (line,) = [x for x in done.out.splitlines() if x.startswith(f"rank {r}: ")]
        assert "Join on rank" in line
        assert f"rank {rank}: lone (lonely 1.0)" in line
        assert f"rank {1 - rank}: none" in line
        assert "MPICOLL_DISABLE_PLUGINS" in line


def test_releases_that_differ(tmp_path):
    distribution(tmp_path / "a", "tool", {"t": QUIET}, version="1.0")
    distribution(tmp_path / "b", "tool", {"t": QUIET}, version="2.0")
    program = PROLOGUE.format(ranks=(0, 1), folder="?").replace(
        "'?'", f"{str(tmp_path)!r} + '/' + 'ab'[world.rank]"
    )
    done = python(program + TOLD.format(error="PluginMismatchError"), ranks=2, limit=30).check()
    assert done.out.count("rank 0: t (tool 1.0); rank 1: t (tool 2.0)") == 2


def test_a_plugin_that_breaks_on_one_rank(tmp_path):
    source = "from mpi4py import MPI\nif MPI.COMM_WORLD.rank: raise OSError('no file')"
    distribution(tmp_path, "partly", {"part": source})
    program = TOLD.format(error="PluginError").replace(
        "works()", "if world.rank == 0: sys.exit(0)\n"
    )
    done = launch(tmp_path, program, limit=30)
    assert done.out.count("OSError: no file") == 2, done


ADAPTERS = """
import mpicoll
from mpi4py import MPI
from mpicoll.algorithms import Joinable, JoinHook

class Made(Joinable):
    def join_hook(self, **kwargs): return JoinHook()
    join_device = join_process_group = None

@mpicoll.hookimpl
def mpicoll_adapt_joinable(obj):
    {adapts}

@mpicoll.hookimpl
def mpicoll_join_hooks(joinable):
    {adds}
"""
FAILURES = {
    "the adapter raises": ("if MPI.COMM_WORLD.rank: raise KeyError(obj)\n    return Made()",
                           "return None", "PluginError", "KeyError: 3"),
    "it does not know the object": ("return None if MPI.COMM_WORLD.rank else Made()",
                                    "return None", "TypeError", "which is not a Joinable"),
    "the further hooks raise": ("return Made()",
                                "if MPI.COMM_WORLD.rank: raise KeyError(5)\n    return None",
                                "PluginError", "KeyError: 5"),
    "the further hooks differ": ("return Made()",
                                 "return [JoinHook()] * MPI.COMM_WORLD.rank", "PluginMismatchError",
                                 "rank 0: a (adapting 1.0); rank 1: a (adapting 1.0), a (adapting"),
}  # fmt: skip


@pytest.mark.parametrize("case", FAILURES)
def test_an_adapter_that_fails_on_one_rank(tmp_path, case):
    """Every rank raises, though only one has failed, and the communicator works afterwards."""
    adapts, adds, error, message = FAILURES[case]
    source = ADAPTERS.replace("{adapts}", adapts).replace("{adds}", adds)
    distribution(tmp_path, "adapting", {"a": source})
    program = """
try:
    with Join([3]):
        raise SystemExit("entered")
except (TypeError, mpicoll.PluginError, mpicoll.PluginMismatchError) as error:
    say(f"{type(error).__name__}: {error}")
works()
"""
    done = launch(tmp_path, program, limit=30).check()
    lines = sorted(x for x in done.out.splitlines() if x.startswith("rank "))
    assert [x.split(":")[0] for x in lines] == ["rank 0", "rank 1"], done
    assert all(message in x for x in lines), done
    assert lines[1].startswith(f"rank 1: {error}: ")
    other = "PluginError" if error != "PluginMismatchError" else error
    assert lines[0].startswith(f"rank 0: {other}: ")


# ---------------------------------------------------------------- observers

MISCHIEF = {
    "raises": "raise ValueError('mine')",
    "exits": "import sys; sys.exit(3)",
    "interrupts": "raise KeyboardInterrupt",
    "communicates": "import torch; mpicoll.COMM_WORLD.Allreduce(torch.ones(1), mpicoll.MPI_SUM)",
    "waits": "mpicoll.COMM_WORLD.Barrier()",
    "sends": "import torch; mpicoll.COMM_WORLD.Send(torch.ones(1), 0, 0)",
    "duplicates": "mpicoll.COMM_WORLD.Dup()",
    "joins": "from mpicoll.algorithms import Join; Join([mpicoll.COMM_WORLD]).__enter__()",
}
HOOKS = {
    "mpicoll_join_started": "context",
    "mpicoll_join_rank_joined": "context",
    "mpicoll_join_finished": "context",
    "mpicoll_collective_started": "event",
    "mpicoll_collective_finished": "event",
}


@pytest.mark.parametrize("case", MISCHIEF)
def test_an_observer_changes_nothing_but_one_log_line(tmp_path, case):
    """One bad plugin per hook, on one rank only in what it does."""
    sources = {
        hook.removeprefix("mpicoll_"): f"""
import mpicoll
from mpi4py import MPI

@mpicoll.hookimpl
def {hook}({argument}):
    if MPI.COMM_WORLD.rank:
        {MISCHIEF[case]}
"""
        for hook, argument in HOOKS.items()
    }
    distribution(tmp_path, "mischief", sources)
    program = """
works()
x = torch.ones(3, requires_grad=True)
with Join([comm]):
    for _ in range(2 + world.rank):
        comm.Allreduce(x, mpicoll.MPI_SUM).sum().backward()
assert x.grad.tolist() == [4.0 + world.rank] * 3, x.grad
works()
say("done")
"""
    done = launch(tmp_path, program).check()
    assert done.out.count("done") == 2
    lines = [x for x in done.err.splitlines() if "its observers are switched off" in x]
    assert sorted(x.split()[2] for x in lines) == sorted(sources), done.err
    assert len(done.err.splitlines()) == len(lines), done.err


# ---------------------------------------------------------------- the command line


def plugins(*words, ranks=None, folder=None, **environment):
    command = [] if ranks is None else [mpiexec(), "-n", str(ranks)]
    if folder is not None:
        environment["PYTHONPATH"] = str(folder)
    return start(
        [*command, sys.executable, "-m", "mpicoll", "plugins", *words], LIMIT, **environment
    )


SPEAKING = """
import mpicoll
@mpicoll.hookimpl
def mpicoll_plugin_info(): return {"motto": "listen first"}
@mpicoll.hookimpl
def mpicoll_join_started(context): pass
"""


def test_the_list_as_json(tmp_path):
    distribution(tmp_path, "My.Dist", {"speaks": SPEAKING, "quiet": QUIET}, version="3.1")
    done = plugins("--json", "--check", folder=tmp_path, MPICOLL_DISABLE_PLUGINS="quiet").check()
    told = json.loads(done.out)
    assert (told["hook api"], told["ranks"], told["problems"]) == (1, 1, [])
    assert told["entry point group"] == "mpicoll.plugins"
    builtin, quiet, speaks = told["plugins"]
    assert (builtin["name"], builtin["distribution"]) == ("builtin", "mpicoll")
    assert quiet == {
        "name": "quiet", "distribution": "My.Dist", "version": "3.1", "value": "My_Dist_quiet",
        "state": "blocked", "reason": "MPICOLL_DISABLE_PLUGINS names it", "hooks": [], "info": {},
    }  # fmt: skip
    assert speaks["hooks"] == ["mpicoll_join_started", "mpicoll_plugin_info"]
    assert speaks["info"] == {"motto": "listen first"}
    assert speaks["state"] == "loaded"


def test_the_list_as_a_table(tmp_path):
    distribution(tmp_path, "mine", {"speaks": SPEAKING, "breaks": "1 / 0"})
    done = plugins(folder=tmp_path, COLUMNS="150").check()  # without --check
    for word in ("builtin", "speaks", "mine 1.0", "join_started", "motto: listen first", "failed"):
        assert word in done.out, done.out
    assert "ZeroDivisionError" in done.out


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("1 / 0", "ZeroDivisionError"),
        ("import mpicoll\n@mpicoll.hookimpl\ndef mpicoll_join_begun(): pass", "unknown hook"),
        ("mpicoll_hook_api = 7", "mpicoll_hook_api 7"),
    ],
)
def test_the_check(tmp_path, source, message):
    distribution(tmp_path, "mine", {"bad": source})
    done = plugins("--check", folder=tmp_path, COLUMNS="200")
    assert done.code == 1
    assert message in done.out
    assert "Traceback" not in done.err
    assert plugins("--check", folder=tmp_path, MPICOLL_DISABLE_PLUGINS="bad").code == 0


def test_the_check_of_a_name_that_nothing_brings():
    done = plugins("--check", "--json", MPICOLL_PLUGINS="ghost")
    assert done.code == 1
    (problem,) = json.loads(done.out)["problems"]
    assert problem.startswith("MPICOLL_PLUGINS names 'ghost'")


def test_a_setting_that_means_nothing_is_an_error_without_a_traceback():
    done = plugins(MPICOLL_PLUGIN_ERRORS="ignore")
    assert done.code == 1
    assert "MPICOLL_PLUGIN_ERRORS is 'ignore'" in done.err
    assert "Traceback" not in done.err


def test_one_rank_prints_and_tells_what_differs(tmp_path):
    """The folder is on the path of rank 1 only."""
    distribution(tmp_path, "lonely", {"lone": QUIET, "bad": "1 / 0"})
    code = (
        "import sys; from mpi4py import MPI\n"
        f"if MPI.COMM_WORLD.rank: sys.path.insert(0, {str(tmp_path)!r})\n"
        "from mpicoll.cli import main; main(['plugins', '--json', '--check'])"
    )
    done = python(code, ranks=2)
    told = json.loads(done.out)
    assert told["ranks"] == 2
    assert told["problems"][-1] == "rank 1 loads lone (lonely 1.0), rank 0 does not"
    assert told["problems"][0].startswith("rank 1: the plugin bad (lonely 1.0) cannot be loaded")
    assert len(told["problems"]) == 2
    assert done.code != 0


def test_no_mpi_is_needed_to_look_at_plugins(tmp_path):
    distribution(tmp_path, "mine", {"speaks": SPEAKING})
    done = plugins("--json", folder=tmp_path, MPI4PY_LIBMPI="/nonexistent/libmpi.so").check()
    assert [p["name"] for p in json.loads(done.out)["plugins"]] == ["builtin", "speaks"]
