"""What only the ranks together can know: sizes, shapes, dtypes. The verdict is the same everywhere.

Every rank gives one row of integers, every rank gets all rows and judges them alike: either all
go on, with the sizes of all ranks, or all raise.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from ._core import collectives, mpi
from .staging import code_of, name_of, plan_for

__all__ = ["Row", "exchange_rows", "require_alike", "shape_text"]

_INLINE = 8  # dimensions that travel with the row; longer shapes follow in a second round


class Row(NamedTuple):
    """What one rank says of its tensor."""

    dtype: int
    ndim: int
    wants_grad: int
    staged: int
    numbers: tuple[int, ...]
    shape: tuple[int, ...]


def exchange_rows(
    comm: mpi.Comm, channel: int, tensor: torch.Tensor, numbers: Sequence[int]
) -> list[Row]:
    """Give this rank's row; return those of all ranks, in rank order."""
    shape = tuple(tensor.shape)
    wants = tensor.requires_grad and torch.is_grad_enabled()
    head = (
        code_of(tensor.dtype),
        len(shape),
        int(wants),
        int(not plan_for(tensor.device).direct),
        *numbers,
    )
    n = len(head)
    inline = (*shape[:_INLINE], *(0,) * (_INLINE - len(shape)))
    rows = collectives.agree(comm, channel, (*head, *inline))
    longest = max(row[1] for row in rows)
    tails: Sequence[tuple[int, ...]] = [()] * len(rows)
    if longest > _INLINE:  # known to all
        tail = shape[_INLINE:]
        tails = collectives.agree(comm, channel, (*tail, *(0,) * (longest - _INLINE - len(tail))))
    return [
        Row(row[0], row[1], row[2], row[3], row[4:n], (row[n:] + tuple(tail))[: row[1]])
        for row, tail in zip(rows, tails, strict=True)
    ]


def shape_text(rows: Sequence[Row]) -> str:
    """All ranks' shapes, for a message."""
    return ", ".join(f"rank {r}: {row.shape}" for r, row in enumerate(rows))


def require_alike(
    call: str,
    comm: mpi.Comm,
    rows: Sequence[Row],
    names: Sequence[str],
    free: Sequence[int] = (),
) -> None:
    """Raise on every rank unless the ranks agree on dtype, shape and the numbers called `names`.

    The sizes along the axes `free` may differ.
    """
    where = f"{call} on rank {comm.rank} of {comm.size}"
    if len({row.dtype for row in rows}) > 1:
        kinds = ", ".join(f"rank {r}: {name_of(row.dtype)}" for r, row in enumerate(rows))
        raise TypeError(f"{where}: the ranks' tensors differ in dtype ({kinds})")
    for i, name in enumerate(names):
        if len({row.numbers[i] for row in rows}) > 1:
            values = ", ".join(f"rank {r}: {row.numbers[i]}" for r, row in enumerate(rows))
            raise ValueError(f"{where}: the ranks disagree on {name} ({values})")
    fixed = {(row.ndim, *(n for i, n in enumerate(row.shape) if i not in free)) for row in rows}
    if len(fixed) > 1:
        along = " except along axis " + " and ".join(map(str, free)) if free else ""
        raise ValueError(f"{where}: the ranks' shapes must be equal{along} ({shape_text(rows)})")
