"""One rank fails: the job ends within seconds with its traceback, unless that was allowed."""

from __future__ import annotations

import re

import pytest
from launcher import Outcome, python

LIMIT = 40  # seconds for a job that must end by itself

START = """
import sys, threading
import torch, mpicoll
comm = mpicoll.COMM_WORLD
one = torch.ones(1, requires_grad=True)
comm.Allreduce(one, mpicoll.MPI_SUM)

def others_wait():
    for _ in range(3):
        comm.Allreduce(one, mpicoll.MPI_SUM)

class Bad(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        raise ArithmeticError("bad luck in backward")

def thread(work):
    t = threading.Thread(target=work, name="worker")
    t.start()
    t.join()

def fail():
    raise ArithmeticError("bad luck")

if comm.rank != 1:
    others_wait()
"""

FAULTS = {
    "exception": ("fail()", "ArithmeticError: bad luck", "with an exception that nobody caught"),
    "backward": (
        "Bad.apply(one).sum().backward()", "ArithmeticError: bad luck in backward",
        "with an exception that nobody caught",
    ),
    "thread": (
        "thread(fail); others_wait()", "ArithmeticError: bad luck",
        "in its thread worker, with an exception that nobody caught",
    ),
    "bad argument": (
        "comm.Allreduce('words', mpicoll.MPI_SUM)", "TypeError: Allreduce",
        "with an exception that nobody caught",
    ),
    "exit": ("sys.exit(7)", "", "with the exit status 7"),
    "exit with words": ("sys.exit('no input file')", "no input file", "with the exit status 1"),
    "exit from a library": (
        "import argparse; argparse.ArgumentParser().parse_args(['--wrong'])",
        "unrecognized arguments: --wrong", "with the exit status 2",
    ),
}  # fmt: skip


def others(done: Outcome) -> str:
    return done.out + done.err


@pytest.mark.parametrize("fault", FAULTS)
def test_the_job_ends(fault):
    code, words, why = FAULTS[fault]
    done = python(START + f"else:\n    {code}\n", ranks=2, limit=LIMIT)
    assert done.code != 0
    assert words in done.err
    assert f"mpicoll: rank 1 of 2 failed {why}; the job is aborted" in done.err
    assert done.err.count("mpicoll: rank ") == 1
    if "Error" in words:
        assert done.err.count("Traceback (most recent call last)") == 1
        assert "[rank 1 of 2] " in done.err


@pytest.mark.parametrize(
    "code",
    [
        "sys.exit()",
        "sys.exit(0)",
        "thread(lambda: sys.exit(3))",  # ends the thread, quietly
        """
def late():
    threading.main_thread().join()
    fail()
def last():
    threading.main_thread().join()
    threading.Event().wait(1)
threading.Thread(target=late, daemon=True).start()
threading.Thread(target=last).start()
""",  # fails when the program has ended
        """
try:
    fail()
except ArithmeticError:
    pass
""",
        """
try:
    sys.exit(3)
except SystemExit as error:
    assert error.code == 3 and error.args == (3,)
try:
    sys.exit()
except SystemExit as error:
    assert error.code is None and error.args == ()
""",
    ],
)
def test_what_is_no_failure(code):
    python(START + "comm.Barrier() if comm.rank != 1 else None\n"
           + "if comm.rank == 1:\n    others_wait()\n    comm.Barrier()\n"
           + code, ranks=2, limit=LIMIT).check()  # fmt: skip


ALLOWED = [
    ({"MPICOLL_ABORT_ON_ERROR": "0"}, "fail()"),
    ({}, "with mpicoll.allow_exceptions():\n    fail()"),
    ({}, "mpicoll.allow_exceptions().__enter__()\nthread(fail)\nsys.exit(1)"),
    ({}, "with mpicoll.allow_exceptions():\n    sys.exit(1)"),
    ({}, "@mpicoll.allow_exceptions()\ndef f():\n    fail()\nf()"),
    ({}, "sys.ps1 = '>>> '\nfail()"),  # somebody sits before it
]


@pytest.mark.parametrize("number", range(len(ALLOWED)))
def test_allowed(number):
    """All ranks fail, after their last communication: each ends as Python does without mpicoll."""
    settings, code = ALLOWED[number]
    program = START + "if comm.rank == 1:\n    others_wait()\ncomm.Barrier()\n" + code
    done = python(program, ranks=2, limit=LIMIT, **settings)
    assert done.code == 1
    assert "mpicoll: rank" not in done.err
    assert "[rank" not in done.err
    if "fail" in code:
        assert len(re.findall("ArithmeticError: bad luck", done.err)) >= 1


def test_one_rank_alone_is_left_alone():
    done = python(START.replace("if comm.rank != 1:", "if comm.rank:") + "fail()", limit=LIMIT)
    assert done.code == 1
    assert "mpicoll: rank" not in done.err


def test_hooks_of_the_program_run_first():
    program = """
    import sys
    sys.excepthook = lambda *about: print("mine:", about[1], file=sys.stderr)
    import torch, mpicoll
    mpicoll.COMM_WORLD.Barrier()
    if mpicoll.COMM_WORLD.rank:
        raise ArithmeticError("bad luck")
    mpicoll.COMM_WORLD.Barrier()
    """
    done = python(program, ranks=2, limit=LIMIT)
    assert done.code != 0
    assert "[rank 1 of 2] mine: bad luck" in done.err
    assert "Traceback" not in done.err


def test_before_the_first_use_nothing_is_changed():
    python(
        """
        import sys, threading
        before = sys.excepthook, threading.excepthook, sys.exit
        import mpicoll
        assert (sys.excepthook, threading.excepthook, sys.exit) == before
        """,
        ranks=2, limit=LIMIT,
    ).check()  # fmt: skip
