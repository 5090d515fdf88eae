"""Starts programs, under mpiexec or alone, with a hard limit; stops only what it started."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap

ROOT = pathlib.Path(__file__).resolve().parents[2]
#: What a launcher tells the processes that it starts: no test inherits it from the test runner.
LAUNCHERS = ("PMI_", "PMIX_", "OMPI_COMM_", "HYDI_", "HYDRA_", "MPIR_")


def mpiexec() -> str:
    """The launcher: ``MPIEXEC``, or the one beside this Python, or the one on PATH."""
    beside = pathlib.Path(sys.executable).parent / "mpiexec"
    for candidate in (os.environ.get("MPIEXEC"), beside if beside.exists() else None, "mpiexec"):
        found = candidate and shutil.which(str(candidate))
        if found:
            return found
    raise FileNotFoundError("no mpiexec: set MPIEXEC, or put it on PATH")


@dataclasses.dataclass
class Outcome:
    """How a program ended."""

    code: int
    out: str
    err: str

    def check(self) -> Outcome:
        """Fail with everything that the program said unless it ended with 0."""
        assert self.code == 0, f"exit code {self.code}\n--- out\n{self.out}\n--- err\n{self.err}"
        return self


def start(command: list[str], limit: float, **environment: str) -> Outcome:
    """Run `command` in a process group of its own; after `limit` seconds the group is stopped."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(LAUNCHERS)}
    env.update(OMP_NUM_THREADS="1", PYTHONSAFEPATH="1", PYTHONFAULTHANDLER="1", **environment)
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env,
        cwd=tempfile.gettempdir(),  # not the checkout, whose unbuilt package would shadow ours
        start_new_session=True,
    )  # fmt: skip
    try:
        out, err = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            out, err = process.communicate(timeout=5)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            out, err = process.communicate()
        raise AssertionError(
            f"still running after {limit:g} s: {command}\n--- out\n{out}\n--- err\n{err}"
        ) from None
    return Outcome(process.returncode, out, err)


def python(
    program: str, *options: str, limit: float = 60, ranks: int = 0, **environment: str
) -> Outcome:
    """Run Python source on `ranks` ranks under mpiexec; 0: without it."""
    command = [sys.executable, *options, "-c", textwrap.dedent(program)]
    if ranks:
        command = [mpiexec(), "-n", str(ranks), *command]
    return start(command, limit, **environment)


def script(path: pathlib.Path, ranks: int, limit: float = 120) -> Outcome:
    """Run a file of this repository on `ranks` ranks."""
    return start([mpiexec(), "-n", str(ranks), sys.executable, str(path)], limit)
