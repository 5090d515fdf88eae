"""An exception inside a Join ends the job, with its traceback, within seconds; never a hang."""

from __future__ import annotations

import re
import textwrap

import pytest
from launcher import python

LIMIT = 20.0

PROGRAM = """
    import os, sys, torch, mpicoll
    from mpicoll.algorithms import Join, Joinable, JoinHook

    world = mpicoll.COMM_WORLD
    where, kind = sys.argv[1:3]
    error = {{"ValueError": ValueError, "KeyboardInterrupt": KeyboardInterrupt,
              "SystemExit": SystemExit}}[kind]

    def fail(here):
        if here == where and world.rank == {who}:
            raise error("in the " + here)

    class Adder(Joinable):
        join_device = torch.device("cpu")
        join_process_group = None

        def add(self):
            Join.notify_join_context(self)
            world.Allreduce(torch.ones(1), mpicoll.MPI_SUM)

        def join_hook(self, **kwargs):
            fail("join_hook")
            return Hook()

    class Hook(JoinHook):
        def main_hook(self):
            fail("main")
            world.Allreduce(torch.zeros(1), mpicoll.MPI_SUM)

        def post_hook(self, is_last_joiner):
            fail("post")
            world.Barrier()

    adder = Adder()
    shadow = sys.argv[3] == "shadow"
    with Join([world] if shadow else [adder]{options}):
        for k in range(2 if world.rank == 0 else 4):
            if k == 1:
                fail("body")
            if shadow:
                x = torch.ones(1, requires_grad=True)
                y = world.Allreduce(x, mpicoll.MPI_SUM)
                fail("backward")
                y.sum().backward()
            else:
                adder.add()
    print("finished", flush=True)
"""


def run(where, kind, shadow="hooks", who=0, options="", ranks=2):
    program = PROGRAM.format(who=who, options=options)
    source = f"import sys; sys.argv[1:] = {[where, kind, shadow]!r}\n"
    return python(source + textwrap.dedent(program), ranks=ranks, limit=LIMIT)


@pytest.mark.parametrize("where", ["body", "main", "post", "join_hook"])
@pytest.mark.parametrize("kind", ["ValueError", "KeyboardInterrupt", "SystemExit"])
def test_aborts(where, kind):
    done = run(where, kind)
    assert done.code != 0
    assert "finished" not in done.out
    assert done.err.count(f"{kind}: in the {where}") == 1, done.err
    assert "Traceback (most recent call last)" in done.err
    assert "rank 0 of 2 failed inside a Join context" in done.err


@pytest.mark.parametrize("who", [0, 1])
@pytest.mark.parametrize("where", ["body", "backward"])
def test_aborts_in_a_shadow(where, who):
    done = run(where, "ValueError", "shadow", who)
    assert done.code != 0
    assert "finished" not in done.out
    assert done.err.count(f"ValueError: in the {where}") == 1, done.err


@pytest.mark.parametrize(
    ("where", "shadow"),
    [("body", "hooks"), ("main", "hooks"), ("post", "hooks"), ("backward", "shadow")],
)
def test_propagates(where, shadow):
    """Each rank ends with its own exception: the cause on one, JoinAborted on the others."""
    done = run(where, "ValueError", shadow, options=', on_error="propagate"', ranks=3)
    assert done.code != 0
    assert "finished" not in done.out
    # The launcher may stop the others as soon as one has ended with an error.
    assert (
        re.search(rf"(?<!with )ValueError: in the {where}", done.err) or "JoinAborted" in done.err
    )
    assert "failed inside a Join context" not in done.err, "nobody had to abort"


def test_nothing_fails():
    """The program of these tests does finish."""
    for shadow in ("hooks", "shadow"):
        for options in ("", ', on_error="propagate"'):
            done = run("nowhere", "ValueError", shadow, options=options)
            assert done.check().out.count("finished") == 2


def test_others_wait_where_mpicoll_does_not_see_them():
    """With ``on_error="propagate"`` the job is aborted when the others do not hear of it."""
    done = python(
        """
        import torch, mpicoll
        from mpi4py import MPI
        from mpicoll.algorithms import Join, session
        session.PATIENCE = 2.0
        world = mpicoll.COMM_WORLD
        with Join([world], on_error="propagate"):
            if world.rank == 0:
                raise ValueError("nobody hears")
            MPI.COMM_WORLD.Barrier()
        """,
        ranks=2, limit=LIMIT,
    )  # fmt: skip
    assert done.code != 0
    assert "ValueError: nobody hears" in done.err
    assert "failed inside a Join context" in done.err


