"""Starts jobs under mpiexec and reads the timelines that they leave."""

from __future__ import annotations

import atexit
import json
import threading
import types

import mpicoll_timeline
import pytest
from launcher import python

LIMIT = 120  # seconds

PROGRAM = """
import torch, mpicoll
comm = mpicoll.COMM_WORLD
x = torch.ones(3, requires_grad=True)
comm.Allreduce(x, mpicoll.MPI_SUM).sum().backward()
comm.Bcast(torch.ones(5, dtype=torch.float64), 0)
comm.Barrier()
"""


def run(folder, program, ranks=2, **environment):
    """Run a program; the timeline is to be ``folder/t.json``."""
    settings = {"MPICOLL_PLUGINS": "timeline", "MPICOLL_TIMELINE": str(folder / "t.json")}
    done = python(program, ranks=ranks, limit=LIMIT, **(settings | environment))
    return done.code, done.out + done.err


def slices(trace, rank=None):
    return [e for e in trace["traceEvents"] if e["ph"] == "X" and rank in (None, e["pid"])]


@pytest.mark.parametrize("ranks", [1, 2])
def test_one_timeline_of_all_ranks(tmp_path, ranks):
    code, said = run(tmp_path, PROGRAM, ranks)
    assert code == 0, said
    assert [p.name for p in tmp_path.iterdir()] == ["t.json"]  # the parts are gone
    trace = json.loads((tmp_path / "t.json").read_text())
    for rank in range(ranks):
        mine = slices(trace, rank)
        assert [(e["name"], e["cat"], e["tid"]) for e in mine] == [
            ("Allreduce SUM", "forward", 0),
            ("Allreduce SUM", "backward", 1),
            ("Bcast", "forward", 0),
            ("Barrier", "forward", 0),
        ]
        assert [e["args"]["seq"] for e in mine] == [0, 1, 2, 3]
        bcast = mine[2]["args"]
        assert bcast == {"rank": rank, "size": ranks, "seq": 2, "count": 5, "nbytes": 40,
                         "root": 0, "dtype": "float64"}  # fmt: skip
        ends = [e["ts"] + e["dur"] for e in mine]
        assert ends == sorted(ends)
    assert min(e["ts"] for e in slices(trace)) == 0
    assert len(slices(trace)) == 4 * ranks
    names = [e for e in trace["traceEvents"] if e["ph"] == "M" and e["name"] == "process_name"]
    assert [(e["pid"], e["args"]["name"].split(" (")[0]) for e in names] == [
        (r, f"rank {r}") for r in range(ranks)
    ]
    about = trace["otherData"]
    assert (about["ranks"], about["missing ranks"], about["unfinished ranks"]) == (ranks, [], [])


def test_waiting_shows(tmp_path):
    """Rank 1 comes 0.3 s late to the barrier: rank 0 waits so long, and both end together."""
    code, said = run(tmp_path, """
        import time, mpicoll
        comm = mpicoll.COMM_WORLD
        comm.Barrier()
        time.sleep(0.3 * comm.rank)
        comm.Barrier()
    """)  # fmt: skip
    assert code == 0, said
    trace = json.loads((tmp_path / "t.json").read_text())
    early, late = slices(trace, 0)[1], slices(trace, 1)[1]
    assert early["dur"] > 250_000  # microseconds
    assert early["ts"] + early["dur"] >= late["ts"]
    assert late["ts"] - early["ts"] > 250_000


@pytest.mark.parametrize("first", [0, 1])
def test_whoever_ends_last_merges(tmp_path, first):
    code, said = run(
        tmp_path,
        PROGRAM
        + f"""
import time, torch
if comm.rank != {first}:
    time.sleep(1)
    mpicoll.COMM_SELF.Barrier()
""",
    )
    assert code == 0, said
    trace = json.loads((tmp_path / "t.json").read_text())
    assert [len(slices(trace, r)) for r in (0, 1)] == ([4, 5] if first == 0 else [5, 4])
    assert not (tmp_path / "t.json.parts").exists()


def test_a_killed_rank_leaves_its_part(tmp_path, capsys):
    code, said = run(
        tmp_path,
        PROGRAM
        + """
import os, signal, time
if comm.rank == 1:
    time.sleep(1.2)
    comm.Split(0).Free()
    mpicoll.COMM_SELF.Barrier()  # writes what came before
    os.kill(os.getpid(), signal.SIGKILL)
comm.Split(0).Free()
time.sleep(0.2)
""",
    )
    assert code != 0, said
    parts = tmp_path / "t.json.parts"
    assert parts.is_dir()
    mpicoll_timeline.main([str(parts)])
    assert "of 2 ranks" in capsys.readouterr().out
    trace = json.loads((tmp_path / "t.json").read_text())
    assert 1 in trace["otherData"]["unfinished ranks"]
    assert [e["name"] for e in slices(trace, 1)][:4] == [
        "Allreduce SUM", "Allreduce SUM", "Bcast", "Barrier",
    ]  # fmt: skip
    assert parts.is_dir()


