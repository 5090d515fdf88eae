"""Writes one timeline per job, in which every rank is a process: open it at ui.perfetto.dev.

Every rank writes what it sees to a file of its own, a *part*, as it goes. Nothing is communicated,
so the plugin cannot make a job wait, and a rank that is killed leaves what it had written. The
parts are merged at exit by rank 0 and by the rank that ends last, whichever those are; should
none of them get there, ``python -m mpicoll_timeline`` merges what lies there.

Clocks: ranks on one machine have one clock. Between machines, the wall clocks give a first guess,
and the collectives narrow it down: none that synchronises can end on one rank before it has
started on every other, which bounds the difference of two clocks from both sides.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import mpicoll
from mpicoll.watch import Event

__all__ = ["Timeline", "main", "merge", "offsets", "plugin"]

mpicoll_hook_api = 1

#: Seconds after which a rank writes what it has seen to disk.
FLUSH = 1.0
#: Operations that no rank can end before all have started.
SYNCHRONISING = {"Allreduce", "Allgather", "Barrier", "Alltoall", "Reduce_scatter"}
#: How the name of a part ends whose rank has ended.
OVER = ".over.jsonl"
_FIELDS = ("op", "direction", "rank", "size", "seq", "count", "nbytes", "root", "reduce_op")


class Timeline:
    """The plugin: writes the part of this rank.

    Parameters
    ----------
    target
        The file that all parts are merged into; the parts lie beside it, in ``<target>.parts``.
    """

    def __init__(self, target: Path) -> None:
        self.target = target = target.absolute()
        self.parts = target.with_name(target.name + ".parts")
        self._lines: list[str] = []
        self._flushed = 0.0
        self._file: Path | None = None

    @mpicoll.hookimpl
    def mpicoll_collective_finished(self, event: Event) -> None:
        """Note the event."""
        if self._file is None:
            self._open(event)
        said = {name: getattr(event, name) for name in _FIELDS}
        said["dtype"] = None if event.dtype is None else str(event.dtype).removeprefix("torch.")
        said["start"], said["end"] = event.t_start, event.t_end
        said["error"] = None if event.error is None else repr(event.error)
        self._lines.append(json.dumps(said))
        if time.perf_counter() - self._flushed > FLUSH:
            self._flush()

    @mpicoll.hookimpl
    def mpicoll_plugin_info(self) -> dict[str, Any]:
        """Where the timeline goes."""
        return {"file": str(self.target)}

    def _open(self, event: Event) -> None:
        from mpi4py import MPI

        world = MPI.COMM_WORLD
        self.rank, self.size = world.Get_rank(), world.Get_size()
        self.parts.mkdir(parents=True, exist_ok=True)
        self._file = self.parts / f"{self.rank}.jsonl"
        self._over = self.parts / f"{self.rank}{OVER}"
        self._over.unlink(missing_ok=True)  # of an earlier job
        self._began = time.time()
        head = {
            "rank": self.rank, "size": self.size, "host": _host(), "pid": os.getpid(),
            "began": self._began, "clock": time.perf_counter(), "wall": time.time(),
        }  # fmt: skip
        self._file.write_text(json.dumps(head) + "\n")
        self._pid = os.getpid()
        atexit.register(self.close)

    def _flush(self) -> None:
        assert self._file is not None
        if self._lines and os.getpid() == self._pid:  # not in a forked child
            with self._file.open("a") as file:
                file.write("\n".join(self._lines) + "\n")
        self._lines = []
        self._flushed = time.perf_counter()

    def close(self) -> None:
        """Finish this rank's part, and merge the parts if that is up to this rank."""
        assert self._file is not None
        if os.getpid() != self._pid:
            return
        self._flush()
        with _alone(self.parts):  # the last to come here sees that all others have
            with self._file.open("a") as file:
                file.write(json.dumps({"over": time.time()}) + "\n")
            self._file.rename(self._over)
            last = sum(1 for _ in self.parts.glob(f"*{OVER}")) >= self.size
            if last or self.rank == 0:
                merge(read(self.parts, self.size, (_host(), self._began)), self.target)


def _host() -> str:
    """The machine since it was started: processes with the same have the same clock."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        boot = ""
    return f"{socket.gethostname()} {boot}"


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """No other rank ends its part meanwhile. The lock goes with the process, however it ends."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


# ---------------------------------------------------------------- merging


def read(
    folder: Path, size: int | None = None, me: tuple[str, float] | None = None
) -> list[dict[str, Any]]:
    """The parts in a folder, by rank.

    `size` and `me`, the host and the beginning of the rank that asks, leave out what an earlier
    job has left there: all ranks of a job are there at once.
    """
    parts = []
    for file in folder.glob("*.jsonl"):
        head, *lines = file.read_text().splitlines() or [""]
        if not head.endswith("}"):
            continue  # not written yet
        part = json.loads(head) | {"events": [], "over": None}
        for line in lines:
            try:
                said = json.loads(line)
            except ValueError:
                break  # the rank was killed while it wrote
            if "over" in said:
                part["over"] = said["over"]
            else:
                part["events"].append(said)
        part["file"] = file
        if size is not None and part["size"] != size:
            continue
        if me is not None and part["over"] is not None:
            slack = 0.0 if part["host"] == me[0] else 60.0
            if part["over"] + slack < me[1]:
                continue
        parts.append(part)
    return sorted(parts, key=lambda part: part["rank"])


