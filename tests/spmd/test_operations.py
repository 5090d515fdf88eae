"""Every operation of the table against its reference, on all ranks.

Nothing here lists operations or reductions: the tables do.
"""

from __future__ import annotations

import hashlib

import oracle
import pytest
import torch

import mpicoll
from mpicoll._core import mpi
from mpicoll.ops import OPERATIONS, REDUCTIONS, Kind, ReduceOp
from mpicoll.staging.dtypes import DTYPES

COMM = mpicoll.COMM_WORLD
RANK, SIZE = COMM.rank, COMM.size

ROWS = list(OPERATIONS.values())
every_row = pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
every_block_row = pytest.mark.parametrize(
    "row", [row for row in ROWS if row.pattern == "blocks"], ids=lambda row: row.name
)
every_reducing_row = pytest.mark.parametrize(
    "row", [row for row in ROWS if row.reduces], ids=lambda row: row.name
)
every_moving_row = pytest.mark.parametrize(
    "row", [row for row in ROWS if not row.reduces], ids=lambda row: row.name
)
every_inplace_row = pytest.mark.parametrize(
    "row", [row for row in ROWS if row.inplace], ids=lambda row: row.name
)


def roots_of(row):
    return range(SIZE) if "root" in row.arguments else [0]


def alike(row) -> bool:
    """Whether all ranks get the same result."""
    return row.result_at == "all" and (
        row.name == "Allgather" or (row.pattern == "elementwise" and not row.prefix)
    )


# ---------------------------------------------------------------- values


@every_row
def test_values(row, everyone):
    """Every reduction and dtype, with the extremes of the dtype; equal on all ranks bit for bit."""
    seen = []
    case = 0
    for op in oracle.reductions_of(row):
        for dtype in oracle.dtypes_of(op):
            for shape in ((4, 3, 2), (3, 5, 2)):
                case += 1
                p = oracle.problem(row.name, SIZE, op=op, root=case % SIZE, shape=shape)
                what = f"{p}, {dtype}"
                tensors = p.tensors(dtype)
                tensors = [oracle.troubled(x, r, op) for r, x in enumerate(tensors)]
                if op is None and DTYPES[dtype][1] is Kind.OTHER:
                    want = p.reference([oracle.bits(x) for x in tensors])[RANK].view(dtype)
                else:
                    want = p.reference(tensors)[RANK]
                before = oracle.image(tensors[RANK])
                got = p.call(COMM, tensors[RANK])
                oracle.check_plain(got, want, what)
                oracle.check(got, want, what, exact=not oracle.rounds(op, dtype))
                assert oracle.image(tensors[RANK]) == before, f"{what}: the input has changed"
                seen.append((what, hashlib.sha1(oracle.image(got)).hexdigest()))
    assert len(seen) >= 2 * len(DTYPES) - 2
    if alike(row):
        for r, others in enumerate(everyone(seen)):
            differ = [a[0] for a, b in zip(seen, others, strict=True) if a != b]
            assert not differ, f"rank {r} has other bits in {differ}"


@every_reducing_row
def test_sixteen_bits_round_once(row):
    """256 + 1 + 1 is 258 in bfloat16, and the product is rounded once as well."""
    for dtype, big in ((torch.bfloat16, 256.0), (torch.float16, 2048.0)):
        for count in (1, 5, 5000):  # below and above the size at which rows are sent whole
            p = oracle.problem(row.name, SIZE, op=ReduceOp.SUM, shape=(count, SIZE), new=[1] * SIZE)
            tensors = [
                torch.full(shape, big if r == 0 else 1.0, dtype=dtype)
                for r, shape in enumerate(p.shapes)
            ]
            want = p.reference([x.double() for x in tensors])[RANK].to(dtype)
            oracle.check(p.call(COMM, tensors[RANK]), want, f"{p}, {dtype}", exact=True)


def test_integers_stay_exact():
    """2^53 + 1 does not go through a float."""
    x = torch.tensor([2**53 + 1 if RANK == 0 else 0], dtype=torch.int64)
    assert COMM.Allreduce(x, mpicoll.MPI_SUM).item() == 2**53 + 1
    assert COMM.Reduce_scatter(x.expand(SIZE), 0, 1, mpicoll.MPI_SUM).item() == 2**53 + 1
    assert COMM.Allreduce(x, mpicoll.MPI_MAX).item() == 2**53 + 1


def test_golden_numbers():
    """A few results by hand, that no reference computes."""
    x = torch.tensor([1.0, -2.0], dtype=torch.float64) * (RANK + 1)
    t = SIZE * (SIZE + 1) / 2
    assert COMM.Allreduce(x, mpicoll.MPI_SUM).tolist() == [t, -2 * t]
    assert COMM.Allreduce(x, mpicoll.MPI_MAX).tolist() == [SIZE, -2]
    assert COMM.Allreduce(x, ReduceOp.AVG).tolist() == [t / SIZE, -2 * t / SIZE]
    assert COMM.Scan(x).tolist() == [(RANK + 1) * (RANK + 2) / 2, -(RANK + 1) * (RANK + 2.0)]
    assert COMM.Exscan(x).tolist() == [RANK * (RANK + 1) / 2, -RANK * (RANK + 1.0)]
    mine = torch.full((RANK + 1,), RANK)
    assert COMM.Allgather(mine, 0).tolist() == [r for r in range(SIZE) for _ in range(r + 1)]
    pairs = torch.tensor([[RANK % 2, RANK]])
    assert COMM.Allreduce(pairs, mpicoll.MPI_MAXLOC).tolist() == [[min(1, SIZE - 1)] * 2]
    assert COMM.Allreduce(pairs, mpicoll.MPI_MINLOC).tolist() == [[0, 0]]
    flags = torch.tensor([RANK == 0, True, False])
    assert COMM.Allreduce(flags, mpicoll.MPI_SUM).tolist() == [True, True, False]
    assert COMM.Allreduce(flags, mpicoll.MPI_PROD).tolist() == [SIZE == 1, True, False]
    assert COMM.Allreduce(torch.tensor([5, 0]), mpicoll.MPI_LAND).tolist() == [1, 0]


