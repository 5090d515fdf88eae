"""Run as ``mpiexec -n N python -m pytest tests/spmd``: every rank runs every test, in step.

A phase of a test passes only where it passes on all ranks. A rank that fails where the others wait
in a collective ends the job with its own traceback, instead of a hang.
"""

from __future__ import annotations

import faulthandler
import os
import pickle
import sys
import time

import numpy as np
import pytest
import torch
from mpi4py import MPI

import mpicoll
from mpicoll._core import mpi

LIMIT = float(os.environ.get("MPICOLL_TEST_SYNC_LIMIT", "30"))
HANG = float(os.environ.get("MPICOLL_TEST_HANG_LIMIT", "90"))
COMM = MPI.COMM_WORLD.Dup()  # the harness's own: never mixes with a test's traffic
RANK, SIZE = COMM.rank, COMM.size

torch.set_num_threads(1)
screen = sys.__stderr__  # what pytest does not capture: see pytest_configure


def die(message: str) -> None:
    screen.write(f"\n[rank {RANK}] {message}\n")
    screen.flush()
    MPI.COMM_WORLD.Abort(1)
    os._exit(1)  # MPICH >= 4.2 may return from MPI_Abort


def exchange(mine: object, what: str) -> list:
    """Gather an object of every rank; a rank that is stuck elsewhere ends the job.

    Sleeps between polls, so that a waiting rank leaves its core to the others.
    """

    def wait(request: MPI.Request) -> None:
        start = time.monotonic()
        while not request.Test():
            if time.monotonic() - start > LIMIT:
                die(f"waited {LIMIT:g} s for the other ranks {what}; this rank says: {mine}")
            time.sleep(0.0005)

    data = np.frombuffer(pickle.dumps(mine), "u1")
    longest = np.zeros(1, "i")
    wait(COMM.Iallreduce(np.array([data.size], "i"), longest, MPI.MAX))
    sent = np.zeros(longest[0], "u1")
    sent[: data.size] = data
    received = np.zeros((SIZE, longest[0]), "u1")
    wait(COMM.Iallgather(sent, received))
    return [pickle.loads(row.tobytes()) for row in received]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    """A test in which all ranks wait for one another ends the job, with every rank's traceback."""
    faulthandler.dump_traceback_later(HANG, exit=True, file=screen)
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if SIZE == 1:
        return report
    words = str(report.longrepr)[-4000:] if report.failed else ""
    if report.failed:
        screen.write(f"\n[rank {RANK}] FAILED {item.nodeid} ({report.when})\n{words}\n")
        screen.flush()
    where = f"after the {report.when} of {item.nodeid}"
    everyone = exchange((item.nodeid, report.when, report.outcome, words), where)
    if len({said[:2] for said in everyone}) > 1:
        die(f"the ranks are not in step: {[said[:2] for said in everyone]}")
    outcomes = [said[2] for said in everyone]
    if "failed" in outcomes:
        failures = [f"--- rank {r} ---\n{said[3]}" for r, said in enumerate(everyone) if said[3]]
        report.outcome = "failed"
        report.longrepr = f"failed on {len(failures)} of {SIZE} ranks\n" + "\n".join(failures)
    elif len(set(outcomes)) > 1:
        report.outcome = "failed"
        report.longrepr = f"{report.when}: the ranks' outcomes differ: {outcomes}"
    return report


@pytest.hookimpl(trylast=True)
def pytest_configure(config):
    global screen
    screen = os.fdopen(os.dup(2), "w")  # nothing is captured yet
    if RANK:  # one voice; every rank still has its exit code
        reporter = config.pluginmanager.get_plugin("terminalreporter")
        if reporter:
            config.pluginmanager.unregister(reporter)


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config):
    global screen
    if screen is not sys.__stderr__:
        screen.close()
    screen = sys.__stderr__


@pytest.fixture
def comm():
    """A communicator of the test's own (mpi4py)."""
    made = MPI.COMM_WORLD.Dup()
    yield made
    made.Free()


@pytest.fixture
def world() -> mpicoll.Communicator:
    """The communicator of all ranks."""
    return mpicoll.COMM_WORLD


@pytest.fixture
def everyone():
    """``everyone(obj)``: the objects of all ranks, outside mpicoll."""
    return lambda obj: exchange(obj, "in a test")


@pytest.fixture
def limits():
    """``limits(chunk_bytes=..., count_limit=...)`` for the duration of one test."""
    mpi.bind()
    before = mpi.limits()
    yield mpi.limits
    mpi.limits(*before)


@pytest.fixture
def works(world):
    """``works(comm=world)``: fails unless the communicator still communicates, in order."""

    def check(comm: mpicoll.Communicator = world) -> None:
        mine = torch.tensor([comm.rank + 1, 7], dtype=torch.int64)
        total = comm.size * (comm.size + 1) // 2
        got = comm.Allreduce(mine, mpicoll.MPI_SUM).tolist()
        assert got == [total, 7 * comm.size], f"the communicator is out of step: {got}"

    return check
