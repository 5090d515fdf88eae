"""What only the ranks together can know: sizes, shapes, dtypes. The verdict is the same everywhere.

Every rank gives one row of integers, every rank gets all rows and judges them alike: either all
go on, with the sizes of all ranks, or all raise.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from . import watch
from ._core import collectives, mpi
from .dispatch import USER
from .staging import code_of, name_of, plan_for

__all__ = [
    "Row",
    "agree",
    "agree_lists",
    "broadcast",
    "exchange_rows",
    "require_alike",
    "require_number",
    "require_sum",
    "shape_text",
    "swap",
]

_INLINE = 8  # dimensions that travel with the row; longer shapes follow in a second round


class Row(NamedTuple):
    """What one rank says of its tensor."""

    dtype: int
    wants_grad: int
    staged: int
    numbers: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def ndim(self) -> int:
        return len(self.shape)


def exchange_rows(
    call: str, comm: mpi.Comm, channel: int, tensor: torch.Tensor, numbers: Sequence[int]
) -> list[Row]:
    """Give this rank's row; return those of all ranks, in rank order."""
    shape = tuple(tensor.shape)
    wants = tensor.requires_grad and torch.is_grad_enabled()
    staged = not plan_for(tensor.device).direct
    head = (code_of(tensor.dtype), int(wants), int(staged), *numbers)
    n = len(head)
    if watch.on:
        told = watch.agree(comm, call, (*head, *shape))
        if told is not None:
            rows = [None if row is None else _row(row[:n], row[n:]) for row in told]
            return watch.complete(comm, call, rows)
    return [_row(*row) for row in agree_lists(comm, channel, head, shape, _INLINE)]


def _row(head: tuple[int, ...], shape: tuple[int, ...]) -> Row:
    return Row(head[0], head[1], head[2], head[3:], shape)


def agree_lists(
    comm: mpi.Comm, channel: int, head: Sequence[int], numbers: Sequence[int], inline: int
) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """The `head` of every rank, equally long on all, and its `numbers`, as many as it gives.

    `inline` numbers travel with the head; if a rank has more, a second round follows.
    """

    def part(start: int, size: int) -> tuple[int, ...]:
        mine = tuple(numbers[start : start + size])
        return (*mine, *(0,) * (size - len(mine)))

    n = len(head) + 1
    rows = collectives.agree(comm, channel, (len(numbers), *head, *part(0, inline)))
    longest = max(row[0] for row in rows)
    tails: Sequence[tuple[int, ...]] = [()] * comm.size
    if longest > inline:  # known to all
        tails = collectives.agree(comm, channel, part(inline, longest - inline))
    return [(row[1:n], (row[n:] + tail)[: row[0]]) for row, tail in zip(rows, tails, strict=True)]


def agree(
    call: str, comm: mpi.Comm, numbers: tuple[int, ...], absent: tuple[int, ...]
) -> Sequence[tuple[int, ...]]:
    """The `numbers` of all ranks; `absent` for those that have left a Join."""
    if watch.on:
        told = watch.agree(comm, call, numbers)
        if told is not None:
            return [absent if row is None else row for row in told]
    return collectives.agree(comm, USER, numbers)


def broadcast(call: str, comm: mpi.Comm, numbers: tuple[int, ...], root: int) -> tuple[int, ...]:
    """The root's `numbers`; all ranks give equally many. The root has not left a Join."""
    if watch.on:
        told = watch.agree(comm, call, numbers)
        if told is not None:
            row = told[root]
            assert row is not None
            return row
    return collectives.broadcast(comm, USER, numbers, root)


def swap(call: str, comm: mpi.Comm, sends: Sequence[int], receives: Sequence[int]) -> Sequence[int]:
    """What every rank means to send to this one."""
    if watch.on:
        told = watch.agree(comm, call, (*sends, *receives))
        if told is not None:
            for absent in (r for r, row in enumerate(told) if row is None):
                for r, row in enumerate(told):
                    if row is not None and (row[absent] or row[comm.size + absent]):
                        watch.refuse(
                            comm,
                            call,
                            f"rank {r} sends {row[absent]} elements to rank {absent} and expects "
                            f"{row[comm.size + absent]} of it, which has run out of inputs",
                        )
            return [0 if row is None else row[comm.rank] for row in told]
    return collectives.swap(comm, USER, sends)


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


def require_number(call: str, comm: mpi.Comm, rows: Sequence[Row], i: int, name: str) -> None:
    """Raise on every rank unless the number with index `i`, called `name`, is the same on all."""
    if len({row.numbers[i] for row in rows}) > 1:
        values = ", ".join(f"rank {r}: {row.numbers[i]}" for r, row in enumerate(rows))
        raise ValueError(
            f"{call} on rank {comm.rank} of {comm.size}: the ranks disagree on {name} ({values})"
        )


def require_sum(call: str, comm: mpi.Comm, parts: Sequence[int], size: int, axis: int) -> None:
    """Raise on every rank unless the ranks' `parts` are all of an axis of `size`."""
    if sum(parts) != size:
        values = ", ".join(f"rank {r}: {n}" for r, n in enumerate(parts))
        raise ValueError(
            f"{call} on rank {comm.rank} of {comm.size}: numelem adds up to {sum(parts)} over all "
            f"ranks ({values}), but the tensor has size {size} along axis {axis}; the numelem of "
            f"all ranks must sum to {size}"
        )
