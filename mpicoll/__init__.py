"""Differentiable MPI communication for stock PyTorch, on any MPI.

Importing mpicoll neither initialises MPI nor touches CUDA, and loads no plugin: the first
communicating call does that, and what ``from mpi4py import MPI`` does.
"""

from importlib.metadata import version as _version
from typing import TYPE_CHECKING as _TYPE_CHECKING

from . import nn, plugins
from .autograd import JoinDummies
from .autograd.point_to_point import JoinDummiesHandle, WaitHandle
from .communicator import COMM_SELF, COMM_WORLD, Communicator, comm_from_mpi4py
from .errors import CollectiveMismatchError, MPIError, PluginError, PluginMismatchError
from .failure import allow_exceptions
from .helpers import copy_to_group, lockstep, reduce_from_group
from .ops import ReduceOp
from .staging import cuda_aware_mpi_support, deactivate_cuda_aware_mpi_support

if _TYPE_CHECKING:
    from .plugins.specs import hookimpl

__version__ = _version("mpicoll")

MPI_Communicator = Communicator
MPI_MAX = ReduceOp.MAX
MPI_MIN = ReduceOp.MIN
MPI_SUM = ReduceOp.SUM
MPI_PROD = ReduceOp.PROD
MPI_LAND = ReduceOp.LAND
MPI_BAND = ReduceOp.BAND
MPI_LOR = ReduceOp.LOR
MPI_BOR = ReduceOp.BOR
MPI_LXOR = ReduceOp.LXOR
MPI_BXOR = ReduceOp.BXOR
MPI_MINLOC = ReduceOp.MINLOC
MPI_MAXLOC = ReduceOp.MAXLOC

__all__ = [
    "COMM_SELF",
    "COMM_WORLD",
    "MPI_BAND",
    "MPI_BOR",
    "MPI_BXOR",
    "MPI_LAND",
    "MPI_LOR",
    "MPI_LXOR",
    "MPI_MAX",
    "MPI_MAXLOC",
    "MPI_MIN",
    "MPI_MINLOC",
    "MPI_PROD",
    "MPI_SUM",
    "CollectiveMismatchError",
    "Communicator",
    "JoinDummies",
    "JoinDummiesHandle",
    "MPIError",
    "MPI_Communicator",
    "PluginError",
    "PluginMismatchError",
    "ReduceOp",
    "WaitHandle",
    "allow_exceptions",
    "comm_from_mpi4py",
    "copy_to_group",
    "cuda_aware_mpi_support",
    "deactivate_cuda_aware_mpi_support",
    "hookimpl",
    "lockstep",
    "nn",
    "plugins",
    "reduce_from_group",
]


def __getattr__(name: str) -> object:
    if name == "hookimpl":  # the marker is pluggy's, which only plugins need
        return plugins.hookimpl
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