# ---------------------------------------------------------------- derivatives


def nonlinear(p):
    """The reference between two nonlinear functions."""
    return lambda xs: [oracle.outer(y) for y in p.reference([oracle.inner(x) for x in xs])]


def compare(p, dtype, what, salt="", tensors=None):
    """Value, gradient and second derivative of one problem between two nonlinear functions."""
    tensors = p.tensors(dtype, salt) if tensors is None else tensors
    want = oracle.simulate(
        nonlinear(p),
        tensors,
        salt,
    )
    y, g, h = oracle.differentiate(
        lambda x: oracle.outer(p.call(COMM, oracle.inner(x))), tensors[RANK], RANK, salt
    )
    oracle.check(y, want.results[RANK], f"{what}: value", exact=False)
    oracle.check(g, want.gradients[RANK], f"{what}: gradient", exact=False)
    oracle.check(h, want.curvatures[RANK], f"{what}: second derivative", exact=False)


@every_row
def test_derivatives(row):
    """Every reduction with a gradient and every root: gradient and Hessian-vector product."""
    differentiable = [op for op in oracle.reductions_of(row) if op is None or op in row.reductions]
    assert differentiable
    for op in differentiable:
        for dtype in (torch.float64, torch.complex128):
            if dtype not in oracle.dtypes_of(op):
                continue
            for root in roots_of(row):
                p = oracle.problem(row.name, SIZE, op=op, root=root)
                compare(p, dtype, f"{p}, {dtype}")


@every_row
def test_gradients_keep_the_dtype(row):
    """Gradients of the shorter floats have their dtype and the value that float64 gives."""
    for op in oracle.reductions_of(row):
        if op is not None and op not in row.reductions:
            continue
        for dtype in oracle.dtypes_of(op):
            if DTYPES[dtype][1] not in oracle.GRADIENT_KINDS:
                continue
            p = oracle.problem(row.name, SIZE, op=op, root=SIZE - 1)
            what = f"{p}, {dtype}"
            wide = torch.complex128 if dtype.is_complex else torch.float64
            tensors = [x.to(dtype) for x in p.tensors(wide)]
            ws = [
                oracle.weights_for(y, r, "short").to(dtype)
                for r, y in enumerate(p.reference(tensors))
            ]
            widened = [x.to(wide) for x in tensors]

            def by(op, p=p):
                return lambda xs: p.row.reference(
                    xs, **(p.arguments | ({} if op is None else {"op": op}))
                )

            want = oracle.pull_short(by, op, widened, [w.to(wide) for w in ws], dtype)[RANK]
            x = tensors[RANK].clone().requires_grad_()
            y = p.call(COMM, x)
            y.backward(ws[RANK])
            oracle.check(x.grad, want, what, exact=False)
            assert x.grad.is_contiguous(), what


@every_row
def test_gradients_of_sixteen_bits_round_once(row):
    """Where the adjoint adds, 16-bit gradients are added in float32 and rounded once."""
    dual = OPERATIONS[row.dual]
    for dtype, big in ((torch.bfloat16, 256.0), (torch.float16, 2048.0)):
        for op in (ReduceOp.SUM, ReduceOp.AVG) if row.reduces else (None,):
            if op is ReduceOp.AVG and op not in row.reductions:
                continue
            p = oracle.problem(row.name, SIZE, op=op, old=[3] * SIZE, new=[3] * SIZE)
            tensors = p.tensors(dtype)
            ys = p.reference(tensors)
            gs = [torch.full_like(y, big if r == 0 else 1.0) for r, y in enumerate(ys)]
            # The sum in float64 is exact here, so the order does not matter.
            want = oracle.pull(
                p.reference, [x.double() for x in tensors], [g.double() for g in gs]
            )[RANK].to(dtype)
            x = tensors[RANK].requires_grad_()
            p.call(COMM, x).backward(gs[RANK])
            exact = op is not ReduceOp.AVG or dual.reduces
            oracle.check(x.grad, want, f"{p}, {dtype}", exact=exact)


@every_row
def test_no_gradient(row, works):
    """A reduction without a gradient says so in forward, before anything is sent."""
    for op in oracle.reductions_of(row):
        if op is None or op in row.reductions:
            continue
        for dtype in oracle.dtypes_of(op):
            if DTYPES[dtype][1] not in oracle.GRADIENT_KINDS:
                continue
            p = oracle.problem(row.name, SIZE, op=op)
            x = p.tensors(dtype)[RANK].requires_grad_()
            with pytest.raises(RuntimeError, match=f"{op.name} has no gradient"):
                p.call(COMM, x)
            works()
            if RANK == 0:  # nothing was sent: the others need not take part
                with pytest.raises(RuntimeError, match=f"{op.name} has no gradient"):
                    p.call(COMM, x)
            works()
            with torch.no_grad():
                got = p.call(COMM, x)
            assert not got.requires_grad
            oracle.check(
                got, p.reference(p.tensors(dtype))[RANK], f"{p}, {dtype}",
                exact=not oracle.rounds(op, dtype),
            )  # fmt: skip


