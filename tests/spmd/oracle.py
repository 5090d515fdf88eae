"""All ranks in one process: what every rank's result, gradient and second derivative must be.

Plain torch and the table of operations; nothing here communicates. Every rank computes all ranks'
tensors from the same seeds, so each can check its own part.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from mpicoll.ops import OPERATIONS, REDUCTIONS, Kind, Operation, ReduceOp
from mpicoll.staging.dtypes import DTYPES

Tensors = list[torch.Tensor]

ALL_DTYPES = list(DTYPES)
GRADIENT_KINDS = (Kind.HALF, Kind.FLOAT, Kind.COMPLEX)
ARITHMETIC = (ReduceOp.SUM, ReduceOp.PROD, ReduceOp.AVG)


def dtypes_of(op: ReduceOp | None) -> list[torch.dtype]:
    """The dtypes that a reduction takes; all of them for an operation that only moves data."""
    return [d for d, (_, kind) in DTYPES.items() if op is None or kind in REDUCTIONS[op].kinds]


def reductions_of(row: Operation) -> list[ReduceOp | None]:
    """The reductions that an operation takes; ``[None]`` where it does not reduce."""
    if not row.reduces:
        return [None]
    return [op for op in REDUCTIONS if not (row.prefix and op is ReduceOp.AVG)]


def rounds(op: ReduceOp | None, dtype: torch.dtype) -> bool:
    """Whether the result depends on the order of the additions, which MPI chooses."""
    return op in ARITHMETIC and DTYPES[dtype][1] in (Kind.FLOAT, Kind.COMPLEX)


# ---------------------------------------------------------------- values


def values(shape: Sequence[int], dtype: torch.dtype, rank: int, salt: str = "") -> torch.Tensor:
    """Values that differ between elements and ranks; integers with their smallest and largest."""
    seed = zlib.crc32(f"{tuple(shape)} {dtype} {rank} {salt}".encode())
    generator = torch.Generator().manual_seed(seed)
    count = int(torch.tensor([*shape, 1]).prod())
    kind = DTYPES[dtype][1]
    if kind in (Kind.HALF, Kind.FLOAT):
        made = torch.rand(count, generator=generator, dtype=torch.float64) + 0.5
        made = (made * (-1) ** torch.arange(count)).to(dtype)
    elif kind is Kind.COMPLEX:
        parts = torch.rand(2, count, generator=generator, dtype=torch.float64) + 0.25
        made = torch.complex(parts[0], -parts[1]).to(dtype)
    else:
        size = dtype.itemsize
        data = torch.randint(0, 256, (count * size,), generator=generator, dtype=torch.uint8)
        made = data.view(_unit(dtype)) % 2 == 1 if dtype is torch.bool else data.view(dtype)
        if kind is Kind.INTEGER and count > 3:
            signed = torch.iinfo(dtype).min < 0  # set as bits: torch takes no large uint64
            width = 8 * dtype.itemsize
            least, most = (-(1 << (width - 1)), (1 << (width - 1)) - 1) if signed else (0, -1)
            if dtype is torch.uint8:
                most = 255
            bits(made)[(rank + 1) % count], bits(made)[(rank + 2) % count] = least, most
    return made.reshape(tuple(shape)).clone()


def troubled(x: torch.Tensor, rank: int, op: ReduceOp | None) -> torch.Tensor:
    """`x` with zeros, ties, infinities and NaN, where the reduction should meet them."""
    kind = DTYPES[x.dtype][1]
    x = x.clone()
    flat = x.view(-1)
    if flat.numel() < 10 or op is None or kind in (Kind.BOOL, Kind.OTHER):
        return x
    if op not in ARITHMETIC:
        flat[0] = 1  # alike on all ranks
        flat[2:6] = 0
        flat[3 + rank % 2] = 3
    if kind in (Kind.HALF, Kind.FLOAT) and op not in ARITHMETIC:
        flat[6] = float("nan") if rank == 1 else 1.0
        flat[7] = float("-inf") if rank == 0 else float("inf")
        flat[8] = float("nan") if rank == 0 else 2.0
    return x


def bits(x: torch.Tensor) -> torch.Tensor:
    """The elements of `x` as integers of the same size."""
    return x.view(_unit(x.dtype))


def _unit(dtype: torch.dtype) -> torch.dtype:
    if dtype is torch.int8:
        return dtype
    return {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]


# ---------------------------------------------------------------- comparing


def check_plain(got: torch.Tensor, want: torch.Tensor, what: str) -> None:
    """`got` has the shape and dtype of `want`, is contiguous and neither conjugated nor negated."""
    assert got.dtype == want.dtype, f"{what}: dtype {got.dtype}, not {want.dtype}"
    assert got.shape == want.shape, f"{what}: shape {tuple(got.shape)}, not {tuple(want.shape)}"
    assert got.is_contiguous(), f"{what}: not contiguous"
    assert not got.is_conj(), f"{what}: conjugate view"
    assert not got.is_neg(), f"{what}: negative view"


def image(x: torch.Tensor) -> bytes:
    """The memory of a contiguous tensor."""
    plain = x.detach().clone(memory_format=torch.contiguous_format)
    return plain.view(-1).view(torch.uint8).numpy().tobytes()


def check(got: torch.Tensor, want: torch.Tensor, what: str, exact: bool) -> None:
    """`got` equals `want`: bit for bit (any NaN for a NaN), or within torch's tolerances."""
    got, want = got.detach(), want.detach()
    assert got.dtype == want.dtype, f"{what}: dtype {got.dtype}, not {want.dtype}"
    assert got.shape == want.shape, f"{what}: shape {tuple(got.shape)}, not {tuple(want.shape)}"
    if not exact:
        torch.testing.assert_close(got, want, equal_nan=True, msg=lambda text: f"{what}: {text}")
        return
    got, want = got.resolve_conj().resolve_neg(), want.resolve_conj().resolve_neg()
    if DTYPES[got.dtype][1] in GRADIENT_KINDS and want.isnan().any():
        assert torch.equal(got.isnan(), want.isnan()), f"{what}: {got} has NaN where {want} has not"
        got, want = got.nan_to_num(), want.nan_to_num()
    assert image(got) == image(want), f"{what}: {got}, not {want}"


