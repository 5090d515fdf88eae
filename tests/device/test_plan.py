"""Direct or through the host, and why: the answer comes from the library, and can be overridden."""

from __future__ import annotations

import ctypes

import pytest
import torch
from simulated import DEVICE, on_device, traffic

import mpicoll
from mpicoll.staging import Plan, devices, plan_for

CUDA = torch.device("cuda:0")  # naming it does not need one


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch):
    """No override is in force, and the library has not been asked."""
    monkeypatch.setattr(devices, "_deactivated", False)
    monkeypatch.setattr(devices, "_found", None)
    monkeypatch.delenv("MPICOLL_CUDA_AWARE", raising=False)


def test_host_memory_is_direct():
    assert plan_for(torch.device("cpu")).direct


def test_an_unknown_device_is_staged():
    plan = plan_for(DEVICE)
    assert not plan.direct
    assert "'simdev'" in plan.reason


@pytest.mark.parametrize("told", ["0", "1"])
def test_the_variable_decides(told, monkeypatch):
    monkeypatch.setenv("MPICOLL_CUDA_AWARE", told)
    answer = told == "1", f"MPICOLL_CUDA_AWARE={told}"
    assert mpicoll.cuda_aware_mpi_support() == answer
    assert plan_for(CUDA) == Plan(*answer)


def test_the_variable_is_read_strictly(monkeypatch):
    monkeypatch.setenv("MPICOLL_CUDA_AWARE", "yes")
    with pytest.raises(ValueError, match="MPICOLL_CUDA_AWARE is 'yes'; it must be 0 or 1"):
        mpicoll.cuda_aware_mpi_support()


def test_an_empty_variable_is_none(monkeypatch):
    monkeypatch.setenv("MPICOLL_CUDA_AWARE", "")
    assert "MPICOLL_CUDA_AWARE" not in mpicoll.cuda_aware_mpi_support()[1]


def test_switching_off_beats_the_variable(monkeypatch):
    monkeypatch.setenv("MPICOLL_CUDA_AWARE", "1")
    mpicoll.deactivate_cuda_aware_mpi_support()
    enabled, reason = mpicoll.cuda_aware_mpi_support()
    assert not enabled
    assert "deactivate_cuda_aware_mpi_support" in reason
    assert not plan_for(CUDA).direct


def test_the_variable_does_not_reach_other_devices(monkeypatch):
    monkeypatch.setenv("MPICOLL_CUDA_AWARE", "1")
    assert not plan_for(DEVICE).direct
    x = on_device(torch.ones(3))
    traffic.clear()
    mpicoll.COMM_WORLD.Allreduce(x, mpicoll.MPI_SUM)
    assert traffic.copies == (1, 1)


class Library:
    """A loaded library with some of the functions that can be asked."""

    def __init__(self, monkeypatch, **functions) -> None:
        for name, function in functions.items():
            setattr(self, name, function)
        monkeypatch.setattr(devices.ctypes, "CDLL", lambda _: self)


def _says(answer: int):
    def function() -> int:
        return answer

    return function


@pytest.mark.parametrize("answer", [0, 1])
def test_the_first_question(answer, monkeypatch):
    Library(monkeypatch, MPIX_Query_cuda_support=_says(answer))
    expected = bool(answer), f"MPIX_Query_cuda_support() of the MPI library says {answer}"
    assert mpicoll.cuda_aware_mpi_support() == expected


@pytest.mark.parametrize("answer", [0, 1])
def test_the_second_question(answer, monkeypatch):
    asked = []

    def query(kind: int, flag) -> int:
        asked.append(kind)
        ctypes.cast(flag, ctypes.POINTER(ctypes.c_int))[0] = answer
        return 0

    Library(monkeypatch, MPIX_GPU_query_support=query)
    enabled, reason = mpicoll.cuda_aware_mpi_support()
    assert enabled is bool(answer)
    assert reason == f"MPIX_GPU_query_support() says {answer}"
    assert asked == [0]  # MPIX_GPU_SUPPORT_CUDA


@pytest.mark.parametrize(
    ("kinds", "enabled"), [("mpi,system,cuda:device", True), ("mpi,system", False)]
)
def test_the_third_question(kinds, enabled, monkeypatch):
    Library(monkeypatch)
    monkeypatch.setattr(devices, "_memory_kinds", lambda: kinds)
    answer, reason = mpicoll.cuda_aware_mpi_support()
    assert answer is enabled
    assert kinds in reason


def test_a_library_that_cannot_be_asked(monkeypatch):
    Library(monkeypatch)
    monkeypatch.setattr(devices, "_memory_kinds", lambda: None)
    enabled, reason = mpicoll.cuda_aware_mpi_support()
    assert not enabled
    assert "no way to ask" in reason


def test_the_library_is_asked_once(monkeypatch):
    first = mpicoll.cuda_aware_mpi_support()
    monkeypatch.setattr(devices, "_ask_library", lambda: pytest.fail("asked again"))
    assert mpicoll.cuda_aware_mpi_support() == first


def test_the_real_library_answers():
    enabled, reason = mpicoll.cuda_aware_mpi_support()
    assert isinstance(enabled, bool)
    assert "MPIX_" in reason or "mpi_memory_alloc_kinds" in reason or "no way" in reason
    if not enabled:
        assert "says 1" not in reason
