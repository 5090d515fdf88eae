"""The tables agree with themselves, with the C core, with MPI and with the public surface."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys

import pytest
import torch

import mpicoll
import mpicoll.nn.functional
from mpicoll._core import mpi
from mpicoll.ops import OPERATIONS, REDUCTIONS, Kind, Operation, ReduceOp
from mpicoll.staging.dtypes import DTYPES, code_of, kind_of, name_of

every_row = pytest.mark.parametrize("row", OPERATIONS.values(), ids=OPERATIONS)
every_reduction = pytest.mark.parametrize("row", REDUCTIONS.values(), ids=lambda row: row.name)
MPI4TORCH = [
    "MAX",
    "MIN",
    "SUM",
    "PROD",
    "LAND",
    "BAND",
    "LOR",
    "BOR",
    "LXOR",
    "BXOR",
    "MINLOC",
    "MAXLOC",
]


def sample(dtype: torch.dtype, count: int, seed: int) -> torch.Tensor:
    """Elements of any dtype that has arithmetic."""
    generator = torch.Generator().manual_seed(seed)
    if dtype.is_floating_point or dtype.is_complex:
        return torch.randn(count, generator=generator, dtype=torch.float64).to(dtype)
    data = torch.randint(0, 256, (count * dtype.itemsize,), generator=generator, dtype=torch.uint8)
    return data % 2 == 1 if dtype is torch.bool else data.view(dtype)


# ---------------------------------------------------------------- reductions


def test_values_of_mpi4torch():
    assert [int(getattr(mpicoll, f"MPI_{name}")) for name in MPI4TORCH] == list(range(12))
    assert all(getattr(mpicoll, f"MPI_{name}") is ReduceOp[name] for name in MPI4TORCH)
    assert ReduceOp.AVG == 12
    assert ReduceOp.PRODUCT is ReduceOp.PROD
    assert {f"MPI_{name}" for name in MPI4TORCH} <= set(mpicoll.__all__)


def test_a_row_for_every_reduction():
    assert list(REDUCTIONS) == list(ReduceOp)
    assert all(row.op is op for op, row in REDUCTIONS.items())


def test_kinds_that_the_core_reduces():
    """The table says the same as the C core, which has a cell for every pair it can reduce."""
    for op, row in REDUCTIONS.items():
        for dtype, (code, kind) in DTYPES.items():
            assert mpi.supported(int(op), code) == (kind in row.kinds), (op.name, dtype)


def test_what_the_contract_forbids():
    assert not REDUCTIONS[ReduceOp.AVG].kinds & {Kind.BOOL, Kind.INTEGER}
    for op in (ReduceOp.MAX, ReduceOp.MIN, ReduceOp.MINLOC, ReduceOp.MAXLOC):
        assert Kind.COMPLEX not in REDUCTIONS[op].kinds
    for op in (ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR):
        assert REDUCTIONS[op].kinds == {Kind.BOOL, Kind.INTEGER}
    assert all(Kind.OTHER not in row.kinds for row in REDUCTIONS.values())
    for name in ("LAND", "LOR", "LXOR", "BAND", "BOR", "BXOR"):
        assert not REDUCTIONS[ReduceOp[name]].differentiable


@every_reduction
def test_neutral_elements(row):
    """Combined with anything, on either side, they change nothing (logic: but its truth value)."""
    for dtype, (_, kind) in DTYPES.items():
        if kind not in row.kinds or row.op is ReduceOp.AVG:
            continue
        x = sample(dtype, 24, 1)
        if row.name.startswith("L"):
            x = (x != 0).to(dtype)
        neutral = torch.tensor(row.neutral(dtype), dtype=dtype).expand(24).clone()
        if row.pairs:
            x, neutral = x.reshape(12, 2), neutral.reshape(12, 2)
            loser = REDUCTIONS[ReduceOp.MIN].neutral(dtype)
            neutral[:, 1] = torch.tensor(loser, dtype=dtype)
        for rows in ([neutral, x], [x, neutral]):
            got = row.reference(torch.stack(rows))
            assert got.dtype == dtype
            same = got.view(-1).view(torch.uint8).equal(x.reshape(-1).view(torch.uint8))
            assert same, f"{row.name}, {dtype}: {got}, not {x}"


def test_references_by_hand():
    """Numbers that no other code of the project computes."""
    rows = torch.tensor([[3.0, -1, 5], [2, 4, -6]])
    golden = {
        "MAX": [3, 4, 5], "MIN": [2, -1, -6], "SUM": [5, 3, -1], "PROD": [6, -4, -30],
        "LAND": [1, 1, 1], "LOR": [1, 1, 1], "LXOR": [0, 0, 0], "AVG": [2.5, 1.5, -0.5],
    }  # fmt: skip
    for name, want in golden.items():
        assert REDUCTIONS[ReduceOp[name]].reference(rows).tolist() == want, name
    bits = torch.tensor([[0b1100], [0b1010]], dtype=torch.uint64)
    for name, want in {"BAND": 0b1000, "BOR": 0b1110, "BXOR": 0b0110}.items():
        assert REDUCTIONS[ReduceOp[name]].reference(bits).item() == want, name
    top = torch.tensor([[2**64 - 1, 0], [1, 2**63]], dtype=torch.uint64)
    assert REDUCTIONS[ReduceOp.MAX].reference(top).tolist() == [2**64 - 1, 2**63]
    assert REDUCTIONS[ReduceOp.MIN].reference(top).tolist() == [1, 0]
    assert REDUCTIONS[ReduceOp.SUM].reference(top).tolist() == [0, 2**63]
    pairs = torch.tensor([[[1.0, 7]], [[5, 9]], [[5, 2]]])
    assert REDUCTIONS[ReduceOp.MAXLOC].reference(pairs).tolist() == [[5, 2]]
    assert REDUCTIONS[ReduceOp.MINLOC].reference(pairs).tolist() == [[1, 7]]
    pairs[0, 0, 0] = float("nan")
    for op in (ReduceOp.MAXLOC, ReduceOp.MINLOC):
        assert REDUCTIONS[op].reference(pairs)[0, 1].item() == 7
    halves = torch.tensor([[256.0], [1], [1]], dtype=torch.bfloat16)
    assert REDUCTIONS[ReduceOp.SUM].reference(halves).item() == 258
    assert REDUCTIONS[ReduceOp.AVG].reference(halves).item() == 86
    flags = torch.tensor([[True, True, False], [True, False, False]])
    assert REDUCTIONS[ReduceOp.SUM].reference(flags).tolist() == [True, True, False]
    assert REDUCTIONS[ReduceOp.PROD].reference(flags).tolist() == [True, False, False]


@every_reduction
def test_derivatives_that_the_table_promises(row):
    """The derivative's kind describes what autograd finds for the reference."""
    x = (torch.arange(12.0, dtype=torch.float64).reshape(3, 2, 2) * 7 % 11 + 1).requires_grad_()
    if not row.differentiable:
        with torch.no_grad():
            if Kind.FLOAT in row.kinds:
                assert set(row.reference(x).view(-1).tolist()) <= {0.0, 1.0}
        assert row.adjoint.startswith("none")
        return
    y = row.reference(x)
    (g,) = torch.autograd.grad(y[..., 0].sum(), x)
    g = g[..., 0]
    if row.derivative == "linear":
        assert g.unique().tolist() == [1 if row.op is ReduceOp.SUM else 1 / 3]
    elif row.derivative == "winner":
        assert g.sum(0).tolist() == [1, 1]
        assert torch.equal(g != 0, x[..., 0] == y[..., 0])
        if row.pairs:  # the index has none
            (g,) = torch.autograd.grad(row.reference(x)[..., 1].sum(), x)
            assert not g.any()
    else:
        assert row.derivative == "product"
        torch.testing.assert_close(g * x.detach()[..., 0], y.detach()[..., 0].expand(3, 2))