def test_what_an_earlier_job_left_is_not_taken(tmp_path):
    parts = tmp_path / "t.json.parts"
    parts.mkdir()
    stale = {"rank": 1, "size": 2, "host": mpicoll_timeline._host(), "pid": 1, "began": 1.0,
             "clock": 0.0, "wall": 1.0}  # fmt: skip
    (parts / "1.over.jsonl").write_text(json.dumps(stale) + '\n{"over": 2.0}\n')
    (parts / "7.over.jsonl").write_text(json.dumps(stale | {"rank": 7, "size": 8}) + "\n")
    code, said = run(tmp_path, PROGRAM)
    assert code == 0, said
    trace = json.loads((tmp_path / "t.json").read_text())
    assert {e["pid"] for e in slices(trace)} == {0, 1}
    assert len(slices(trace)) == 8
    assert [p.name for p in parts.iterdir()] == ["7.over.jsonl"]


def test_a_file_that_cannot_be_written_ends_the_timeline_and_nothing_else(tmp_path):
    (tmp_path / "taken").write_text("")
    code, said = run(
        tmp_path, PROGRAM + "print('done')", MPICOLL_TIMELINE=str(tmp_path / "taken" / "t.json")
    )
    assert code == 0, said
    assert said.count("done") == 2
    assert said.count("its observers are switched off") == 2  # once per rank


def test_a_part_does_not_end_while_another_rank_merges(tmp_path):
    timeline = mpicoll_timeline.Timeline(tmp_path / "t.json")
    names = (*mpicoll_timeline._FIELDS, "dtype", "error")
    event = types.SimpleNamespace(**dict.fromkeys(names), t_start=1.0, t_end=2.0)
    timeline.mpicoll_collective_finished(event)
    atexit.unregister(timeline.close)
    part = timeline.parts / "0.jsonl"
    ending = threading.Thread(target=timeline.close)
    with mpicoll_timeline._alone(timeline.parts):
        ending.start()
        ending.join(0.3)
        assert ending.is_alive()
        assert mpicoll_timeline.read(timeline.parts)[0]["over"] is None
    ending.join(20)
    assert not part.exists()
    assert len(slices(json.loads((tmp_path / "t.json").read_text()))) == 1


def test_a_part_of_which_nothing_is_written_yet(tmp_path):
    (tmp_path / "0.jsonl").write_text("")
    (tmp_path / "1.jsonl").write_text('{"rank": 1, "si')
    assert mpicoll_timeline.read(tmp_path) == []


# ---------------------------------------------------------------- clocks


def part(rank, clock, wall, starts, ops=("Barrier",) * 3, host="a"):
    """A part whose barriers all end at 1, 2, 3 s true time."""
    events = [
        {"op": op, "direction": "forward", "rank": rank, "size": 2, "seq": k, "count": 0,
         "nbytes": 0, "root": None, "reduce_op": None, "dtype": None, "error": None,
         "start": start + clock, "end": k + 1.0 + clock}
        for k, (op, start) in enumerate(zip(ops, starts, strict=True))
    ]  # fmt: skip
    return {"rank": rank, "size": 2, "host": host, "pid": 1, "clock": clock, "wall": wall,
            "over": 9.0, "events": events}  # fmt: skip


def test_one_machine_has_one_clock():
    parts = [part(0, 0.0, 0.0, (0, 1, 2)), part(1, 5.0, 0.0, (0, 1, 2))]
    assert mpicoll_timeline.offsets(parts) == [0.0, 0.0]


def test_collectives_bound_the_clocks():
    """Rank 1's clock is 100 s ahead and its wall clock 3 s wrong; each is late once."""
    one = part(0, 0.0, 1000.0, (0.999, 1.5, 2.998))
    other = part(1, 100.0, 1003.0, (0.5, 1.999, 2.5), host="b")
    shift = mpicoll_timeline.offsets([one, other])[1]
    # bounds by the late ones: 0.999 - 1 and 2 - 1.999, about the truth
    assert shift == pytest.approx(-100.0, abs=0.0011)


def test_without_a_common_collective_the_wall_clocks_count():
    one = part(0, 0.0, 1000.0, (0.9, 1.5, 2.9))
    other = part(1, 100.0, 1000.25, (0.5, 1.9, 2.5), ops=("Bcast", "Barrier", "Barrier"), host="b")
    assert mpicoll_timeline.offsets([one, other]) == [0.0, 1000.25 - 100.0 - 1000.0]


def test_events_that_contradict_are_not_the_same():
    """From the second barrier on, rank 1 has gone another way."""
    one = part(0, 0.0, 1000.0, (0.9, 1.5, 2.9))
    other = part(1, 100.0, 1000.0, (0.9, 1.9, 2.5), host="b")
    for event in other["events"][1:]:
        event["start"] += 50
        event["end"] += 50
    assert mpicoll_timeline.offsets([one, other])[1] == pytest.approx(-100.0, abs=0.11)


def test_an_empty_folder_is_told(tmp_path, capsys):
    with pytest.raises(SystemExit, match="2"):
        mpicoll_timeline.main([str(tmp_path)])
    assert "no parts" in capsys.readouterr().err