def test_one_rank_is_not_aborted():
    """Alone, an exception is just an exception."""
    done = python(
        """
        import mpicoll
        from mpicoll.algorithms import Join
        try:
            with Join([mpicoll.COMM_WORLD]):
                raise ValueError("alone")
        except ValueError as error:
            print("caught", error)
        """,
        limit=LIMIT,
    ).check()
    assert done.out.strip() == "caught alone"


ADAPTER = """
import mpicoll
from mpicoll.algorithms import Joinable, JoinHook

@mpicoll.plugins.hookimpl
def mpicoll_adapt_joinable(obj, comm, options):
    if isinstance(obj, list):
        if mpicoll.COMM_WORLD.rank == obj[0]:
            raise obj[1]("the adapter broke")
        return Adapted()

class Adapted(Joinable):
    join_device = join_process_group = None
    def join_hook(self, **kwargs):
        return JoinHook()
"""


@pytest.mark.parametrize("on_error", ["abort", "propagate"])
@pytest.mark.parametrize(
    ("who", "kind"),
    [
        (0, "ValueError"),
        (1, "ValueError"),
        (0, "KeyboardInterrupt"),
        (1, "SystemExit"),
        (9, "None"),
    ],
)
def test_adapter(tmp_path, on_error, who, kind):
    """An adapter that raises on one rank: all ranks raise."""
    (tmp_path / "broken_adapter.py").write_text(ADAPTER)
    info = tmp_path / "broken_adapter-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: broken-adapter\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[mpicoll.plugins]\nbroken = broken_adapter\n")
    done = python(
        f"""
        import sys
        import mpicoll
        from mpicoll.algorithms import Join
        from mpi4py import MPI
        MPI.COMM_WORLD
        try:
            with Join([[{who}, {kind}]], on_error={on_error!r}):
                pass
        except BaseException as error:
            sys.stdout.write(f"raised: {{type(error).__name__}} {{error}}\\n")
            sys.stdout.flush()
            # Ends after everybody has: an end that is not zero stops the others.
            MPI.COMM_WORLD.Barrier()
            raise
        print("finished")
        """,
        ranks=2, limit=LIMIT, PYTHONPATH=str(tmp_path),
    )  # fmt: skip
    if who == 9:
        assert done.check().out.count("finished") == 2
        return
    assert done.code != 0
    assert done.out.count("raised:") == 2, (done.out, done.err)
    own = "PluginError" if kind == "ValueError" else kind
    others = "PluginError" if on_error == "abort" else "JoinAborted"
    assert sorted(re.findall(r"raised: (\w+)", done.out)) == sorted([own, others]), done.out
    assert done.out.count("the adapter broke") == 2
    assert "finished" not in done.out


IN_BACKWARD = """
    import sys, torch, mpicoll
    from mpicoll.algorithms import DataParallel, Join, ZeroRedundancyOptimizer

    world = mpicoll.COMM_WORLD

    class Failing(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            raise ValueError("in the middle")

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)

        def forward(self, x, fails):
            x = self.first(x)
            return self.second(Failing.apply(x) if fails else x)

    model = DataParallel(Net(), bucket_bytes=1)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam)
    with Join([model, optimizer]):
        for k in range(1 if world.rank == 0 else 3):
            model(torch.ones(2, 3), k == 1 and world.rank == int(sys.argv[1])).sum().backward()
            optimizer.step()
    print("finished", flush=True)
"""


@pytest.mark.parametrize("who", [1, 2])
def test_in_the_middle_of_backward(who):
    """Others wait for a bucket, or have run out of inputs."""
    outcome = python(IN_BACKWARD.replace("int(sys.argv[1])", str(who)), ranks=3, limit=60)
    assert outcome.code != 0
    assert "ValueError: in the middle" in outcome.err
    assert f"mpicoll: rank {who} of 3 failed inside a Join context" in outcome.err
    assert "finished" not in outcome.out