# ---------------------------------------------------------------- operations


@every_row
def test_methods_follow_the_table(row):
    """The method takes the arguments that the row names, in its order, and so does its twin."""
    for name in [row.name, row.name + "_"] if row.inplace else [row.name]:
        method = getattr(mpicoll.Communicator, name)
        assert tuple(inspect.signature(method).parameters) == ("self", "tensor", *row.arguments)
    assert row.name.endswith("_") is False
    assert hasattr(mpicoll.Communicator, row.name + "_") == row.inplace


@every_row
def test_entries_are_meaningful(row):
    assert row.pattern in ("elementwise", "blocks")
    assert row.counts_at in ("all", "root")
    assert row.result_at in ("all", "root")
    assert ("root" in row.arguments) == ("root" in (row.counts_at, row.result_at))
    assert row.reduces == bool(row.reductions)
    assert row.summary.endswith(".")
    assert row.mpi.startswith("MPI_")
    assert re.fullmatch(r"6\.\d+(\.\d+)?", row.section)  # collective communication, MPI-4.1
    if row.functional is not None:
        function = getattr(mpicoll.nn.functional, row.functional)
        assert row.section in function.__doc__
    assert row.section in getattr(mpicoll.Communicator, row.name).__doc__
    assert all(REDUCTIONS[op].differentiable for op in row.reductions)


