"""The totals, and the table that a job prints."""

from __future__ import annotations

import re
import types

import mpicoll_metrics
import pytest
from launcher import python

LIMIT = 120  # seconds

PROGRAM = """
import torch, mpicoll
comm = mpicoll.COMM_WORLD
for _ in range(3):
    x = torch.ones(250, requires_grad=True)
    comm.Allreduce(x, mpicoll.MPI_SUM).sum().backward()
comm.Allgather(torch.ones(2, dtype=torch.int64), 0)
comm.Barrier()
"""


def run(program, **environment):
    """What a program on two ranks says on stderr."""
    settings = {"MPICOLL_PLUGINS": "metrics", "COLUMNS": "80"} | environment
    done = python(program, ranks=2, limit=LIMIT, **settings).check()
    assert done.out == ""
    return done.err


def rows(text):
    """The numbers in the lines of a table, by what stands before them."""
    found = {}
    for line in text.splitlines()[2:]:
        cells = re.split(r" {2,}", line.strip())
        found[tuple(cells[:-6])] = cells[-6:]
    return found


def event(**said):
    return types.SimpleNamespace(
        **{"op": "Allreduce", "direction": "forward", "reduce_op": "SUM", "nbytes": 8,
           "t_start": 1.0, "t_end": 1.5, "error": None} | said
    )  # fmt: skip


def test_totals(monkeypatch):
    monkeypatch.setattr("atexit.register", lambda function: None)
    metrics = mpicoll_metrics.Metrics()
    for said in (
        {},
        {"t_end": 3.0, "nbytes": 16},
        {"error": ValueError()},
        {"op": "Barrier", "reduce_op": None},
    ):
        metrics.mpicoll_collective_finished(event(**said))
    assert metrics.totals == {
        ("Allreduce SUM", "forward"): mpicoll_metrics.Total(3, 1, 32, 3.0, 2.0),
        ("Barrier", "forward"): mpicoll_metrics.Total(1, 0, 8, 0.5, 0.5),
    }


def test_the_table_of_rank_0():
    said = run(PROGRAM)
    assert said.count("mpicoll: collectives on rank 0") == 1
    assert "rank 1" not in said
    table = rows(said)
    assert {key: cells[:3] for key, cells in table.items()} == {
        ("Allreduce SUM", "forward"): ["3", "0", "3,000"],
        ("Allreduce SUM", "backward"): ["3", "0", "3,000"],
        ("Allgather", "forward"): ["1", "0", "16"],
        ("Barrier", "forward"): ["1", "0", "0"],
        ("all",): ["8", "0", "6,016"],
    }
    seconds = [float(cells[3]) for cells in table.values()]
    *each, everything = seconds
    assert each == sorted(each, reverse=True)
    assert everything == pytest.approx(sum(each), abs=0.003)


def test_a_long_wait_is_in_the_time():
    said = run("""
        import time, mpicoll
        comm = mpicoll.COMM_WORLD
        comm.Barrier()
        time.sleep(0.3 * comm.rank)
        comm.Barrier()
    """)
    assert float(rows(said)["Barrier", "forward"][5]) > 250


@pytest.mark.parametrize(("ranks", "printing"), [("all", {0, 1}), ("1", {1}), ("7", set())])
def test_who_prints(ranks, printing):
    said = run(PROGRAM, MPICOLL_METRICS=ranks)
    assert {r for r in (0, 1) if f"collectives on rank {r}" in said} == printing


def test_a_rank_that_does_not_communicate_prints_nothing():
    assert run("import mpicoll; mpicoll.COMM_WORLD.rank", MPICOLL_METRICS="all") == ""


def test_finalized_by_hand():
    said = run(PROGRAM + "from mpi4py import MPI; MPI.Finalize()")
    assert said.count("mpicoll: collectives on rank 0") == 1


@pytest.mark.parametrize("text", ["some", "1;2", ","])
def test_a_wrong_choice_is_refused(text):
    with pytest.raises(ValueError, match=f"MPICOLL_METRICS is '{text}'"):
        mpicoll_metrics.chosen(text)
