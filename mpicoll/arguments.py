"""Arguments as users write them, checked before anything is sent."""

from __future__ import annotations

import operator
import sys
from typing import Any

import torch

from .ops import REDUCTIONS, ReduceOp
from .staging.dtypes import DTYPES, kind_of

__all__ = [
    "as_axis",
    "as_numelem",
    "as_peer",
    "as_reduction",
    "as_root",
    "as_tag",
    "check_reducible",
]


def _integer(call: str, name: str, value: Any) -> int:
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(
            f"{call}: {name} must be an integer, not {type(value).__name__} ({value!r})"
        ) from None


def as_root(call: str, name: str, value: Any, size: int) -> int:
    """A rank of the communicator."""
    root = _integer(call, name, value)
    if not 0 <= root < size:
        raise ValueError(
            f"{call}: {name} is {root}; it must be a rank of the communicator, 0 to {size - 1}"
        )
    return root


def as_peer(call: str, name: str, value: Any, size: int) -> int | None:
    """A rank of the communicator, or None for MPI_PROC_NULL."""
    return None if value is None else as_root(call, name, value, size)


def as_tag(call: str, name: str, value: Any, upper: int) -> int:
    """A message tag."""
    tag = _integer(call, name, value)
    if not 0 <= tag <= upper:
        raise ValueError(f"{call}: {name} is {tag}; it must be 0 to {upper} (MPI_TAG_UB)")
    return tag


def as_axis(call: str, name: str, value: Any, ndim: int) -> int:
    """An axis of a tensor of `ndim` dimensions; negative ones count from the end."""
    axis = _integer(call, name, value)
    if not -ndim <= axis < ndim:
        detail = f"-{ndim} to {ndim - 1}" if ndim else "a 0-d tensor has none"
        raise IndexError(f"{call}: {name} is {axis}; the tensor has {ndim} dimensions ({detail})")
    return axis % ndim


def as_numelem(call: str, name: str, value: Any) -> int:
    """A number of elements along an axis."""
    numelem = _integer(call, name, value)
    if numelem < 0:
        raise ValueError(f"{call}: {name} is {numelem}; it must not be negative")
    if numelem >= 1 << 63:
        raise ValueError(f"{call}: {name} is {numelem}; no tensor is that long")
    return numelem


def as_reduction(call: str, value: Any) -> ReduceOp:
    """A reduction: ReduceOp, an ``MPI_*`` constant, torch's ReduceOp, or an mpi4py Op."""
    if isinstance(value, ReduceOp):
        return value
    found = _from_torch(call, value)
    if found is None:
        found = _from_mpi4py(call, value)
    if found is not None:
        return found
    try:
        return ReduceOp(operator.index(value))
    except TypeError:
        raise TypeError(
            f"{call}: op must be a mpicoll.ReduceOp, an MPI_* constant, a torch.distributed."
            f"ReduceOp or an mpi4py.MPI.Op, not {type(value).__name__} ({value!r})"
        ) from None
    except ValueError:
        raise ValueError(
            f"{call}: op is {value!r}; the reductions are "
            + ", ".join(f"{op.name} ({int(op)})" for op in ReduceOp)
        ) from None


_TORCH = {
    "SUM": ReduceOp.SUM,
    "AVG": ReduceOp.AVG,
    "PRODUCT": ReduceOp.PROD,
    "MIN": ReduceOp.MIN,
    "MAX": ReduceOp.MAX,
    "BAND": ReduceOp.BAND,
    "BOR": ReduceOp.BOR,
    "BXOR": ReduceOp.BXOR,
}


def _from_torch(call: str, value: Any) -> ReduceOp | None:
    if not torch.distributed.is_available():
        return None
    kinds = torch.distributed.ReduceOp, torch.distributed.ReduceOp.RedOpType
    if not isinstance(value, kinds):
        return None
    for name, op in _TORCH.items():
        if value == getattr(torch.distributed.ReduceOp, name):
            return op
    raise ValueError(
        f"{call}: op is {value!r}, which mpicoll does not offer; of torch's it takes "
        + ", ".join(_TORCH)
    )


def _from_mpi4py(call: str, value: Any) -> ReduceOp | None:
    MPI = sys.modules.get("mpi4py.MPI")
    if MPI is None or not isinstance(value, MPI.Op):
        return None
    for op, row in REDUCTIONS.items():
        if row.mpi is not None and value == getattr(MPI, row.mpi[4:]):
            return op
    raise ValueError(
        f"{call}: op is {value!r}; mpicoll offers the predefined operations of MPI only"
    )


# Indexed by the reduction's value: hashing an enum member is a call into Python.
_TAKES = [
    frozenset(dtype for dtype in DTYPES if kind_of(dtype) in REDUCTIONS[op].kinds)
    for op in ReduceOp
]
_PAIRS = [REDUCTIONS[op].pairs for op in ReduceOp]


def check_reducible(call: str, op: ReduceOp, tensor: torch.Tensor, prefix: bool = False) -> None:
    """Raise where `op` does not take `tensor`'s elements, or the operation does not take `op`."""
    if tensor.dtype not in _TAKES[op]:
        raise TypeError(
            f"{call}: {op.name} of {tensor.dtype} does not exist; it takes {REDUCTIONS[op].dtypes}"
        )
    if prefix and op is ReduceOp.AVG:
        raise ValueError(f"{call}: AVG is no prefix reduction; use SUM and divide")
    if _PAIRS[op] and (tensor.dim() == 0 or tensor.shape[-1] != 2):
        raise ValueError(
            f"{call}: {op.name} takes (value, index) pairs along the last dimension, which must "
            f"have size 2; the tensor has shape {tuple(tensor.shape)}"
        )