def problem(row: Operation, size: int):
    """Shapes of all ranks' tensors, and arguments, with uneven blocks."""
    old, new = [2, 0, 3, 1][:size], [1, 2, 0, 4][:size]
    shapes = [[4, 3, 2] for _ in range(size)]
    arguments = {}
    for r in range(size):
        if "gatheraxis" in row.arguments:
            shapes[r][0] = old[r]
        if "scatteraxis" in row.arguments:
            shapes[r][1] = sum(new)
    for name in row.arguments:
        arguments[name] = {
            "op": ReduceOp.SUM, "root": size - 1, "gatheraxis": 0, "scatteraxis": 1, "numelem": new,
        }[name]  # fmt: skip
    return shapes, arguments, old, new


@every_row
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_duals_are_adjoint(row, size):
    """<F x, g> = <x, F* g> over all ranks, with F* the row that the table calls dual."""
    shapes, arguments, old, _new = problem(row, size)
    generator = torch.Generator().manual_seed(size)
    xs = [torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes]
    ys = row.reference(xs, **arguments)
    gs = [torch.randn(y.shape, generator=generator, dtype=torch.float64) for y in ys]
    dual = OPERATIONS[row.dual]
    assert OPERATIONS[dual.dual] is row
    exchanged = {"gatheraxis": 1, "scatteraxis": 0, "numelem": old}
    if "gatheraxis" not in row.arguments:
        exchanged["gatheraxis"] = 1
    if "scatteraxis" not in row.arguments:
        exchanged["scatteraxis"], exchanged["numelem"] = 0, old
    known = {"op": ReduceOp.SUM, "root": arguments.get("root"), **exchanged}
    order = slice(None, None, -1) if row.prefix else slice(None)
    back = dual.reference(gs[order], **{name: known[name] for name in dual.arguments})[order]
    assert [b.shape for b in back if b.numel()] == [
        x.shape for r, x in enumerate(xs)
        if x.numel() and (row.counts_at == "all" or row.pattern == "elementwise"
                          or r == arguments["root"])
    ]  # fmt: skip
    left = sum((y * g).sum() for y, g in zip(ys, gs, strict=True))
    right = sum((x * b).sum() for x, b in zip(xs, back, strict=True) if b.numel())
    torch.testing.assert_close(left, right)


@every_row
def test_references_do_not_share_memory_with_the_input(row):
    shapes, arguments, _, _ = problem(row, 3)
    xs = [torch.ones(s) for s in shapes]
    for y in row.reference(xs, **arguments):
        y.fill_(5)
    assert all((x == 1).all() for x in xs)


# ---------------------------------------------------------------- dtypes


def test_codes_are_unique_and_known():
    codes = [code for code, _ in DTYPES.values()]
    assert len(set(codes)) == len(codes)
    for dtype, (code, kind) in DTYPES.items():
        assert code_of(dtype) == code
        assert name_of(code) is dtype
        assert kind_of(dtype) is kind
    assert code_of(torch.quint8) == -1
    assert name_of(-1) is None


def test_every_dtype_of_the_contract_is_there():
    integers = [getattr(torch, f"{u}int{n}") for u in ("", "u") for n in (8, 16, 32, 64)]
    floats = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
    assert {torch.bool, *integers, *floats, torch.complex64, torch.complex128} <= set(DTYPES)
    eights = {v for k, v in vars(torch).items() if k.startswith("float8") and k != "float8"}
    assert eights
    assert eights <= set(DTYPES)
    assert all(kind_of(dtype) is Kind.OTHER for dtype in eights)


def test_names_in_mpi():
    """Every MPI constant that the tables name exists (in another process: it initialises MPI)."""
    names = [row.mpi[4:] for row in REDUCTIONS.values() if row.mpi]
    code = f"from mpi4py import MPI; [getattr(MPI, n) for n in {names}]; print('there')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "there", done.stderr
