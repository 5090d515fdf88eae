"""Which memory MPI touches: the tensor's own, or host memory that stands in for it; and why."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from .. import config

__all__ = [
    "Plan",
    "cuda_aware_mpi_support",
    "deactivate_cuda_aware_mpi_support",
    "on_device",
    "plan_for",
]


@dataclass(frozen=True)
class Plan:
    """How tensors of one device reach MPI.

    Attributes
    ----------
    direct
        True if MPI reads and writes the tensor's memory, False if it is staged through the host.
    reason
        Why, in words.
    """

    direct: bool
    reason: str


_CPU = Plan(True, "MPI reads and writes host memory")
_deactivated = False
_found: tuple[bool, str] | None = None


def deactivate_cuda_aware_mpi_support() -> None:
    """Stage device tensors through host memory from now on, whatever the MPI library can do."""
    global _deactivated
    _deactivated = True


def cuda_aware_mpi_support() -> tuple[bool, str]:
    """Whether device pointers are given to MPI, and why.

    Returns
    -------
    enabled : bool
        True if tensors on a CUDA (or ROCm) device are passed to MPI as they are, False if they
        are staged through host memory.
    reason : str
        What decided it: the MPI library's own answer, ``MPICOLL_CUDA_AWARE`` or
        :func:`deactivate_cuda_aware_mpi_support`.

    Notes
    -----
    Asks the MPI library and therefore initialises MPI if nothing has yet. Never initialises CUDA.
    """
    if _deactivated:
        return False, "switched off by deactivate_cuda_aware_mpi_support()"
    told = config.read().cuda_aware
    if told is not None:
        return told, f"MPICOLL_CUDA_AWARE={int(told)}"
    global _found
    if _found is None:
        _found = _ask_library()
    return _found


def _ask_library() -> tuple[bool, str]:
    from .._core import mpi

    mpi.bind()
    rocm = torch.version.hip is not None
    library = ctypes.CDLL(None), ctypes.CDLL(mpi.notes()["path"])

    def symbol(name: str):
        for place in library:
            with contextlib.suppress(AttributeError):
                return getattr(place, name)
        return None

    query = "MPIX_Query_rocm_support" if rocm else "MPIX_Query_cuda_support"
    for name in (query, "MPIX_Query_hip_support") if rocm else (query,):
        function = symbol(name)
        if function is not None:
            function.restype, function.argtypes = ctypes.c_int, []
            answer = bool(function())
            return answer, f"{name}() of the MPI library says {int(answer)}"
    function = symbol("MPIX_GPU_query_support")
    if function is not None:
        function.restype = ctypes.c_int
        function.argtypes = [ctypes.c_int, ctypes.POINTER(ctypes.c_int)]
        flag = ctypes.c_int(0)
        kind = 2 if rocm else 0  # MPIX_GPU_SUPPORT_HIP, MPIX_GPU_SUPPORT_CUDA
        if function(kind, ctypes.byref(flag)) == 0:
            return bool(flag.value), f"MPIX_GPU_query_support() says {flag.value}"
    kinds = _memory_kinds()
    if kinds is not None:
        wanted = "rocm" if rocm else "cuda"
        return wanted in kinds, f"mpi_memory_alloc_kinds is {kinds!r}"
    return False, "the MPI library has no way to ask it"


def _memory_kinds() -> str | None:
    """The info value ``mpi_memory_alloc_kinds`` of MPI-4.1, None where the library lacks it."""
    from mpi4py import MPI

    for info in (MPI.COMM_WORLD.Get_info(), MPI.INFO_ENV):
        value = info.Get("mpi_memory_alloc_kinds")
        if value:
            return value
    return None


def plan_for(device: torch.device) -> Plan:
    """How tensors of `device` reach MPI, and why."""
    if device.type == "cpu":
        return _CPU
    if device.type == "cuda":
        return Plan(*cuda_aware_mpi_support())
    return Plan(
        False, f"no MPI is told of devices of type {device.type!r}: staged through the host"
    )


@contextlib.contextmanager
def on_device(device: torch.device) -> Iterator[None]:
    """Make `device` current and its stream idle, so that MPI sees finished data."""
    if device.type == "cpu":
        yield
        return
    with torch.cuda.device(device):
        torch.cuda.current_stream(device).synchronize()
        yield
