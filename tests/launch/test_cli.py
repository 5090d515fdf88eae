"""``python -m mpicoll``: what it says, and that it says it once."""

from __future__ import annotations

import json
import platform
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from click.testing import CliRunner
from launcher import Outcome, mpiexec, start

from mpicoll import cli

LIMIT = 120  # seconds; a launch takes about three


def run(*words: str, ranks: int | None = None, **environment: str) -> Outcome:
    command = [] if ranks is None else [mpiexec(), "-n", str(ranks)]
    return start([*command, sys.executable, "-m", "mpicoll", *words], LIMIT, **environment)


def facts(*words: str, **settings) -> dict:
    done = run("info", "--json", *words, **settings)
    return json.loads(done.check().out)  # one object: one rank printed


def test_version():
    done = CliRunner().invoke(cli.main, ["--version"])
    assert done.exit_code == 0
    assert done.output.split()[-1] == version("mpicoll")


def test_help_names_the_command():
    done = CliRunner().invoke(cli.main, ["--help"])
    assert done.exit_code == 0
    assert "info" in done.output


def test_a_wrong_word_is_refused():
    done = CliRunner().invoke(cli.main, ["information"])
    assert done.exit_code == 2
    assert "information" in done.output


@pytest.mark.parametrize("ranks", [None, 2])
def test_facts(ranks):
    told = facts(ranks=ranks)
    for package in ("mpicoll", "torch", "mpi4py", "numpy"):
        assert told[package] == version(package)
    assert told["python"].startswith(platform.python_version())
    assert told["built with"]["cython"].split(".")[0] == "3"
    assert told["built with"]["compiler"]
    assert told["ranks"] == (ranks or 1)
    assert told["launcher"] == "ok"
    assert told["abi"] in ("MPICH", "Open MPI", "MPI-5 standard")
    assert told["thread level"].startswith("MPI_THREAD_")
    assert Path(told["mpi path"]).name.startswith("libmpi")
    assert Path(told["mpi path"]).exists()
    assert isinstance(told["device aware"], bool)
    assert told["device reason"]
    if ranks is None:
        assert told["short messages"] == "through MPI"
    else:
        assert told["short messages"] == "up to 4096 bytes through shared memory"


def test_short_messages():
    told = facts(ranks=2, MPICOLL_SHARED_BYTES="100")
    assert told["short messages"] == "up to 100 bytes through shared memory"
    assert facts(ranks=2, MPICOLL_SHARED_BYTES="0")["short messages"] == "through MPI"
    done = run("info", MPICOLL_SHARED_BYTES="short")
    assert done.code == 1
    assert "Error: MPICOLL_SHARED_BYTES is 'short'; it must be a whole number" in done.err


def test_the_library_is_the_one_that_mpi4py_loaded():
    code = "from mpi4py import MPI; print(MPI.Get_library_version().strip('\\0'))"
    theirs = start([sys.executable, "-c", code], LIMIT).check().out
    told = facts()
    assert told["mpi library"] == " ".join(theirs.splitlines()[0].split())
    large = "large counts (longer messages travel in pieces)"
    # The PyPI Open MPI is MPI 3.1: it has none of the three; MPICH 5 has all.
    if told["mpi library"].startswith("MPICH Version: 5"):
        assert told["lacks"] == []
    elif told["mpi library"].startswith("Open MPI"):
        assert large in told["lacks"]


def test_the_table_has_every_fact():
    shown = run("info", COLUMNS="200").check().out
    told = facts()
    for name, value in told.items():
        if name == "device reason":
            assert value in shown
        else:
            assert any(line.startswith(name) for line in shown.splitlines()), name
    assert f"no: {told['device reason']}" in shown or told["device aware"]


@pytest.mark.parametrize("answer", ["0", "1"])
def test_an_overridden_answer_is_named(answer):
    told = facts(MPICOLL_CUDA_AWARE=answer)
    assert told["device aware"] is (answer == "1")
    assert told["device reason"] == f"MPICOLL_CUDA_AWARE={answer}"


def test_a_launcher_of_another_mpi_is_named():
    told = facts(PMIX_SIZE="2")
    assert told["ranks"] == 1
    assert "PMIX_SIZE=2" in told["launcher"]
    assert told["mpi path"] in told["launcher"]


def test_no_mpi_is_an_error_without_a_traceback():
    nowhere = {"MPI4PY_LIBMPI": "/nonexistent/libmpi.so"}
    if start([sys.executable, "-c", "import mpi4py.MPI"], LIMIT, **nowhere).code == 0:
        pytest.skip("this mpi4py is linked to its MPI library")
    done = run("info", **nowhere)
    assert done.code == 1
    assert "cannot use MPI" in done.err
    assert "Traceback" not in done.err
    assert done.out == ""