@every_reducing_row
@pytest.mark.parametrize("op", [ReduceOp.PROD], ids=["PROD"])
def test_product_of_zeros(row, op):
    """The gradient of a product is exact where one or several factors are zero."""
    if op not in row.reductions:  # a scan: refused, see test_no_gradient
        assert row.prefix
        return
    for dtype in (torch.float64, torch.complex128):
        for holders in ([0], [SIZE - 1], [0, SIZE - 1], list(range(SIZE))):
            p = oracle.problem(row.name, SIZE, op=op, root=SIZE - 1)
            tensors = p.tensors(dtype)
            for r in set(holders):
                tensors[r].view(-1)[::2] = 0
                tensors[r].view(-1)[1 + r % 2 :: 5] = -2  # inner(-2) is zero
            compare(p, dtype, f"{p}, {dtype}, zeros on {holders}", tensors=tensors)


@every_reducing_row
def test_ties(row):
    """Ranks that tie for the largest or smallest element share the gradient evenly."""
    for op, reduction in REDUCTIONS.items():
        if op not in row.reductions or reduction.derivative != "winner":
            continue
        for tied in ([0, SIZE - 1], list(range(SIZE)), [SIZE // 2]):
            p = oracle.problem(row.name, SIZE, op=op, root=SIZE - 1)
            tensors = p.tensors(torch.float64)
            if reduction.pairs:
                for r, x in enumerate(tensors):
                    x[..., 1] = (r * 5 + 3) % 7  # all differ
            best = 9.0 if op in (ReduceOp.MAX, ReduceOp.MAXLOC) else -1.0  # inner(-1) is least
            for r in set(tied):
                (tensors[r][..., 0] if reduction.pairs else tensors[r]).fill_(best)
            what = f"{p}, ranks {tied} tie"
            compare(p, torch.float64, what, tensors=tensors)


@every_reducing_row
def test_nan_reaches_value_and_gradient(row):
    """MAX and MIN of a NaN are NaN on every rank, in the value as in torch; so is the gradient."""
    for op in (ReduceOp.MAX, ReduceOp.MIN):
        p = oracle.problem(row.name, SIZE, op=op)
        for holder in range(SIZE):
            tensors = p.tensors(torch.float64)
            tensors[holder].view(-1)[::3] = float("nan")
            want = p.reference(tensors)[RANK]
            got = p.call(COMM, tensors[RANK])
            oracle.check(got, want, f"{p}, NaN on rank {holder}", exact=True)
            if op in row.reductions:
                answers = oracle.simulate(p.reference, tensors, second=False)
                x = tensors[RANK].clone().requires_grad_()
                y = p.call(COMM, x)
                y.backward(oracle.weights_for(y, RANK, ""))
                oracle.check(
                    x.grad, answers.gradients[RANK], f"{p}, NaN on {holder}: gradient", exact=False
                )


# ---------------------------------------------------------------- layouts


@every_row
def test_layouts(row):
    """Any layout of inputs and gradients, on any rank, gives what a contiguous tensor gives."""
    op = ReduceOp.SUM if row.reduces else None
    for dtype in (torch.float64, torch.complex128, torch.float32, torch.bfloat16, torch.int16):
        p = oracle.problem(row.name, SIZE, op=op, root=SIZE - 1, old=[2] * SIZE, new=[2] * SIZE)
        variants = [oracle.layouts(x) for x in p.tensors(dtype)]
        for i, layout in enumerate(variants[RANK]):
            # Ranks differ in layout, but not where the value depends on it.
            kept = layout in ("expanded", "odd singleton strides")
            names = [
                layout if kept else
                [n for n in v if n not in ("expanded", "odd singleton strides")][
                    (i + r) % (len(v) - 2)
                ]
                for r, v in enumerate(variants)
            ]  # fmt: skip
            if layout == "odd singleton strides" and row.pattern == "blocks":
                q = oracle.problem(
                    row.name, SIZE, op=op, root=SIZE - 1, shape=(4, 3, 1),
                    old=[2] * SIZE, new=[2] * SIZE, placeholder=(2, 1),
                )  # fmt: skip
            else:
                q = p
            tensors = [v[n] for v, n in zip(variants, names, strict=True)]
            what = f"{q}, {dtype}, layouts {names}"
            got = q.call(COMM, tensors[RANK])
            want = q.reference([x.resolve_conj().resolve_neg() for x in tensors])[RANK]
            oracle.check_plain(got, want, what)
            oracle.check(got, want, what, exact=not oracle.rounds(op, dtype))
            if dtype not in (torch.float64, torch.complex128):
                continue
            ys = q.reference(tensors)
            grads = [oracle.layouts(oracle.weights_for(y, r, "")) for r, y in enumerate(ys)]
            chosen = [list(v.values())[(i + r) % len(v)] for r, v in enumerate(grads)]
            chosen = [
                w if w.shape == y.shape else w.expand(y.shape)
                for w, y in zip(chosen, ys, strict=True)
            ]
            wanted = oracle.pull(q.reference, tensors, [w.clone() for w in chosen])[RANK]
            x = tensors[RANK].detach().requires_grad_()
            (g,) = torch.autograd.grad(q.call(COMM, x), x, chosen[RANK])
            oracle.check(g, wanted, f"{what}: gradient", exact=False)
            compare(q, dtype, f"{what}: derivatives", tensors=tensors)


@every_row
def test_empty_and_scalar(row):
    """Tensors without elements, and 0-d ones where the operation has no axis."""
    op = ReduceOp.SUM if row.reduces else None
    shapes = [(1, 0, 2), (0,), (2, 0)]
    if row.pattern == "elementwise":
        shapes += [(), (1, 1)]
    for dtype in (torch.float64, torch.complex128, torch.bfloat16, torch.bool):
        for shape in shapes:
            last = len(shape) - 1
            if row.pattern == "elementwise":
                p = oracle.problem(row.name, SIZE, op=op, shape=shape)
            else:
                p = oracle.problem(
                    row.name, SIZE, op=op, shape=shape, gatheraxis=last,
                    scatteraxis=max(0, last - 1),
                    old=[0] * SIZE if shape[last] == 0 else None,
                    new=[0] * SIZE if len(shape) == 1 else None,
                )  # fmt: skip
            what = f"{p}, {dtype}"
            got = p.call(COMM, p.tensors(dtype)[RANK])
            want = p.reference(p.tensors(dtype))[RANK]
            oracle.check_plain(got, want, what)
            oracle.check(got, want, what, exact=not oracle.rounds(op, dtype))
            if dtype in (torch.float64, torch.complex128):
                compare(p, dtype, what)


# ---------------------------------------------------------------- blocks of different sizes


@every_block_row
def test_uneven_blocks(row):
    """Every axis, counted from the front and the end, with sizes that differ and may be zero."""
    op = ReduceOp.SUM if row.reduces else None
    axes = range(-3, 3)
    both = len([a for a in row.arguments if a.endswith("axis")]) == 2
    pairs = [(g, s) for g in axes for s in axes] if both else [(a, a) for a in axes]
    for i, (gather, scatter) in enumerate(pairs):
        for root in roots_of(row):
            p = oracle.problem(
                row.name, SIZE, op=op, root=root, gatheraxis=gather, scatteraxis=scatter,
                shape=(3, 2, 4), old=oracle.uneven(SIZE, i), new=oracle.uneven(SIZE, i + 2),
                placeholder=[(), (3,), (0, 2), (1, 1, 1, 1)][i % 4],
            )  # fmt: skip
            if i % 3 == 0:
                compare(p, torch.float64, str(p))
            x = p.tensors(torch.int32)
            what = f"{p}, int32"
            got = p.call(COMM, x[RANK])
            want = p.reference(x)[RANK]
            oracle.check_plain(got, want, what)
            oracle.check(got, want, what, exact=True)


@every_block_row
def test_random_blocks(row):
    """Shapes of two to ten dimensions, drawn alike on all ranks."""
    op = ReduceOp.SUM if row.reduces else None
    generator = torch.Generator().manual_seed(len(row.name))

    def draw(low, high):
        return int(torch.randint(low, high, (1,), generator=generator))

    for i in range(30):
        ndim = 10 if i == 0 else draw(2, 6)
        shape = [draw(1, 3) for _ in range(ndim)]
        gather, scatter = draw(-ndim, ndim), draw(-ndim, ndim)
        p = oracle.problem(
            row.name, SIZE, op=op, root=draw(0, SIZE), gatheraxis=gather, scatteraxis=scatter,
            shape=shape, old=[draw(0, 4) for _ in range(SIZE)],
            new=[draw(0, 4) for _ in range(SIZE)],
        )  # fmt: skip
        compare(p, torch.float64, str(p))


def test_placeholders_of_scatter():
    """Shape, dtype and whether a gradient is wanted come from the root alone."""
    for root in range(SIZE):
        whole = torch.arange(2.0 * SIZE, dtype=torch.float64).reshape(2, SIZE)
        for wants in (True, False):
            for placeholder in (
                torch.zeros(()),
                torch.zeros(3, dtype=torch.int8),
                torch.zeros(2, 2, requires_grad=True),
                torch.zeros(0, dtype=torch.complex64, requires_grad=True),
            ):
                x = whole.clone().requires_grad_(wants) if root == RANK else placeholder
                y = COMM.Scatter(x, 1, 1, root)
                assert y.dtype == torch.float64
                assert y.tolist() == whole[:, RANK : RANK + 1].tolist()
                assert y.requires_grad == wants, f"root wants {wants}, placeholder {placeholder}"
                if not wants:
                    continue
                y.backward(torch.full_like(y, RANK + 1.0))
                if root == RANK:
                    assert x.grad.tolist() == [[r + 1.0 for r in range(SIZE)]] * 2
                elif x.requires_grad:
                    assert x.grad.shape == x.shape
                    assert x.grad.dtype == x.dtype
                    assert not x.grad.any()
                    x.grad = None


# ---------------------------------------------------------------- in place


@every_inplace_row
def test_in_place(row):
    """Results land in the caller's memory whatever its layout, and nowhere else."""
    for op in oracle.reductions_of(row):
        for dtype in oracle.dtypes_of(op):
            if op not in (None, ReduceOp.SUM, ReduceOp.MAX) and dtype is not torch.int32:
                continue
            p = oracle.problem(row.name, SIZE, op=op, root=SIZE - 1)
            tensors = p.tensors(dtype)
            if op is None and DTYPES[dtype][1] is Kind.OTHER:
                want = p.reference([oracle.bits(x) for x in tensors])[RANK].view(dtype)
                kinds = {"contiguous": tensors[RANK]}
            else:
                want = p.reference(tensors)[RANK]
                kinds = oracle.layouts(tensors[RANK])
                kinds.pop("expanded")
                kinds.pop("odd singleton strides")
            for layout, x in kinds.items():
                what = f"{p}_, {dtype}, {layout}"
                version = x._version
                got = p.call(COMM, x, "_")
                exact = not oracle.rounds(op, dtype)
                oracle.check(got, want, what, exact)
                oracle.check(x, want, f"{what}: the tensor passed", exact)
                assert got.untyped_storage().data_ptr() == x.untyped_storage().data_ptr(), what
                assert (got.data_ptr(), got.stride()) == (x.data_ptr(), x.stride()), what
                assert x._version > version, f"{what}: version still {version}"


@every_inplace_row
def test_in_place_leaves_the_rest_alone(row):
    """Memory between and around the elements of a strided tensor is untouched."""
    op = ReduceOp.SUM if row.reduces else None
    for dtype in (torch.uint8, torch.float64, torch.bfloat16):
        p = oracle.problem(row.name, SIZE, op=op, root=0, shape=(3, 4))
        memory = torch.full((200,), 77, dtype=dtype)
        x = memory.as_strided((3, 4), (40, 3), 11)
        x.copy_(p.tensors(dtype)[RANK])
        want = memory.clone()
        want.as_strided((3, 4), (40, 3), 11).copy_(p.reference(p.tensors(dtype))[RANK])
        p.call(COMM, x, "_")
        oracle.check(memory, want, f"{p}_, {dtype}", exact=not oracle.rounds(op, dtype))
        block = torch.full((30,), 77, dtype=dtype)
        block[8:20] = p.tensors(dtype)[RANK].view(-1)
        p.call(COMM, block[8:20].view(3, 4), "_")
        assert (torch.cat([block[:8], block[20:]]) == 77).all(), f"{p}_, {dtype}: guards"


@every_inplace_row
def test_in_place_derivatives(row):
    """In place, on an intermediate of any layout, value and both derivatives are the same."""
    for op in oracle.reductions_of(row):
        if op is not None and op not in row.reductions:
            continue
        for root in range(SIZE):
            p = oracle.problem(row.name, SIZE, op=op, root=root)
            tensors = p.tensors(torch.float64)
            want = oracle.simulate(
                nonlinear(p),
                tensors,
            )  # fmt: skip
            for mould in (lambda t: t, lambda t: t.transpose(0, 2).contiguous().transpose(0, 2)):

                def function(x, p=p, mould=mould):
                    return oracle.outer(p.call(COMM, mould(oracle.inner(x)), "_"))

                y, g, h = oracle.differentiate(function, tensors[RANK], RANK)
                oracle.check(y, want.results[RANK], f"{p}_: value", exact=False)
                oracle.check(g, want.gradients[RANK], f"{p}_: gradient", exact=False)
                oracle.check(h, want.curvatures[RANK], f"{p}_: second derivative", exact=False)


@every_inplace_row
def test_in_place_input_is_spent(row, works):
    """A non-leaf input that is used again raises in backward; the returned tensor may be used."""
    for op in oracle.reductions_of(row):
        if op is not None and op not in row.reductions:
            continue
        p = oracle.problem(row.name, SIZE, op=op)
        x = p.tensors(torch.float64)[RANK].requires_grad_()
        spent = oracle.inner(x)
        y = p.call(COMM, spent, "_")
        with pytest.raises(RuntimeError, match=f"{row.name}_.*used again"):
            (spent.sum() + 0 * y.detach().sum()).backward()
        works()
        y.sum().backward()
        assert x.grad is not None
        works()


@every_inplace_row
def test_in_place_on_a_view_spends_its_base(row, works):
    """Also through a view: the base may not be used again, what lies outside the view or not."""
    op = ReduceOp.SUM if row.reduces else None
    p = oracle.problem(row.name, SIZE, op=op, shape=(2, 3))
    x = torch.ones(4, 3, dtype=torch.float64, requires_grad=True)
    base = x * 2
    y = p.call(COMM, base[1:3], "_")
    oracle.check(
        y, p.reference([torch.full((2, 3), 2.0).double()] * SIZE)[RANK], str(p), exact=False
    )
    with pytest.raises(RuntimeError, match=f"{row.name}_.*used again"):
        (base.sum() + 0 * y.detach().sum()).backward()
    works()


@every_inplace_row
def test_in_place_on_leaves(row):
    """A leaf that requires grad is allowed, also a strided one and a view of one."""
    op = ReduceOp.SUM if row.reduces else None
    p = oracle.problem(row.name, SIZE, op=op, root=SIZE - 1)
    tensors = p.tensors(torch.float64)
    want = oracle.simulate(p.reference, tensors, second=False)
    for layout in ("contiguous", "stepped", "transposed"):
        x = oracle.layouts(tensors[RANK])[layout].requires_grad_()
        y = p.call(COMM, x, "_")
        y.backward(oracle.weights_for(y, RANK, ""))
        oracle.check(y, want.results[RANK], f"{p}_, {layout} leaf", exact=False)
        oracle.check(x, want.results[RANK], f"{p}_, {layout} leaf itself", exact=False)
        oracle.check(x.grad, want.gradients[RANK], f"{p}_, {layout} leaf: gradient", exact=False)
        assert x.is_leaf
    x = tensors[RANK].clone().requires_grad_()
    y = p.call(COMM, x[:], "_")
    y.backward(oracle.weights_for(y, RANK, ""))
    oracle.check(x.grad, want.gradients[RANK], f"{p}_, view of a leaf", exact=False)


@every_inplace_row
def test_in_place_refuses_expanded_memory(row, works):
    p = oracle.problem(row.name, SIZE, op=ReduceOp.SUM if row.reduces else None)
    with pytest.raises(ValueError, match="expanded"):
        p.call(COMM, torch.ones(1, 3, 2).expand(4, 3, 2), "_")
    works()


@every_inplace_row
def test_in_place_overwrites_what_autograd_saved(row):
    """The version counter moves, so that autograd notices an overwritten saved tensor."""
    p = oracle.problem(row.name, SIZE, op=ReduceOp.SUM if row.reduces else None)
    x = torch.ones(p.shapes[RANK], requires_grad=True)
    t = torch.ones(p.shapes[RANK])
    y = x * t  # saves t
    p.call(COMM, t, "_")
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


# ---------------------------------------------------------------- long messages


@every_row
@pytest.mark.parametrize("limit", ["count", "chunk"])
def test_long_messages(row, limits, limit):
    """With the limits lowered, counts around and above them arrive whole and in order."""
    mpi.bind()
    plans = [(torch.float64, ReduceOp.SUM), (torch.bfloat16, ReduceOp.SUM),
             (torch.int32, ReduceOp.MAX), (torch.float64, ReduceOp.MINLOC),
             (torch.complex64, ReduceOp.AVG)]  # fmt: skip
    for dtype, op in plans:
        if row.prefix and op is ReduceOp.AVG:
            continue
        if limit == "count":
            limits(count_limit=1000)
        else:
            limits(chunk_bytes=1000 * dtype.itemsize)
        for n in (999, 1000, 1001, 2500):
            # As the whole, and as a block of every rank.
            shape = (n, 2) if op is ReduceOp.MINLOC else (n,)
            parts = [n // SIZE] * SIZE
            parts[-1] += n - sum(parts)
            for old, new in (([n] * SIZE, parts), (parts, [0, *[n] * (SIZE - 1)])):
                p = oracle.problem(
                    row.name, SIZE, op=op if row.reduces else None, root=n % SIZE,
                    scatteraxis=0, shape=shape, old=old, new=new,
                )  # fmt: skip
                what = f"{row.name}, {op.name}, {dtype}, {n} at {mpi.limits()}"
                tensors = p.tensors(dtype)
                got = p.call(COMM, tensors[RANK])
                want = p.reference(tensors)[RANK]
                exact = not oracle.rounds(p.arguments.get("op"), dtype)
                oracle.check_plain(got, want, what)
                oracle.check(got, want, what, exact)
                if row.inplace and old == [n] * SIZE:
                    x = tensors[RANK].clone()
                    oracle.check(p.call(COMM, x, "_"), want, f"{what}, in place", exact)
                if (
                    dtype is torch.float64
                    and n in (1001, 2500)
                    and (not row.reduces or op in row.reductions)
                ):
                    compare(p, dtype, f"{what}: derivatives", tensors=tensors)


@every_reducing_row
def test_pairs_are_not_cut_apart(row, limits):
    """Also where the limit is odd, as the largest count of MPI is."""
    for setting in ({"count_limit": 99}, {"count_limit": 1}, {"chunk_bytes": 99 * 8}):
        before = limits()
        limits(**setting)
        for op in (ReduceOp.MINLOC, ReduceOp.MAXLOC):
            p = oracle.problem(row.name, SIZE, op=op, scatteraxis=0, shape=(150, 2), new=[5] * SIZE)
            x = p.tensors(torch.float64)
            oracle.check(p.call(COMM, x[RANK]), p.reference(x)[RANK], f"{p}, {setting}", exact=True)
        limits(*before)


def test_sendrecv_between_parts_of_one_tensor(works):
    """Rows, halves and columns of one matrix are different memory; the same rows are not."""
    right, left = (RANK + 1) % SIZE, (RANK - 1) % SIZE
    want = 10.0 * left
    for sent, received in (
        (lambda m: m[1], lambda m: m[0]),
        (lambda m: m[:2], lambda m: m[2:]),
        (lambda m: m[:, 1], lambda m: m[:, 0]),
        (lambda m: m[:, :2], lambda m: m[:, 2:]),
        (lambda m: m[0], lambda m: m[:, 0]),  # one element in common: its value before
    ):
        m = torch.full((4, 4), 10.0 * RANK)
        got = COMM.Sendrecv(sent(m), right, received(m), left)
        assert (got == want).all()
        assert (received(m) == want).all()
        assert (m == want).sum() >= got.numel()
    m = torch.zeros(4, 4)
    with pytest.raises(ValueError, match="share memory"):
        COMM.Sendrecv(m[:3], right, m[2:], left)
    works()


@pytest.mark.parametrize("limit", ["count", "chunk"])
def test_long_messages_between_two(limits, limit):
    """Send, Recv and Sendrecv with the limits lowered, gradients included."""
    right, left = (RANK + 1) % SIZE, (RANK - 1) % SIZE
    for dtype in (torch.float64, torch.int8, torch.bfloat16, torch.complex128):
        if limit == "count":
            limits(count_limit=1000)
        else:
            limits(chunk_bytes=1000 * dtype.itemsize)
        for n in (999, 1000, 1001, 2500):
            what = f"{dtype}, {n} at {mpi.limits()}"
            x, want = oracle.values((n,), dtype, RANK), oracle.values((n,), dtype, left)
            handle = COMM.Isend(x, right, 3)
            got = COMM.Recv(torch.zeros(n, dtype=dtype), left, 3)
            COMM.Wait(handle)
            oracle.check(got, want, f"Isend, Recv, {what}", exact=True)
            got = COMM.Sendrecv(x, right, torch.zeros(n, dtype=dtype), left)
            oracle.check(got, want, f"Sendrecv, {what}", exact=True)
            if dtype is not torch.float64:
                continue
            x.requires_grad_()
            y = COMM.Sendrecv(x, right, torch.zeros(n, dtype=dtype), left)
            y.backward(oracle.values((n,), dtype, RANK, "g"))
            oracle.check(x.grad, oracle.values((n,), dtype, right, "g"), f"gradient, {what}", True)
            x.grad = None
            handle = COMM.Isend(x, right, 4)
            empty = torch.zeros(n, dtype=dtype)
            y = COMM.Recv(mpicoll.JoinDummies(empty, [handle.dummy]), left, 4)
            z = COMM.Wait(mpicoll.JoinDummiesHandle(handle, [y]))
            y = mpicoll.JoinDummies(y, [z])
            y.backward(oracle.values((n,), dtype, RANK, "g"))
            oracle.check(x.grad, oracle.values((n,), dtype, right, "g"), f"gradient, {what}", True)


# ---------------------------------------------------------------- wrong arguments


def wrong_arguments():
    """Operation, what replaces the right arguments, tensor, error, words of the message."""
    cases = []
    good = torch.ones(4, 3, 2)
    for row in ROWS:
        add = lambda *case, row=row: cases.append((row, *case))  # noqa: E731
        add({}, [1.0], TypeError, "must be a torch.Tensor, not list")
        add({}, good.to_sparse(), TypeError, "sparse_coo")
        add({}, good.to("meta"), TypeError, "meta")
        if "root" in row.arguments:
            add({"root": SIZE}, good, ValueError, f"root is {SIZE}.*0 to {SIZE - 1}")
            add({"root": -1}, good, ValueError, "root is -1")
            add({"root": 0.5}, good, TypeError, "root must be an integer, not float")
            add({"root": None}, good, TypeError, "root must be an integer, not NoneType")
        if "numelem" in row.arguments:
            add({"numelem": -1}, good, ValueError, "numelem is -1")
            add({"numelem": 1.0}, good, TypeError, "numelem must be an integer, not float")
        for name in ("gatheraxis", "scatteraxis"):
            if name in row.arguments and row.counts_at == "all":
                add({name: 3}, good, IndexError, f"{name} is 3.*3 dimensions")
                add({name: -4}, good, IndexError, f"{name} is -4")
                add({name: 0}, torch.ones(()), IndexError, f"{name}|scatteraxis|gatheraxis")
                add({name: "0"}, good, TypeError, f"{name} must be an integer, not str")
        if row.reduces:
            add({"op": 99}, good, ValueError, "op is 99; the reductions are MAX")
            add({"op": "sum"}, good, TypeError, "op must be a mpicoll.ReduceOp.*not str")
            add({"op": None}, good, TypeError, "op must be")
            integers = torch.ones(4, 3, 2, dtype=torch.int32)
            if not row.prefix:
                add({"op": ReduceOp.AVG}, integers, TypeError, "AVG of torch.int32")
            else:
                add({"op": ReduceOp.AVG}, good, ValueError, "AVG is no prefix reduction")
            add({"op": ReduceOp.MINLOC}, good[..., :1], ValueError, "size 2")
            for op, reduction in REDUCTIONS.items():
                for dtype, (_, kind) in DTYPES.items():
                    if kind not in reduction.kinds and not (row.prefix and op is ReduceOp.AVG):
                        x = oracle.values((4, 3, 2), dtype, 0)
                        add({"op": op}, x, TypeError, f"{op.name} of {dtype} does not exist")
    return cases


def test_wrong_arguments(works):
    """One rank's mistake raises there, before anything is sent; the others know nothing of it."""
    for i, (row, wrong, x, error, words) in enumerate(wrong_arguments()):
        if i % SIZE != RANK:
            continue
        p = oracle.problem(row.name, SIZE, op=ReduceOp.SUM)
        with pytest.raises(error, match=words) as caught:
            getattr(COMM, row.name)(x, **(p.mine(RANK) | wrong))
        assert str(caught.value).startswith(f"{row.name}"), (row.name, wrong, str(caught.value))
        if row.inplace:
            with pytest.raises(error, match=words):
                getattr(COMM, row.name + "_")(x, **(p.mine(RANK) | wrong))
    works()


def raises_everywhere(function, error, words, works):
    with pytest.raises(error, match=words):
        function()
    works()


@every_block_row
def test_what_only_all_ranks_know(row, works):
    """Sizes, shapes, dtypes, axes and roots that do not fit raise the same error on every rank."""
    op = ReduceOp.SUM if row.reduces else None
    p = oracle.problem(row.name, SIZE, op=op, old=[2] * SIZE, new=[1] * SIZE)
    x = p.tensors(torch.float32)[RANK]

    def call(x=x, **changed):
        return getattr(COMM, row.name)(x, **(p.mine(RANK) | changed))

    last = RANK == SIZE - 1
    if "numelem" in row.arguments:
        raises_everywhere(
            lambda: call(numelem=2 if last else 1), ValueError,
            f"numelem adds up to {SIZE + 1}.*must sum to {SIZE}", works,
        )  # fmt: skip
    if row.counts_at == "all":
        raises_everywhere(
            lambda: call(x.double() if last else x), TypeError, "differ in dtype", works
        )
        raises_everywhere(
            lambda: call(x.repeat(1, 1, 2) if last else x),
            ValueError,
            "shapes must be equal",
            works,
        )
        raises_everywhere(
            lambda: call(x.unsqueeze(0) if last else x), ValueError, "shapes must be equal", works
        )
    for name in ("gatheraxis", "scatteraxis"):
        if name in row.arguments:
            raises_everywhere(
                lambda name=name: call(**{name: 2 if last else p.arguments[name]}), ValueError,
                f"disagree on {name}", works,
            )  # fmt: skip
    if "root" in row.arguments:
        raises_everywhere(
            lambda: call(root=1 if last else 0), ValueError, "disagree on root", works
        )
    if row.counts_at == "root":  # only the root knows how many axes there are
        raises_everywhere(lambda: call(scatteraxis=3), IndexError, "scatteraxis is 3", works)
        raises_everywhere(
            lambda: call(torch.ones(()) if RANK == 0 else x), IndexError, "0-d", works
        )


if SIZE == 1:
    del test_what_only_all_ranks_know  # takes two ranks to disagree


# ---------------------------------------------------------------- the graph


@every_row
def test_repeated_backward(row):
    """With the graph retained, backward communicates again and gives the same."""
    op = ReduceOp.SUM if row.reduces else None
    p = oracle.problem(row.name, SIZE, op=op)
    x = p.tensors(torch.float64)[RANK].requires_grad_()
    y = oracle.outer(p.call(COMM, oracle.inner(x)))
    w = oracle.weights_for(y, RANK, "")
    (first,) = torch.autograd.grad(y, x, w, retain_graph=True)
    (second,) = torch.autograd.grad(y, x, w)
    oracle.check(second, first, str(p), exact=True)


@every_row
def test_no_graph_where_none_is_wanted(row):
    p = oracle.problem(row.name, SIZE, op=ReduceOp.SUM if row.reduces else None)
    x = p.tensors(torch.float64)[RANK]
    assert not p.call(COMM, x).requires_grad
    x.requires_grad_()
    with torch.no_grad():
        assert not p.call(COMM, x).requires_grad
    with torch.inference_mode():
        y = p.call(COMM, x)
    oracle.check(y, p.reference(p.tensors(torch.float64))[RANK], str(p), exact=False)
    y = p.call(COMM, x)
    assert y.requires_grad
    assert y.grad_fn is not None


@every_row
def test_subgroups(row):
    """Roots and blocks count ranks of the communicator, not of the world."""
    part = COMM.Split(RANK % 2, -RANK)  # every second rank, in reverse
    members = [r for r in range(SIZE) if r % 2 == RANK % 2][::-1]
    assert (part.rank, part.size) == (members.index(RANK), len(members))
    op = ReduceOp.SUM if row.reduces else None
    for root in range(part.size) if "root" in row.arguments else [0]:
        p = oracle.problem(row.name, part.size, op=op, root=root)
        tensors = p.tensors(torch.float64, f"half {RANK % 2}")
        want = oracle.simulate(
            nonlinear(p),
            tensors,
        )
        y, g, h = oracle.differentiate(
            lambda x, p=p: oracle.outer(p.call(part, oracle.inner(x))),
            tensors[part.rank],
            part.rank,
        )
        oracle.check(y, want.results[part.rank], f"{p}: value", exact=False)
        oracle.check(g, want.gradients[part.rank], f"{p}: gradient", exact=False)
        oracle.check(h, want.curvatures[part.rank], f"{p}: second derivative", exact=False)
    part.Free()


@every_row
def test_many_ways_to_name_a_reduction(row):
    """mpicoll.ReduceOp, MPI_* constants, plain integers, torch's and mpi4py's."""
    if not row.reduces:
        assert "op" not in row.arguments
        return
    from mpi4py import MPI

    p = oracle.problem(row.name, SIZE, op=ReduceOp.PROD)
    x = p.tensors(torch.int64)
    want = p.reference(x)[RANK]
    torch_op = torch.distributed.ReduceOp
    for op in (ReduceOp.PROD, ReduceOp.PRODUCT, mpicoll.MPI_PROD, 3, torch_op.PRODUCT,
               torch_op(torch_op.PRODUCT), MPI.PROD):  # fmt: skip
        p.arguments["op"] = op
        oracle.check(p.call(COMM, x[RANK]), want, f"{row.name} with {op!r}", exact=True)
