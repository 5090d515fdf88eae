"""How a rank that has run out of inputs answers the collectives of the others.

The active ranks describe every collective in a round of the control protocol; the others take
part in it with the neutral element, and drop what they receive.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from .. import dispatch, watch
from .._core import collectives, mpi
from ..autograd.exchange import move
from ..dispatch import BACKWARD, USER, Call
from ..errors import CollectiveMismatchError
from ..negotiate import Row
from ..ops import OPERATIONS, REDUCTIONS, Operation, ReduceOp
from ..staging import code_of, name_of, plan_for, widened
from .joinable import JoinHook
from .rounds import Kind, Said, to_text

if TYPE_CHECKING:
    from .session import Session

__all__ = ["CommunicatorHook", "carry_out", "check", "mismatch", "run", "sizes", "with_absent"]

_ROWS: list[Operation] = list(OPERATIONS.values())


class _Told(NamedTuple):
    """A collective as a rank describes it."""

    name: int
    channel: int
    op: int
    root: int
    reverse: int
    gatheraxis: int
    scatteraxis: int
    dtype: int
    staged: int
    largest: int
    longest: int
    divisor: int
    shape: tuple[int, ...]
    whole: tuple[int, ...]
    whole_dtype: int
    gathered: tuple[int, ...]
    scattered: tuple[int, ...]
    sends: tuple[int, ...]
    receives: tuple[int, ...]

    @property
    def operation(self) -> Operation:
        return _ROWS[self.name]

    @property
    def reduction(self) -> ReduceOp | None:
        return None if self.op < 0 else ReduceOp(self.op)

    def __str__(self) -> str:
        of = "" if self.op < 0 else f" of {ReduceOp(self.op).name}"
        root = "" if self.root < 0 else f", root {self.root}"
        way = " (backward)" if self.channel == BACKWARD else ""
        return f"{self.operation.name}{of}{way}, {name_of(self.dtype)}, shape {self.shape}{root}"


_FIXED = 12


def _describe(call: Call, tensor: torch.Tensor, divisor: int) -> tuple[int, ...]:
    sends, receives = call.splits or ((), ())
    lists = (
        tuple(tensor.shape), tuple(call.shape), call.gathered, call.scattered, sends, receives,
    )  # fmt: skip
    return (
        _ROWS.index(call.operation),
        call.channel,
        -1 if call.op is None else int(call.op),
        call.root,
        int(call.reverse),
        call.gatheraxis,
        call.scatteraxis,
        code_of(tensor.dtype),
        int(call.staged or not plan_for(tensor.device).direct),
        call.largest,
        call.longest,
        divisor,
        -1 if call.dtype is None else code_of(call.dtype),
        *(len(numbers) for numbers in lists),
        *(n for numbers in lists for n in numbers),
    )


def _understand(numbers: tuple[int, ...]) -> _Told:
    at = _FIXED + 7
    lists = []
    for n in numbers[_FIXED + 1 : at]:
        lists.append(numbers[at : at + n])
        at += n
    fields: list[Any] = [*numbers[:_FIXED], *lists[:2], numbers[_FIXED], *lists[2:]]
    return _Told(*fields)


def _alike(told: _Told) -> tuple[Any, ...]:
    """What the active ranks must have in common."""
    name = told.operation.name
    shape: tuple[int, ...] = told.shape
    dtype = told.dtype
    if name == "Scatter":  # only the root's tensor counts
        shape, dtype = (), -1
    elif told.sends:
        shape = shape[1:]
    elif told.gatheraxis >= 0:
        axis = told.gatheraxis
        shape = (*shape[:axis], -1, *shape[axis + 1 :])
    # A tensor that is to be filled may have another shape on every rank.
    whole = told.whole if name == "Scatter" else ()
    return told._replace(staged=0, shape=shape, dtype=dtype, whole=whole, sends=(), receives=())


def mismatch(said: Sequence[Said]) -> str:
    """What the ranks called where it was not the same."""
    words = [f"rank {r}: {_words(row)}" for r, row in enumerate(said)]
    return "Join: the ranks do not do the same: " + "; ".join(words)


def _words(said: Said) -> str:
    kind, numbers = Kind(said.kind), said.numbers
    if kind is Kind.COLLECTIVE:
        return str(_understand(numbers))
    if kind is Kind.CALL:
        return to_text(numbers)
    if kind is Kind.NUMBERS:
        return to_text(numbers[1 : 1 + numbers[0]])
    if kind is Kind.MEMBER:
        return f"{to_text(numbers[1:])} of joinables[{numbers[0]}]"
    return {
        Kind.ENTER: "enters a Join context",
        Kind.ITERATION: "starts an iteration",
        Kind.JOINED: "has run out of inputs",
        Kind.EXCHANGE: "all_to_all or scatter of tensors",
        Kind.BARRIER: "Barrier",
        Kind.DONE: "leaves the context",
    }.get(kind, kind.name)


def check(session: Session) -> None:
    """Raise on all ranks unless what the active ranks are about to do can be shadowed."""
    active = [r for r, row in enumerate(session.said) if row.kind != Kind.JOINED]
    absent = [r for r in range(session.comm.size) if r not in active]
    said = [session.said[r] for r in active]
    if said[0].kind == Kind.EXCHANGE:
        if len({row.numbers[0] for row in said}) > 1:
            session.end(CollectiveMismatchError(mismatch(session.said)))
        return  # sizes have been agreed on, and refused, before
    if said[0].kind != Kind.COLLECTIVE:
        return
    calls = [_understand(row.numbers) for row in said]
    if len({_alike(told) for told in calls}) > 1:
        session.end(CollectiveMismatchError(mismatch(session.said)))
    first = calls[0]
    if first.channel != USER:
        return  # gradients of ranks that have left are zero
    name, why = first.operation.name, ""
    if name in ("Bcast", "Scatter") and first.root in absent:
        why = f"its root, rank {first.root}, has run out of inputs"
    for r, told in zip(active, calls, strict=True):
        for s in absent if told.sends else ():
            if told.sends[s] or told.receives[s]:
                why = (
                    f"rank {r} sends {told.sends[s]} rows to rank {s} and expects "
                    f"{told.receives[s]} of it, which has run out of inputs"
                )
    if why:
        session.end(RuntimeError(f"Join: {name} cannot be shadowed: {why}"))


# ---------------------------------------------------------------- on the active ranks


def run(
    session: Session,
    call: Call,
    tensors: Sequence[torch.Tensor],
    perform: Callable[..., torch.Tensor],
) -> torch.Tensor:
    """A collective of this rank, announced to the ranks that answer it by themselves."""
    size = session.comm.size
    averages = call.op is ReduceOp.AVG
    divisor = call.divisor or (size if session.by_all and averages else 0)
    session.round(Kind.COLLECTIVE, _describe(call, tensors[0], divisor))
    session.iterations += 1
    check(session)
    call.staged = _stages(session.said)
    call.present = session.taking_part()
    if averages:
        call.divisor = divisor or len(call.present or range(size))
    return carry_out(call, tensors, perform)


def _stages(said: Sequence[Said]) -> bool:
    """Whether any rank stages, so that all take the same pieces."""
    return any(_understand(row.numbers).staged for row in said if row.kind == Kind.COLLECTIVE)


def carry_out(
    call: Call, tensors: Sequence[torch.Tensor], perform: Callable[..., torch.Tensor]
) -> torch.Tensor:
    """Carry out `call`; an average over some ranks only is a sum that is divided afterwards."""
    if call.op is not ReduceOp.AVG or call.divisor in (0, call.comm.size):
        return perform(call, tensors)
    source = tensors[0].detach()
    plain = call.replace(op=ReduceOp.SUM, inplace=False, output=False)
    summed = perform(plain, (widened(source),))  # rounded once
    parts = torch.view_as_real(summed) if summed.is_complex() else summed
    parts /= call.divisor  # real and imaginary parts each, as the core does
    result = summed.to(source.dtype)
    if not call.inplace and not call.output:
        return result
    target = tensors[0 if call.inplace else -1].detach()
    return target.copy_(result.view(target.shape))


def sizes(sends: Sequence[torch.Tensor], receives: Sequence[torch.Tensor]) -> tuple[int, ...]:
    """An exchange of lists, described."""
    counts = (t.numel() for t in (*sends, *receives))
    return (code_of(receives[0].dtype), *counts)


# ---------------------------------------------------------------- on the others


class CommunicatorHook(JoinHook):
    """Answers whatever collective the active ranks have announced."""

    def __init__(self, session: Session) -> None:
        self.session = session

    def main_hook(self) -> None:
        """Take part with the neutral element."""
        session = self.session
        said = {r: row for r, row in enumerate(session.said) if row.kind != Kind.JOINED}
        kind = next(iter(said.values())).kind
        session.serving = True
        try:
            with torch.no_grad():
                if kind == Kind.BARRIER:
                    comm = session.comm
                    watch.barrier(comm, lambda: collectives.barrier(comm))
                elif kind == Kind.EXCHANGE:
                    _answer_exchange(session, {r: row.numbers for r, row in said.items()})
                else:
                    _answer(session, {r: _understand(row.numbers) for r, row in said.items()})
        finally:
            session.serving = False


def _neutral(shape: Sequence[int], dtype: torch.dtype, op: ReduceOp) -> torch.Tensor:
    row = REDUCTIONS[op]
    filled = torch.tensor(row.neutral(dtype), dtype=dtype).expand(tuple(shape)).clone()
    if row.pairs:  # an index that loses every tie
        last = REDUCTIONS[ReduceOp.MIN].neutral(dtype)
        filled[..., 1] = torch.tensor(last, dtype=dtype)
    return filled


def _answer(session: Session, calls: dict[int, _Told]) -> None:
    comm = session.comm
    first = next(iter(calls.values()))
    row, op, dtype = first.operation, first.reduction, name_of(first.dtype)
    if first.whole_dtype >= 0:  # off the root there may be a placeholder of any dtype
        dtype = name_of(first.whole_dtype)
    assert dtype is not None
    call = Call(
        row,
        comm,
        channel=first.channel,
        op=op,
        root=first.root,
        reverse=bool(first.reverse),
        gatheraxis=first.gatheraxis,
        scatteraxis=first.scatteraxis,
        gathered=first.gathered,
        scattered=first.scattered,
        staged=_stages(session.said),
        largest=first.largest,
        longest=first.longest,
        divisor=first.divisor or len(calls),
        dtype=dtype,
        shape=first.whole,
    )
    shape = list(first.shape)
    if row.name == "Scatter":
        shape = list(first.whole) if comm.rank == first.root else [0]
    elif first.sends:
        sends = [calls[s].receives[comm.rank] if s in calls else 0 for s in range(comm.size)]
        receives = [calls[s].sends[comm.rank] if s in calls else 0 for s in range(comm.size)]
        call.splits = sends, receives
        shape[0] = sum(sends)
    elif first.gatheraxis >= 0:
        shape[first.gatheraxis] = first.gathered[comm.rank]
    tensor = torch.zeros(shape, dtype=dtype) if op is None else _neutral(shape, dtype, op)
    dispatch.run(call, [tensor])


def _answer_exchange(session: Session, counts: dict[int, tuple[int, ...]]) -> None:
    comm = session.comm
    rank, size = comm.rank, comm.size
    dtype = name_of(next(iter(counts.values()))[0])

    def blocks(start: int) -> list[torch.Tensor]:
        numbers = [counts[s][1 + start + rank] if s in counts else 0 for s in range(size)]
        return [torch.zeros(n, dtype=dtype) for n in numbers]

    sends, receives = blocks(size), blocks(0)
    watch.exchange(comm, sends, receives, lambda: move(comm, sends, receives))


def with_absent(call: str, comm: mpi.Comm, rows: Sequence[Row | None]) -> list[Row]:
    """Fill in the ranks that have left a Join: they give nothing, and keep what nobody asks for."""
    absent = [r for r, row in enumerate(rows) if row is None]
    first = next(row for row in rows if row is not None)
    if call == "Scatter":
        source = rows[first.numbers[0]]
        if source is None:
            watch.refuse(comm, call, f"its root, rank {first.numbers[0]}, has run out of inputs")
            raise AssertionError("not reached")
        first, axis = source, source.numbers[1]
    else:
        axis = first.numbers[0]
    present = [row for row in rows if row is not None]
    shape = list(first.shape)
    if call in ("Gather", "Allgather", "Alltoall"):
        shape[axis] = 0
    shares: Sequence[int] = [0] * len(absent)
    if call not in ("Gather", "Allgather"):
        whole = first.shape[axis] if -first.ndim <= axis < first.ndim else 0
        if call == "Alltoall":
            gather, scatter = first.numbers[:2]
            same = gather == scatter
            whole = sum(r.shape[gather] for r in present) if same else first.shape[scatter]
        rest = whole - sum(row.numbers[2] for row in present)
        if call == "Alltoall" and absent and rest > 0:
            ranks = ", ".join(map(str, absent))
            watch.refuse(
                comm,
                call,
                f"{rest} of the {whole} elements along the scatteraxis are for ranks ({ranks}) "
                "that have run out of inputs",
            )
        # As a sequence is cut into nearly equal parts, the first ones longer.
        shares = [(max(rest, 0) + len(absent) - 1 - k) // len(absent) for k in range(len(absent))]
    filled = list(rows)
    for r, share in zip(absent, shares, strict=True):
        numbers = (*first.numbers[:2], share)[: len(first.numbers)]
        filled[r] = first._replace(wants_grad=0, numbers=numbers, shape=tuple(shape))
    return [row for row in filled if row is not None]