def _signature(event: dict[str, Any]) -> tuple[Any, ...]:
    return event["op"], event["direction"], event["size"], event["reduce_op"], event["root"]


def _matching(one: dict[str, Any], other: dict[str, Any]) -> Iterator[tuple[Any, Any]]:
    """The events that two ranks surely have in common: until what they do differs."""
    size = one["size"]
    mine = [e for e in one["events"] if e["size"] == size]
    theirs = [e for e in other["events"] if e["size"] == size]
    for a, b in zip(mine, theirs, strict=False):
        if _signature(a) != _signature(b):
            return
        if a["op"] in SYNCHRONISING and a["error"] is None and b["error"] is None:
            yield a, b


def offsets(parts: Sequence[dict[str, Any]]) -> list[float]:
    """What to add to the times of each part, in seconds, for the clock of the first."""
    first = parts[0]
    found = [0.0]
    for part in parts[1:]:
        if part["host"] == first["host"]:
            found.append(0.0)
            continue
        low, high = -float("inf"), float("inf")
        for a, b in _matching(first, part):
            # After the correction x: b starts before a ends, and a starts before b ends.
            lowest, highest = a["start"] - b["end"], a["end"] - b["start"]
            if max(low, lowest) > min(high, highest):
                break  # not the same events any more
            low, high = max(low, lowest), min(high, highest)
        guess = (part["wall"] - part["clock"]) - (first["wall"] - first["clock"])
        found.append(guess if high == float("inf") else (low + high) / 2)
    return found


def merge(parts: Sequence[dict[str, Any]], target: Path) -> None:
    """Write one timeline of all parts; complete ones are removed, as far as they are in it.

    Raises
    ------
    ValueError
        There is no part.
    """
    if not parts:
        raise ValueError(f"there are no parts to merge into {target}")
    shifts = offsets(parts)
    starts = [
        event["start"] + shift
        for part, shift in zip(parts, shifts, strict=True) for event in part["events"]
    ]  # fmt: skip
    zero = min(starts, default=0.0)
    trace: list[dict[str, Any]] = []
    for part, shift in zip(parts, shifts, strict=True):
        rank = part["rank"]
        host = part["host"].split()[0]
        state = "" if part["over"] is not None else ", not finished"
        named = {"name": f"rank {rank} ({host}, pid {part['pid']}{state})"}
        trace.append({"ph": "M", "name": "process_name", "pid": rank, "tid": 0, "args": named})
        order = {"sort_index": rank}
        trace.append(
            {"ph": "M", "name": "process_sort_index", "pid": rank, "tid": 0, "args": order}
        )
        for thread, name in enumerate(("forward", "backward")):
            trace.append(
                {"ph": "M", "name": "thread_name", "pid": rank, "tid": thread,
                 "args": {"name": name}}
            )  # fmt: skip
        for event in part["events"]:
            label = event["op"] if not event["reduce_op"] else f"{event['op']} {event['reduce_op']}"
            trace.append(
                {
                    "ph": "X",
                    "name": label,
                    "cat": event["direction"],
                    "pid": rank,
                    "tid": int(event["direction"] == "backward"),
                    "ts": round((event["start"] + shift - zero) * 1e6, 3),
                    "dur": round((event["end"] - event["start"]) * 1e6, 3),
                    "args": {k: v for k, v in event.items()
                             if v is not None and k not in ("op", "start", "end", "direction")},
                }
            )  # fmt: skip
    size = parts[0]["size"]
    there = {part["rank"] for part in parts}
    about = {
        "ranks": size,
        "missing ranks": [rank for rank in range(size) if rank not in there],
        "unfinished ranks": [part["rank"] for part in parts if part["over"] is None],
        "clock offsets in seconds": dict(zip(map(str, sorted(there)), shifts, strict=True)),
    }
    text = json.dumps({"traceEvents": trace, "displayTimeUnit": "ms", "otherData": about})
    written = target.with_name(target.name + ".new")
    written.write_text(text)
    written.replace(target)
    if not about["missing ranks"] and not about["unfinished ranks"]:
        for part in parts:
            part["file"].unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # an earlier job has left something there
            parts[0]["file"].parent.rmdir()


def main(arguments: Sequence[str] | None = None) -> None:
    """Merge the parts that an interrupted job has left."""
    parser = argparse.ArgumentParser(prog="mpicoll-timeline", description=main.__doc__)
    parser.add_argument("parts", type=Path, help="the folder of the parts, FILE.parts")
    parser.add_argument("-o", "--output", type=Path, help="the timeline; FILE by default")
    given = parser.parse_args(arguments)
    target = given.output or given.parts.with_suffix("")
    try:
        parts = read(given.parts)
        merge(parts, target)
    except ValueError as error:
        parser.error(str(error))
    print(f"{target}: {sum(len(p['events']) for p in parts)} events of {len(parts)} ranks")


plugin = Timeline(Path(os.environ.get("MPICOLL_TIMELINE") or "mpicoll-timeline.json"))

if __name__ == "__main__":
    main()
