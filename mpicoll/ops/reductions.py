"""The reductions: which elements they take, their neutral element, their derivative."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass

import torch

__all__ = ["REDUCTIONS", "Kind", "ReduceOp", "Reduction"]


class ReduceOp(enum.IntEnum):
    """Reductions, with the values that ``mpi4torch`` gave them.

    ``PRODUCT`` is the torch spelling of ``PROD``. ``AVG`` is the sum divided by the number
    of ranks.
    """

    MAX = 0
    MIN = 1
    SUM = 2
    PROD = 3
    LAND = 4
    BAND = 5
    LOR = 6
    BOR = 7
    LXOR = 8
    BXOR = 9
    MINLOC = 10
    MAXLOC = 11
    AVG = 12
    PRODUCT = 3


class Kind(enum.Enum):
    """The kinds of element that a reduction tells apart."""

    BOOL = "bool"
    INTEGER = "integer"
    HALF = "float16, bfloat16"
    FLOAT = "float32, float64"
    COMPLEX = "complex"
    OTHER = "other"  # float8 and the like: data that mpicoll moves but does not compute with


@dataclass(frozen=True)
class Reduction:
    """One row of the table of reductions.

    Attributes
    ----------
    op
        The reduction.
    mpi
        Name of the MPI constant; None where MPI has none.
    kinds
        The kinds of element it takes.
    derivative
        ``"linear"``: the adjoint of the operation itself; ``"winner"``: goes to the ranks
        whose element is the result; ``"product"``: times the product of the others;
        None: a gradient does not exist.
    adjoint
        The derivative as the reference page prints it, with ``G`` the gradient of the result.
    neutral
        ``neutral(dtype)``: the element that changes nothing.
    reference
        ``reference(stacked)``: reduces dimension 0 with plain torch.
    pairs
        True if elements come as (value, index) pairs along the last dimension.
    """

    op: ReduceOp
    mpi: str | None
    kinds: frozenset[Kind]
    derivative: str | None
    adjoint: str
    neutral: Callable[[torch.dtype], object]
    reference: Callable[[torch.Tensor], torch.Tensor]
    pairs: bool = False

    @property
    def name(self) -> str:
        """Name of the reduction."""
        return self.op.name

    @property
    def value(self) -> int:
        """The integer that stands for the reduction in the communicator family."""
        return int(self.op)

    @property
    def differentiable(self) -> bool:
        """Whether the reduction has a gradient."""
        return self.derivative is not None

    @property
    def dtypes(self) -> str:
        """The kinds of element as the reference page prints them."""
        return ", ".join(kind.value for kind in Kind if kind in self.kinds)


def _lowest(dtype: torch.dtype) -> object:
    if dtype == torch.bool:
        return False
    return -float("inf") if dtype.is_floating_point else torch.iinfo(dtype).min


def _highest(dtype: torch.dtype) -> object:
    if dtype == torch.bool:
        return True
    return float("inf") if dtype.is_floating_point else torch.iinfo(dtype).max


def _zero(dtype: torch.dtype) -> object:
    return False if dtype == torch.bool else 0


def _one(dtype: torch.dtype) -> object:
    return True if dtype == torch.bool else 1


def _all_bits(dtype: torch.dtype) -> object:
    if dtype == torch.bool:
        return True
    return torch.iinfo(dtype).max if torch.iinfo(dtype).min == 0 else -1


_HALVES = (torch.float16, torch.bfloat16)
_WIDE_UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)


def _rows(stacked: torch.Tensor, combine: Callable) -> torch.Tensor:
    result = stacked[0]
    for row in stacked[1:]:
        result = combine(result, row)
    return result.clone()


def _widened(stacked: torch.Tensor, reduce: Callable) -> torch.Tensor:
    """Reduce 16-bit floats in float32, in rank order, and round once."""
    if stacked.dtype in _HALVES:
        return reduce(stacked.float()).to(stacked.dtype)
    return reduce(stacked)


def _signed(reduce: Callable) -> Callable:
    """Let torch reduce the unsigned integers for which it has no kernels, as int64 bits."""

    def wrapped(stacked: torch.Tensor) -> torch.Tensor:
        if stacked.dtype in _WIDE_UNSIGNED:
            return reduce(stacked.to(torch.int64)).to(stacked.dtype)
        return reduce(stacked)

    return wrapped


def _ordered(reduce: Callable) -> Callable:
    """Let torch compare the unsigned integers for which it has no kernels."""

    def wrapped(stacked: torch.Tensor) -> torch.Tensor:
        if stacked.dtype == torch.uint64:  # flip the top bit: order of uint64 as order of int64
            flip = torch.iinfo(torch.int64).min
            return (reduce(stacked.view(torch.int64) ^ flip) ^ flip).view(torch.uint64)
        return _signed(reduce)(stacked)

    return wrapped


def _max(stacked: torch.Tensor) -> torch.Tensor:
    return stacked.any(0) if stacked.dtype == torch.bool else stacked.amax(0)


def _min(stacked: torch.Tensor) -> torch.Tensor:
    return stacked.all(0) if stacked.dtype == torch.bool else stacked.amin(0)


def _sum(stacked: torch.Tensor) -> torch.Tensor:
    if stacked.dtype == torch.bool:
        return stacked.any(0)
    return _widened(stacked, _signed(lambda rows: _rows(rows, torch.add)))


def _prod(stacked: torch.Tensor) -> torch.Tensor:
    if stacked.dtype == torch.bool:
        return stacked.all(0)
    return _widened(stacked, _signed(lambda rows: _rows(rows, torch.mul)))


def _avg(stacked: torch.Tensor) -> torch.Tensor:
    return _widened(stacked, lambda rows: _rows(rows, torch.add) / rows.shape[0])


def _logical(combine: Callable) -> Callable:
    return lambda stacked: _rows(stacked != 0, combine).to(stacked.dtype)


def _bitwise(combine: Callable) -> Callable:
    return _signed(lambda stacked: _rows(stacked, combine))


def _located(largest: bool) -> Callable:
    def reference(stacked: torch.Tensor) -> torch.Tensor:
        value, index = stacked[0, ..., 0], stacked[0, ..., 1]
        for row in stacked[1:]:
            other, position = row[..., 0], row[..., 1]
            better = (other > value) if largest else (other < value)
            better = better | (torch.isnan(other) & ~torch.isnan(value))
            better = better & ~(torch.isnan(value) & ~torch.isnan(other))
            tied = (other == value) | (torch.isnan(other) & torch.isnan(value))
            better = better | (tied & (position < index))
            value, index = torch.where(better, other, value), torch.where(better, position, index)
        return torch.stack([value, index.detach()], -1)  # only the value has a gradient

    return reference


_REAL = frozenset({Kind.INTEGER, Kind.HALF, Kind.FLOAT})
_ORDERED = _REAL | {Kind.BOOL}
_ANY = _ORDERED | {Kind.COMPLEX}
_INEXACT = frozenset({Kind.HALF, Kind.FLOAT, Kind.COMPLEX})
_BITS = frozenset({Kind.BOOL, Kind.INTEGER})
_WINNER = "G · 1[x_r = y] / (number of ranks with x_s = y)"
_NONE = "none: RuntimeError in forward if the input requires grad"

_TABLE = (
    Reduction(
        ReduceOp.MAX, "MPI_MAX", _ORDERED, "winner", _WINNER, _lowest, _ordered(_max),
    ),
    Reduction(
        ReduceOp.MIN, "MPI_MIN", _ORDERED, "winner", _WINNER, _highest, _ordered(_min),
    ),
    Reduction(ReduceOp.SUM, "MPI_SUM", _ANY, "linear", "G", _zero, _sum),
    Reduction(
        ReduceOp.PROD, "MPI_PROD", _ANY, "product",
        "G · conj(Π_{s≠r} x_s), exact also where factors are zero", _one, _prod,
    ),
    Reduction(ReduceOp.LAND, "MPI_LAND", _ANY, None, _NONE, _one, _logical(torch.logical_and)),
    Reduction(
        ReduceOp.BAND, "MPI_BAND", _BITS, None, _NONE, _all_bits, _bitwise(torch.bitwise_and)
    ),
    Reduction(ReduceOp.LOR, "MPI_LOR", _ANY, None, _NONE, _zero, _logical(torch.logical_or)),
    Reduction(ReduceOp.BOR, "MPI_BOR", _BITS, None, _NONE, _zero, _bitwise(torch.bitwise_or)),
    Reduction(ReduceOp.LXOR, "MPI_LXOR", _ANY, None, _NONE, _zero, _logical(torch.logical_xor)),
    Reduction(ReduceOp.BXOR, "MPI_BXOR", _BITS, None, _NONE, _zero, _bitwise(torch.bitwise_xor)),
    Reduction(
        ReduceOp.MINLOC, "MPI_MINLOC", _REAL, "winner",
        "the value's gradient goes to the winner, ties to the lowest index", _highest,
        _ordered(_located(False)), pairs=True,
    ),
    Reduction(
        ReduceOp.MAXLOC, "MPI_MAXLOC", _REAL, "winner",
        "the value's gradient goes to the winner, ties to the lowest index", _lowest,
        _ordered(_located(True)), pairs=True,
    ),
    Reduction(ReduceOp.AVG, None, _INEXACT, "linear", "G / W", _zero, _avg),
)  # fmt: skip

#: The table of reductions, by :class:`ReduceOp`.
REDUCTIONS: dict[ReduceOp, Reduction] = {row.op: row for row in _TABLE}
