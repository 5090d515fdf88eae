"""The collectives: arguments, shapes, adjoint and a reference in plain torch, one row each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from .reductions import REDUCTIONS, ReduceOp

__all__ = ["OPERATIONS", "Operation"]

Tensors = Sequence[torch.Tensor]


@dataclass(frozen=True)
class Operation:
    """One row of the table of operations.

    Attributes
    ----------
    name
        Name of the out-of-place method of the communicator.
    mpi
        The MPI function behind it.
    section
        Where the MPI standard (version 4.1) describes it.
    summary
        One line that says what it does.
    arguments
        The method's argument names after the tensor, in order.
    pattern
        ``"elementwise"``: the result has the input's shape on every rank;
        ``"blocks"``: blocks of one axis travel between ranks, and their sizes may differ.
    counts_at
        Which ranks' tensors carry data: ``"all"`` or ``"root"``.
    result_at
        Which ranks get the result: ``"all"`` or ``"root"``.
    dual
        The row that is its adjoint, with the reduction SUM, the gather and scatter roles of
        the axes exchanged and, for prefix reductions, the rank order reversed.
    adjoint
        The adjoint as the reference page prints it (``g`` the gradients of the results).
    reference
        ``reference(tensors, **arguments)``: every rank's result from every rank's tensor, with
        plain torch, differentiable. ``numelem`` is then the list of all ranks' values.
    functional
        Name of the function of ``mpicoll.nn.functional`` built on it, if any.
    reductions
        The reductions it takes a gradient of; empty when it does not reduce.
    """

    name: str
    mpi: str
    section: str
    summary: str
    arguments: tuple[str, ...]
    pattern: str
    counts_at: str
    result_at: str
    dual: str
    adjoint: str
    reference: Callable[..., list[torch.Tensor]]
    functional: str | None = None
    reductions: tuple[ReduceOp, ...] = ()

    @property
    def reduces(self) -> bool:
        """Whether the operation takes a reduction."""
        return "op" in self.arguments

    @property
    def inplace(self) -> bool:
        """Whether a twin with a trailing underscore works in the caller's tensor."""
        return self.name in ("Bcast", "Reduce")

    @property
    def prefix(self) -> bool:
        """Whether rank r's result depends on the ranks up to r."""
        return self.name in ("Scan", "Exscan")


def _reduce(tensors: Tensors, op: ReduceOp) -> torch.Tensor:
    return REDUCTIONS[op].reference(torch.stack(list(tensors)))


def _allreduce(tensors: Tensors, op: ReduceOp) -> list[torch.Tensor]:
    result = _reduce(tensors, op)
    return [result for _ in tensors]


def _reduce_to_root(tensors: Tensors, op: ReduceOp, root: int) -> list[torch.Tensor]:
    result = _reduce(tensors, op)
    return [result if r == root else torch.zeros_like(x) for r, x in enumerate(tensors)]


def _bcast(tensors: Tensors, root: int) -> list[torch.Tensor]:
    return [tensors[root].clone() for _ in tensors]


def _allgather(tensors: Tensors, gatheraxis: int) -> list[torch.Tensor]:
    return [torch.cat(list(tensors), gatheraxis) for _ in tensors]


def _gather(tensors: Tensors, gatheraxis: int, root: int) -> list[torch.Tensor]:
    whole = torch.cat(list(tensors), gatheraxis)
    return [
        whole if r == root else x.narrow(gatheraxis, 0, 0).clone() for r, x in enumerate(tensors)
    ]


def _scatter(
    tensors: Tensors, scatteraxis: int, numelem: Sequence[int], root: int
) -> list[torch.Tensor]:
    return [part.clone() for part in tensors[root].split(list(numelem), scatteraxis)]


def _reduce_scatter(
    tensors: Tensors, scatteraxis: int, numelem: Sequence[int], op: ReduceOp
) -> list[torch.Tensor]:
    return [part.clone() for part in _reduce(tensors, op).split(list(numelem), scatteraxis)]


def _alltoall(
    tensors: Tensors, gatheraxis: int, scatteraxis: int, numelem: Sequence[int]
) -> list[torch.Tensor]:
    whole = torch.cat(list(tensors), gatheraxis)
    return [part.clone() for part in whole.split(list(numelem), scatteraxis)]


def _scan(tensors: Tensors, op: ReduceOp) -> list[torch.Tensor]:
    return [_reduce(tensors[: r + 1], op) for r in range(len(tensors))]


def _exscan(tensors: Tensors, op: ReduceOp) -> list[torch.Tensor]:
    row, dtype = REDUCTIONS[op], tensors[0].dtype
    first = torch.tensor(row.neutral(dtype), dtype=dtype).expand(tensors[0].shape).clone()
    if row.pairs:  # an index that loses every tie
        first[..., 1] = torch.tensor(REDUCTIONS[ReduceOp.MIN].neutral(dtype), dtype=dtype)
    return [_reduce(tensors[:r], op) if r else first for r in range(len(tensors))]