# ---------------------------------------------------------------- differentiating


def loss(y: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """A real number that every element of `y` has a part in."""
    total = (y * weights).sum()
    return total.real if total.is_complex() else total


def weights_for(y: torch.Tensor, rank: int, salt: str) -> torch.Tensor:
    return values(y.shape, y.dtype, rank, f"weights {salt}")


@dataclass
class Answers:
    """What every rank must get."""

    results: Tensors
    gradients: Tensors
    curvatures: Tensors


def simulate(
    function: Callable[[Tensors], Tensors],
    tensors: Sequence[torch.Tensor],
    salt: str = "",
    second: bool = True,
) -> Answers:
    """Results, gradients and Hessian-vector products of L = the sum of all ranks' losses."""
    xs = [x.detach().resolve_conj().resolve_neg().clone().requires_grad_() for x in tensors]
    ys = function(xs)
    total = sum(loss(y, weights_for(y, r, salt)) for r, y in enumerate(ys))
    if not total.requires_grad:  # an exclusive prefix of one rank
        zeros = [torch.zeros_like(x) for x in xs]
        return Answers(list(ys), zeros, zeros)
    gs = torch.autograd.grad(total, xs, create_graph=second, materialize_grads=True)
    hs = [torch.zeros_like(x) for x in xs]
    if second:
        slope = sum(loss(g, weights_for(g, r, f"direction {salt}")) for r, g in enumerate(gs))
        if slope.requires_grad:
            hs = torch.autograd.grad(slope, xs, materialize_grads=True)
    return Answers(list(ys), list(gs), list(hs))


def pull(
    function: Callable[[Tensors], Tensors],
    tensors: Sequence[torch.Tensor],
    gradients: Sequence[torch.Tensor],
) -> Tensors:
    """The gradients of all ranks' tensors, from those of all ranks' results."""
    xs = [x.detach().resolve_conj().resolve_neg().clone().requires_grad_() for x in tensors]
    pairs = [
        (y, g) for y, g in zip(function(xs), gradients, strict=True) if y.requires_grad
    ]  # an exclusive prefix of no ranks does not depend on anything
    if not pairs:
        return [torch.zeros_like(x) for x in xs]
    ys, gs = zip(*pairs, strict=True)
    return list(torch.autograd.grad(ys, xs, gs, materialize_grads=True))


def pull_short(
    by: Callable[[ReduceOp | None], Callable[[Tensors], Tensors]],
    op: ReduceOp | None,
    tensors: Sequence[torch.Tensor],
    gradients: Sequence[torch.Tensor],
    dtype: torch.dtype,
) -> Tensors:
    """:func:`pull` for tensors and gradients that were widened, rounded to `dtype` as documented.

    `by(op)` is the function with that reduction. PROD of 16-bit floats rounds three times: the
    sum of the gradients, the product of the other ranks' elements (both travel in 16 bits), and
    the product of the two.
    """
    if op is not ReduceOp.PROD or DTYPES[dtype][1] is not Kind.HALF:
        return [g.to(dtype) for g in pull(by(op), tensors, gradients)]
    ones = [torch.ones_like(g) for g in gradients]
    totals = pull(by(ReduceOp.SUM), tensors, gradients)
    results = pull(by(ReduceOp.SUM), tensors, ones)  # in how many an element has a part
    products = pull(by(op), tensors, ones)
    return [
        t.to(dtype) * (p / n).to(dtype) for t, p, n in zip(totals, products, results, strict=True)
    ]


def differentiate(
    function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, rank: int, salt: str = ""
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What :func:`simulate` computes, this rank's part, through the library."""
    x = x.detach().requires_grad_()
    y = function(x)
    (g,) = torch.autograd.grad(loss(y, weights_for(y, rank, salt)), x, create_graph=True)
    (h,) = torch.autograd.grad(loss(g, weights_for(g, rank, f"direction {salt}")), x)
    return y, g, h


def differentiate_lists(
    function: Callable[[Tensors], Sequence[torch.Tensor]],
    xs: Sequence[torch.Tensor],
    rank: int,
    salt: str = "",
) -> tuple[Tensors, Tensors, Tensors]:
    """:func:`differentiate` where every rank has the same number of tensors, and of results.

    :func:`simulate` then has them all in one list, rank by rank.
    """
    xs = [x.detach().requires_grad_() for x in xs]
    ys = list(function(xs))
    total = sum(loss(y, weights_for(y, rank * len(ys) + i, salt)) for i, y in enumerate(ys))
    gs = torch.autograd.grad(total, xs, create_graph=True)
    slope = sum(
        loss(g, weights_for(g, rank * len(xs) + i, f"direction {salt}")) for i, g in enumerate(gs)
    )
    hs = torch.autograd.grad(slope, xs)
    return ys, list(gs), list(hs)


def inner(x: torch.Tensor) -> torch.Tensor:
    """What happens before an operation: not linear, so that second derivatives mean something."""
    return x * x * 0.5 + x


def outer(y: torch.Tensor) -> torch.Tensor:
    """What happens after it."""
    return y * y + y


# ---------------------------------------------------------------- problems


@dataclass
class Problem:
    """One operation with arguments for all ranks."""

    row: Operation
    shapes: list[tuple[int, ...]]
    arguments: dict

    def __str__(self) -> str:
        shown = {k: v.name if isinstance(v, ReduceOp) else v for k, v in self.arguments.items()}
        return f"{self.row.name}{shown} of {self.shapes}"

    def mine(self, rank: int) -> dict:
        """The arguments as rank `rank` passes them to the method."""
        return {
            name: self.arguments[name][rank] if name == "numelem" else self.arguments[name]
            for name in self.row.arguments
        }

    def tensors(self, dtype: torch.dtype, salt: str = "") -> Tensors:
        return [values(shape, dtype, r, salt) for r, shape in enumerate(self.shapes)]

    def reference(self, tensors: Tensors) -> Tensors:
        return self.row.reference(tensors, **self.arguments)

    def call(self, comm, x: torch.Tensor, suffix: str = "") -> torch.Tensor:
        return getattr(comm, self.row.name + suffix)(x, **self.mine(comm.rank))


def uneven(size: int, start: int = 0) -> list[int]:
    """Different sizes for the ranks, one of them zero."""
    return [(2, 0, 3, 1)[(r + start) % 4] for r in range(size)]


def problem(
    name: str,
    size: int,
    op: ReduceOp | None = None,
    root: int = 0,
    gatheraxis: int = 0,
    scatteraxis: int = 1,
    shape: Sequence[int] = (4, 3, 2),
    old: Sequence[int] | None = None,
    new: Sequence[int] | None = None,
    placeholder: Sequence[int] = (2, 1),
) -> Problem:
    """Arguments that fit: blocks along the axes have the sizes `old` (gathered) and `new`."""
    row = OPERATIONS[name]
    old = list(uneven(size) if old is None else old)
    new = list(uneven(size, 1) if new is None else new)
    shapes = [list(shape) for _ in range(size)]
    arguments: dict = {}
    if "gatheraxis" in row.arguments:
        for r in range(size):
            shapes[r][gatheraxis] = old[r]
        arguments["gatheraxis"] = gatheraxis
    if "scatteraxis" in row.arguments:
        arguments["scatteraxis"] = scatteraxis
        same = "gatheraxis" in row.arguments and gatheraxis % len(shape) == scatteraxis % len(shape)
        if same:  # one axis is cut anew
            new = [*old[1:], old[0]]
        else:
            for r in range(size):
                shapes[r][scatteraxis] = sum(new)
        arguments["numelem"] = new
    if "op" in row.arguments:
        arguments["op"] = op
    if "root" in row.arguments:
        arguments["root"] = root
    if row.counts_at == "root" and row.pattern == "blocks":
        shapes = [s if r == root else list(placeholder) for r, s in enumerate(shapes)]
    return Problem(row, [tuple(s) for s in shapes], arguments)


# ---------------------------------------------------------------- layouts


def _strided_copy(x: torch.Tensor, strides: Sequence[int], extent: int, offset: int = 0):
    memory = torch.zeros(extent, dtype=x.dtype)
    made = memory.as_strided(tuple(x.shape), tuple(strides), offset)
    made.copy_(x)
    return made


def layouts(x: torch.Tensor) -> dict[str, torch.Tensor]:
    """Tensors equal to `x` with other layouts in memory ("expanded": with other values)."""
    made = {"contiguous": x.clone()}
    n = max(x.numel(), 1)
    backwards = tuple(reversed(range(x.dim())))
    made["transposed"] = x.permute(backwards).contiguous().permute(backwards)
    plain = x.contiguous().stride()
    made["stepped"] = _strided_copy(x, [2 * s for s in plain], 2 * n + 3, 1)
    made["offset"] = _strided_copy(x, plain, n + 5, 5)
    if x.dim():
        made["expanded"] = x[:1].clone().expand(x.shape)
        single = x[..., :1]
        made["odd singleton strides"] = _strided_copy(
            single, [*[7 if n == 1 else s for n, s in zip(single.shape, plain, strict=True)]], 2 * n
        )
    if x.is_complex():
        made["conjugated"] = x.conj().resolve_conj().conj()
        made["conjugated, transposed"] = made["transposed"].conj().resolve_conj().conj()
        made["negated"] = torch._neg_view(x.neg())
        assert made["conjugated"].is_conj()
        assert made["negated"].is_neg()
    elif x.dtype in (torch.float32, torch.float64):
        made["negated"] = torch.complex(torch.zeros_like(x), -x).conj().imag
        assert made["negated"].is_neg()
    return made