_DIFFERENTIABLE = tuple(op for op, row in REDUCTIONS.items() if row.differentiable)
_LINEAR = (ReduceOp.SUM,)

_TABLE = (
    Operation(
        name="Allreduce", mpi="MPI_Allreduce", section="6.9.6",
        summary="Combines the tensors of all ranks; every rank gets the result.",
        arguments=("op",), pattern="elementwise", counts_at="all", result_at="all",
        dual="Allreduce", adjoint="SUM: dx_r = Σ_s g_s",
        reference=_allreduce, functional="all_reduce", reductions=_DIFFERENTIABLE,
    ),
    Operation(
        name="Bcast", mpi="MPI_Bcast", section="6.4",
        summary="Copies the root's tensor to every rank.",
        arguments=("root",), pattern="elementwise", counts_at="root", result_at="all",
        dual="Reduce", adjoint="dx_root = Σ_s g_s, zeros elsewhere",
        reference=_bcast, functional="broadcast",
    ),
    Operation(
        name="Reduce", mpi="MPI_Reduce", section="6.9.1",
        summary="Combines the tensors of all ranks on the root; zeros elsewhere.",
        arguments=("op", "root"), pattern="elementwise", counts_at="all", result_at="root",
        dual="Bcast", adjoint="SUM: dx_r = g_root",
        reference=_reduce_to_root, functional="reduce", reductions=_DIFFERENTIABLE,
    ),
    Operation(
        name="Gather", mpi="MPI_Gatherv", section="6.5",
        summary="Concatenates the tensors of all ranks on the root.",
        arguments=("gatheraxis", "root"), pattern="blocks", counts_at="all", result_at="root",
        dual="Scatter", adjoint="dx_r = rank r's block of g_root",
        reference=_gather, functional="gather",
    ),
    Operation(
        name="Allgather", mpi="MPI_Allgatherv", section="6.7",
        summary="Concatenates the tensors of all ranks on every rank.",
        arguments=("gatheraxis",), pattern="blocks", counts_at="all", result_at="all",
        dual="Reduce_scatter", adjoint="dx_r = Σ_s (rank r's block of g_s)",
        reference=_allgather, functional="all_gather",
    ),
    Operation(
        name="Scatter", mpi="MPI_Scatterv", section="6.6",
        summary="Cuts the root's tensor along an axis and hands out the pieces.",
        arguments=("scatteraxis", "numelem", "root"), pattern="blocks", counts_at="root",
        result_at="all", dual="Gather",
        adjoint="dx_root = concatenation of all g_s, zeros shaped like the placeholder elsewhere",
        reference=_scatter, functional="scatter",
    ),
    Operation(
        name="Reduce_scatter", mpi="MPI_Reduce_scatter", section="6.10",
        summary="Combines the tensors of all ranks and hands out the pieces.",
        arguments=("scatteraxis", "numelem", "op"), pattern="blocks", counts_at="all",
        result_at="all", dual="Allgather", adjoint="SUM: dx_r = concatenation of all g_s",
        reference=_reduce_scatter, functional="reduce_scatter", reductions=_DIFFERENTIABLE,
    ),
    Operation(
        name="Alltoall", mpi="MPI_Alltoallv", section="6.8",
        summary="Gathers along one axis and scatters along another (or the same), in one exchange.",
        arguments=("gatheraxis", "scatteraxis", "numelem"), pattern="blocks", counts_at="all",
        result_at="all", dual="Alltoall", adjoint="Alltoall with the axes exchanged",
        reference=_alltoall, functional="all_to_all_single",
    ),
    Operation(
        name="Scan", mpi="MPI_Scan", section="6.11.1",
        summary="Combines the tensors of the ranks up to and including this one.",
        arguments=("op",), pattern="elementwise", counts_at="all", result_at="all",
        dual="Scan", adjoint="SUM: dx_r = Σ_{s≥r} g_s",
        reference=_scan, reductions=_LINEAR,
    ),
    Operation(
        name="Exscan", mpi="MPI_Exscan", section="6.11.2",
        summary="Combines the tensors of the ranks before this one; rank 0: the neutral element.",
        arguments=("op",), pattern="elementwise", counts_at="all", result_at="all",
        dual="Exscan", adjoint="SUM: dx_r = Σ_{s>r} g_s",
        reference=_exscan, reductions=_LINEAR,
    ),
)  # fmt: skip

#: The table of operations, by name.
OPERATIONS: dict[str, Operation] = {row.name: row for row in _TABLE}
