"""The ten functions of ``mpicoll.nn.functional`` against plain torch, on all ranks."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

import oracle
import pytest
import torch
from mpi4py import MPI

import mpicoll
import mpicoll.nn.functional as mf
from mpicoll.ops import OPERATIONS, REDUCTIONS, ReduceOp
from mpicoll.staging.dtypes import DTYPES

COMM = mpicoll.COMM_WORLD
RANK, SIZE = COMM.rank, COMM.size
Shape = tuple[int, ...]


def rows_between(sender: int, receiver: int) -> int:
    """How many rows one rank sends another: uneven, some none."""
    return (2 * sender + receiver) % 4


@dataclass
class Function:
    """One function: what goes in and comes out on every rank of W, and a reference.

    `call` takes this rank's inputs, the tensors to be filled, and the keywords `op`, `root` and
    `group`; `reference` takes ``xs[rank][i]`` and gives ``ys[rank][i]``.
    """

    name: str
    takes: Callable[[int, int], list[Shape]]  # W, rank
    fills: Callable[[int, int], list[Shape]] | None
    reference: Callable
    call: Callable
    reduces: bool = False
    rooted: bool = False

    @property
    def reductions(self) -> list[ReduceOp | None]:
        return list(REDUCTIONS) if self.reduces else [None]

    @property
    def roots(self) -> list[int]:
        return list(range(SIZE)) if self.rooted else [0]

    def inputs(self, dtype: torch.dtype, size: int = SIZE, salt: str = "") -> list[list]:
        return [
            [oracle.values(s, dtype, 10 * r + i, salt) for i, s in enumerate(self.takes(size, r))]
            for r in range(size)
        ]

    def targets(self, dtype: torch.dtype, size: int, rank: int) -> list[torch.Tensor]:
        """Fresh tensors to be filled, with rubbish in them."""
        shapes = self.fills(size, rank) if self.fills else []
        return [oracle.values(s, dtype, 7, "rubbish") for s in shapes]

    def run(self, xs, *, op=None, root=0, group=None, rank=RANK, size=SIZE, targets=None) -> list:
        targets = self.targets(xs[0].dtype, size, rank) if targets is None else targets
        ys = self.call(xs, targets, op, root, group)
        return list(ys) if isinstance(ys, (tuple, list)) else [ys]

    def flat(self, op, root, size, nonlinear=False) -> Callable:
        """The reference from all ranks' tensors in one list to all ranks' results in one list."""
        n = len(self.takes(size, 0))

        def function(xs):
            xs = [oracle.inner(x) for x in xs] if nonlinear else xs
            ys = self.reference([xs[r * n : (r + 1) * n] for r in range(size)], op, root)
            flat = [y for mine in ys for y in mine]
            return [oracle.outer(y) for y in flat] if nonlinear else flat

        return function


def one(*shape: int) -> Callable[[int, int], list[Shape]]:
    return lambda size, rank: [shape]


def reduced(tensors, op):
    return REDUCTIONS[op].reference(torch.stack(list(tensors)))


def zeros_off(ys, root):
    return [y if r == root else [torch.zeros_like(t) for t in y] for r, y in enumerate(ys)]


def cut(x, sizes):
    return list(x.split(list(sizes)))


def _all_to_all_single_reference(xs, op, root):
    size = len(xs)
    parts = [cut(x[0], [rows_between(r, s) for s in range(size)]) for r, x in enumerate(xs)]
    return [[torch.cat([parts[s][r] for s in range(size)])] for r in range(size)]


def _all_to_all_single(xs, out, op, root, group):
    who = mpicoll.COMM_WORLD if group is None else group
    rank, size = who.rank, who.size
    return mf.all_to_all_single(
        out[0], xs[0],
        [rows_between(s, rank) for s in range(size)],
        [rows_between(rank, s) for s in range(size)],
        group,
    )  # fmt: skip


FUNCTIONS = [
    Function(
        "broadcast", one(3, 2), None,
        lambda xs, op, root: [[xs[root][0].clone()] for _ in xs],
        lambda xs, out, op, root, group: mf.broadcast(xs[0], root, group), rooted=True,
    ),
    Function(
        "reduce", one(3, 2), None,
        lambda xs, op, root: zeros_off([[reduced([x[0] for x in xs], op)] for _ in xs], root),
        lambda xs, out, op, root, group: mf.reduce(xs[0], root, op, group),
        reduces=True, rooted=True,
    ),
    Function(
        "all_reduce", one(3, 2), None,
        lambda xs, op, root: [[reduced([x[0] for x in xs], op)]] * len(xs),
        lambda xs, out, op, root, group: mf.all_reduce(xs[0], op, group), reduces=True,
    ),
    Function(
        "gather", one(3, 2), None,
        lambda xs, op, root: zeros_off([[x[0].clone() for x in xs] for _ in xs], root),
        lambda xs, out, op, root, group: mf.gather(xs[0], root, group), rooted=True,
    ),
    Function(
        "scatter", lambda size, rank: [(i, 2) if i % 2 else (3,) for i in range(size)], None,
        lambda xs, op, root: [[xs[root][r].clone()] for r in range(len(xs))],
        lambda xs, out, op, root, group: mf.scatter(xs, root, group), rooted=True,
    ),
    Function(
        "reduce_scatter", lambda size, rank: [(3, 2)] * size, one(3, 2),
        lambda xs, op, root: [[reduced([x[r] for x in xs], op)] for r in range(len(xs))],
        lambda xs, out, op, root, group: mf.reduce_scatter(out[0], xs, op, group), reduces=True,
    ),
    Function(
        "all_gather", one(3, 2), None,
        lambda xs, op, root: [[x[0].clone() for x in xs] for _ in xs],
        lambda xs, out, op, root, group: mf.all_gather(xs[0], group),
    ),
    Function(
        "all_gather_single", one(3, 2), lambda size, rank: [(3 * size, 2)],
        lambda xs, op, root: [[torch.cat([x[0] for x in xs])] for _ in xs],
        lambda xs, out, op, root, group: mf.all_gather_single(out[0], xs[0], group),
    ),
    Function(
        "all_to_all",
        lambda size, rank: [(rows_between(rank, s), 2) for s in range(size)],
        lambda size, rank: [(rows_between(s, rank), 2) for s in range(size)],
        lambda xs, op, root: [[x[r].clone() for x in xs] for r in range(len(xs))],
        lambda xs, out, op, root, group: mf.all_to_all(out, xs, group),
    ),
    Function(
        "all_to_all_single",
        lambda size, rank: [(sum(rows_between(rank, s) for s in range(size)), 2)],
        lambda size, rank: [(sum(rows_between(s, rank) for s in range(size)), 2)],
        _all_to_all_single_reference,
        _all_to_all_single,
    ),
]  # fmt: skip

every_function = pytest.mark.parametrize("f", FUNCTIONS, ids=lambda f: f.name)
every_filling_function = pytest.mark.parametrize(
    "f", [f for f in FUNCTIONS if f.fills], ids=lambda f: f.name
)
every_reducing_function = pytest.mark.parametrize(
    "f", [f for f in FUNCTIONS if f.reduces], ids=lambda f: f.name
)
every_rooted_function = pytest.mark.parametrize(
    "f", [f for f in FUNCTIONS if f.rooted], ids=lambda f: f.name
)


def test_these_are_all_the_functions():
    assert {f.name for f in FUNCTIONS} == set(mf.__all__) - {"ReduceOp"}
    named = {row.functional for row in OPERATIONS.values()} - {None}
    assert named <= {f.name for f in FUNCTIONS}


def check_all(got, want, what, exact=False):
    assert len(got) == len(want), f"{what}: {len(got)} tensors, not {len(want)}"
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        oracle.check(a, b, f"{what} [{i}]", exact)


def compare(f, dtype, op, root, group=None, rank=RANK, size=SIZE, xs=None, salt="", run=None):
    """Value, gradient and second derivative between two nonlinear functions."""
    what = f"{f.name}, {dtype}, op {op}, root {root} of {size}"
    xs = f.inputs(dtype, size, salt) if xs is None else xs
    n = len(xs[0])
    answers = oracle.simulate(
        f.flat(op, root, size, nonlinear=True), [x for mine in xs for x in mine], salt
    )
    outputs = len(answers.results) // size

    def function(mine):
        mine = [oracle.inner(x) for x in mine]
        ys = (run or f.run)(mine, op=op, root=root, group=group, rank=rank, size=size)
        return [oracle.outer(y) for y in ys]

    ys, gs, hs = oracle.differentiate_lists(function, xs[rank], rank, salt)
    here = slice(rank * n, (rank + 1) * n)
    check_all(ys, answers.results[rank * outputs : (rank + 1) * outputs], f"{what}: values")
    check_all(gs, answers.gradients[here], f"{what}: gradients")
    check_all(hs, answers.curvatures[here], f"{what}: second derivatives")


# ---------------------------------------------------------------- values and derivatives


@every_function
def test_values(f, everyone):
    """Every reduction, dtype and root; what all ranks get is the same bit for bit."""
    seen = []
    for op in f.reductions:
        for k, dtype in enumerate(oracle.dtypes_of(op)):
            root = f.roots[k % len(f.roots)]
            what = f"{f.name}, {dtype}, op {op}, root {root}"
            xs = f.inputs(dtype)
            known = [x.clone() for x in xs[RANK]]
            if op is None and dtype.itemsize < 16 and not dtype.is_complex:
                moved = [[oracle.bits(x) for x in mine] for mine in xs]
                want = [y.view(dtype) for y in f.reference(moved, op, root)[RANK]]
            elif dtype == torch.complex32:
                moved = [[x.view(torch.int32) for x in mine] for mine in xs]
                want = [y.view(dtype) for y in f.reference(moved, op, root)[RANK]]
            else:
                want = f.reference(xs, op, root)[RANK]
            got = f.run(xs[RANK], op=op, root=root)
            check_all(got, want, what, exact=not oracle.rounds(op, dtype))
            for y in got:
                oracle.check_plain(y, y, what)
            check_all(xs[RANK], known, f"{what}: the input has changed", exact=True)
            seen.append((what, [hashlib.sha1(oracle.image(y)).hexdigest() for y in got]))
    if f.name in ("broadcast", "all_reduce", "all_gather", "all_gather_single"):
        for r, others in enumerate(everyone(seen)):
            differ = [a[0] for a, b in zip(seen, others, strict=True) if a != b]
            assert not differ, f"rank {r} has other bits in {differ}"


def test_long_results_are_the_same_everywhere(everyone):
    """Bit for bit, also where the library cuts the data up."""
    seen = {}
    for dtype in (torch.float32, torch.float64, torch.complex64, torch.complex128, torch.bfloat16,
                  torch.float16):  # fmt: skip
        for op in (ReduceOp.SUM, ReduceOp.PROD, ReduceOp.AVG, ReduceOp.MAX):
            for n in (1, 7, 1001, 40_003):
                if DTYPES[dtype][1] not in REDUCTIONS[op].kinds:
                    continue
                x = oracle.values((n,), dtype, RANK)
                y = mf.all_reduce(x, op)
                seen[f"{dtype} {op.name} {n}"] = hashlib.sha1(oracle.image(y)).hexdigest()
                again = mf.all_reduce(x, op)
                assert oracle.image(again) == oracle.image(y), (
                    f"{dtype} {op.name} {n}: not repeatable"
                )
    for r, others in enumerate(everyone(seen)):
        differ = [k for k in seen if seen[k] != others[k]]
        assert not differ, f"rank {r} has other bits in {differ}"


@every_function
def test_derivatives(f):
    for op in f.reductions:
        if op is not None and not REDUCTIONS[op].differentiable:
            continue
        for dtype in (torch.float64, torch.complex128):
            if dtype in oracle.dtypes_of(op):
                for root in f.roots:
                    compare(f, dtype, op, root)


@every_function
def test_gradients_keep_the_dtype(f):
    for op in f.reductions:
        if op is not None and not REDUCTIONS[op].differentiable:
            continue
        for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.complex64):
            if dtype not in oracle.dtypes_of(op):
                continue
            wide = torch.complex128 if dtype.is_complex else torch.float64
            root = f.roots[-1]
            xs = f.inputs(dtype)
            n = len(xs[0])
            flat = [x.to(wide) for mine in xs for x in mine]
            function = f.flat(op, root, SIZE)
            gs = [oracle.weights_for(y, k, "short").to(dtype) for k, y in enumerate(function(flat))]
            outputs = len(gs) // SIZE
            want = oracle.pull_short(
                lambda op, f=f, root=root: f.flat(op, root, SIZE),
                op, flat, [g.to(wide) for g in gs], dtype,
            )  # fmt: skip
            mine = [x.requires_grad_() for x in xs[RANK]]
            ys = f.run(mine, op=op, root=root)
            got = torch.autograd.grad(ys, mine, gs[RANK * outputs : (RANK + 1) * outputs])
            check_all(
                got, want[RANK * n : (RANK + 1) * n], f"{f.name}, {dtype}, op {op}, root {root}"
            )


@every_function
def test_layouts(f):
    """Any layout of the inputs and of the gradients."""
    op = ReduceOp.SUM if f.reduces else None
    root = f.roots[-1]
    for dtype in (torch.float64, torch.complex128):
        xs = f.inputs(dtype)
        n = len(xs[0])
        names = [k for k in oracle.layouts(xs[0][0]) if k != "odd singleton strides"]
        for k in range(len(names)):
            laid = [
                [oracle.layouts(x)[names[(k + r + i) % len(names)]] for i, x in enumerate(mine)]
                for r, mine in enumerate(xs)
            ]
            what = f"{f.name}, {dtype}, {[names[(k + RANK + i) % len(names)] for i in range(n)]}"
            flat = [x for mine in laid for x in mine]
            function = f.flat(op, root, SIZE)
            ys = function([x.resolve_conj().resolve_neg().clone() for x in flat])
            gs = [
                oracle.layouts(oracle.weights_for(y, j, ""))[names[(k + j) % len(names)]]
                for j, y in enumerate(ys)
            ]
            outputs = len(ys) // SIZE
            here = slice(RANK * outputs, (RANK + 1) * outputs)
            want = oracle.pull(function, flat, [g.clone() for g in gs])
            mine = [x.detach().requires_grad_() for x in laid[RANK]]
            got = f.run(mine, op=op, root=root)
            check_all(got, ys[here], what)
            got = torch.autograd.grad(got, mine, gs[here])
            check_all(got, want[RANK * n : (RANK + 1) * n], f"{what}: gradient")


@every_function
def test_subgroups(f):
    """Roots and blocks count ranks of the group."""
    op = ReduceOp.SUM if f.reduces else None
    members = [r for r in range(SIZE) if r % 2 == RANK % 2][::-1]
    part = COMM.Split(RANK % 2, -RANK)
    mine, size = members.index(RANK), len(members)
    for root in range(size) if f.rooted else [0]:
        compare(f, torch.float64, op, root, part, mine, size, salt=f"half {RANK % 2}")
    part.Free()


@every_function
def test_ways_to_name_a_group(f, comm, works):
    """None, a Communicator, and mpi4py's communicators are interchangeable."""
    op = ReduceOp.PROD if f.reduces else None
    xs = f.inputs(torch.float64)
    want = f.reference(xs, op, 0)[RANK]
    dup = COMM.Dup()
    reversed_ = comm.Split(0, -RANK)
    for group in (None, COMM, MPI.COMM_WORLD, comm, comm, dup):
        check_all(f.run(xs[RANK], op=op, group=group), want, f"{f.name}, group {group!r}")
    # Ranks are those of the group, here the other way round.
    got = f.run(xs[reversed_.rank], op=op, group=reversed_, rank=reversed_.rank)
    check_all(got, f.reference(xs, op, 0)[reversed_.rank], f"{f.name}, reversed")
    reversed_.Free()
    dup.Free()
    for wrong in (0, "world", [COMM]):
        with pytest.raises(
            TypeError, match=f"{f.name}: group must be None.*{type(wrong).__name__}"
        ):
            f.call(xs[RANK], f.targets(torch.float64, SIZE, RANK), op, 0, wrong) if (
                f.name != "all_to_all_single"
            ) else mf.all_to_all_single(xs[RANK][0], xs[RANK][0], group=wrong)
    works()


@every_reducing_function
def test_ways_to_name_a_reduction(f, works):
    xs = f.inputs(torch.float64)
    theirs = torch.distributed.ReduceOp
    names = {
        ReduceOp.PROD: (mpicoll.MPI_PROD, 3, theirs.PRODUCT, theirs(theirs.PRODUCT), MPI.PROD),
        ReduceOp.MAX: (mpicoll.MPI_MAX, 0, theirs.MAX, MPI.MAX),
        ReduceOp.SUM: (mpicoll.MPI_SUM, 2, theirs.SUM, MPI.SUM),
        ReduceOp.AVG: (12, theirs.AVG, ReduceOp(12)),
        ReduceOp.MINLOC: (10, MPI.MINLOC),
        ReduceOp.LXOR: (8, MPI.LXOR),
    }
    for op, spellings in names.items():
        want = f.reference(xs, op, 0)[RANK]
        for spelling in (op, *spellings):
            check_all(f.run(xs[RANK], op=spelling), want, f"{f.name}, {spelling!r}")
    check_all(
        f.run([x.to(torch.int32) for x in xs[RANK]], op=theirs.BXOR),
        f.reference([[x.to(torch.int32) for x in mine] for mine in xs], ReduceOp.BXOR, 0)[RANK],
        f"{f.name}, torch's BXOR",
    )
    if f.name != "reduce_scatter":  # SUM is the default
        x = xs[RANK][0]
        got = mf.all_reduce(x) if f.name == "all_reduce" else mf.reduce(x, 0)
        check_all([got], f.reference(xs, ReduceOp.SUM, 0)[RANK], f"{f.name}, no op")
    for wrong, error in (("sum", TypeError), (None, TypeError), (99, ValueError), (1.0, TypeError)):
        with pytest.raises(error, match=f"{f.name}: op"):
            f.run(xs[RANK], op=wrong)
    with pytest.raises(ValueError, match="does not offer"):
        f.run(xs[RANK], op=theirs.PREMUL_SUM)
    with pytest.raises(ValueError, match="predefined operations"):
        f.run(xs[RANK], op=MPI.REPLACE)
    works()


@every_reducing_function
def test_no_gradient(f, works):
    for op, row in REDUCTIONS.items():
        if row.differentiable:
            continue
        for dtype in oracle.dtypes_of(op):
            if DTYPES[dtype][1] not in oracle.GRADIENT_KINDS:
                continue
            xs = f.inputs(dtype)
            if RANK == SIZE - 1:  # nothing is sent: the others need not take part
                for x in xs[RANK]:
                    x.requires_grad_()
                with pytest.raises(RuntimeError, match=f"{f.name}: {op.name} has no gradient"):
                    f.run(xs[RANK], op=op)
            works()


@every_function
def test_unused_results_count_as_zeros(f):
    """Every rank uses other results in its loss; backward still communicates in full."""
    op = ReduceOp.SUM if f.reduces else None
    for root in f.roots:
        xs = f.inputs(torch.float64)
        n = len(xs[0])
        flat = [x for mine in xs for x in mine]
        function = f.flat(op, root, SIZE)
        ys = function(flat)
        outputs = len(ys) // SIZE
        used = {r: {r % outputs, (r * r + 1) % outputs} if r != 1 else {0} for r in range(SIZE)}
        gs = [
            oracle.weights_for(y, k, "") * (k % outputs in used[k // outputs])
            for k, y in enumerate(ys)
        ]
        want = oracle.pull(function, flat, gs)[RANK * n : (RANK + 1) * n]
        mine = [x.requires_grad_() for x in xs[RANK]]
        got = f.run(mine, op=op, root=root)
        total = sum((got[i] * gs[RANK * outputs + i]).sum() for i in used[RANK])
        total.backward()
        check_all([x.grad for x in mine], want, f"{f.name}, root {root}, used {used[RANK]}")


@every_function
def test_some_inputs_without_gradient(f):
    """An input that does not require grad gets none and changes nothing for the others."""
    n = len(f.takes(SIZE, 0))
    if n == 1:
        return  # its node would not run: the caller's duty
    op = ReduceOp.SUM if f.reduces else None
    for root in f.roots:
        xs = f.inputs(torch.float64)
        flat = [x for mine in xs for x in mine]
        function = f.flat(op, root, SIZE)
        gs = [oracle.weights_for(y, k, "") for k, y in enumerate(function(flat))]
        outputs = len(gs) // SIZE
        want = oracle.pull(function, flat, gs)[RANK * n : (RANK + 1) * n]
        wanting = {0, n - 1} if RANK % 2 else {n // 2}
        mine = [x.requires_grad_(i in wanting) for i, x in enumerate(xs[RANK])]
        got = f.run(mine, op=op, root=root)
        torch.autograd.backward(got, gs[RANK * outputs : (RANK + 1) * outputs])
        for i, x in enumerate(mine):
            if i in wanting:
                oracle.check(x.grad, want[i], f"{f.name}, root {root}: input {i}", exact=False)
            else:
                assert x.grad is None


@every_function
def test_results_may_be_written(f):
    """What a function returns is an ordinary tensor: in-place operations on it are allowed."""
    op = ReduceOp.SUM if f.reduces else None
    xs = f.inputs(torch.float64)
    mine = [x.requires_grad_() for x in xs[RANK]]
    ys = f.run([x * 1 for x in mine], op=op)
    for y in ys:
        y.mul_(2)
    sum(y.sum() for y in ys).backward()
    n = len(xs[0])
    flat = [x.detach() for m in xs for x in m]
    function = f.flat(op, 0, SIZE)
    gs = [torch.full_like(y, 2.0) for y in function(flat)]
    want = oracle.pull(function, flat, gs)[RANK * n : (RANK + 1) * n]
    check_all([x.grad for x in mine], want, f.name)


# ---------------------------------------------------------------- output arguments


@every_filling_function
def test_output_is_returned(f):
    """``y is output``, the version counter moves, and requires_grad is set, as torch does."""
    op = ReduceOp.SUM if f.reduces else None
    for wants in (False, True):
        xs = f.inputs(torch.float64)
        targets = f.targets(torch.float64, SIZE, RANK)
        versions = [t._version for t in targets]
        mine = [x.requires_grad_(wants) for x in xs[RANK]]
        ys = f.run(mine, op=op, targets=targets)
        for t, y, version in zip(targets, ys, versions, strict=True):
            assert y is t
            assert t._version == version + 1, f"version {t._version} after {version}"
            assert t.requires_grad == wants
            assert (t.grad_fn is not None) == wants
        with torch.no_grad():
            targets = f.targets(torch.float64, SIZE, RANK)
            f.run(mine, op=op, targets=targets)
            assert not any(t.requires_grad for t in targets)
            assert all(t._version == 1 for t in targets)


@every_filling_function
def test_strided_outputs(f):
    """An output of any layout is filled, and nothing around it."""
    op = ReduceOp.SUM if f.reduces else None
    for dtype in (torch.float64, torch.bfloat16, torch.complex128, torch.uint8):
        xs = f.inputs(dtype)
        want = f.reference(xs, op, 0)[RANK]
        exact = not oracle.rounds(op, dtype)
        for wants in (False, True):
            if wants and dtype is torch.uint8:
                continue
            memories, targets = [], []
            for y in want:
                memory = torch.full((y.shape[0] * 5 + 3, 11), 77, dtype=dtype)
                memories.append(memory)
                targets.append(memory.as_strided(y.shape, (44, 5), 12))
            mine = [x.detach().requires_grad_(wants) for x in xs[RANK]]
            ys = f.run(mine, op=op, targets=targets)
            for y, t, w, memory in zip(ys, targets, want, memories, strict=True):
                assert y is t
                assert t.requires_grad == wants
                oracle.check(t, w, f"{f.name}, {dtype}, strided", exact)
                expected = torch.full_like(memory, 77)
                expected.as_strided(w.shape, (44, 5), 12).copy_(w)
                oracle.check(memory, expected, f"{f.name}, {dtype}, memory around it", exact)
            if dtype.is_complex:  # a conjugated view as output
                targets = [torch.zeros_like(w).conj() for w in want]
                f.run([x.detach() for x in mine], op=op, targets=targets)
                check_all(targets, want, f"{f.name}, {dtype}, conjugated output", exact)
            elif dtype is torch.float64:
                targets = [torch.complex(t, t).conj().imag for t in map(torch.zeros_like, want)]
                assert all(t.is_neg() for t in targets)
                f.run([x.detach() for x in mine], op=op, targets=targets)
                check_all(targets, want, f"{f.name}, {dtype}, negated output", exact)


@every_filling_function
def test_outputs_that_are_views(f):
    """A view of a tensor with or without history: torch's in-place rules, gradients included."""
    op = ReduceOp.SUM if f.reduces else None
    xs = f.inputs(torch.float64)
    n = len(xs[0])
    function = f.flat(op, 0, SIZE)
    flat = [x for m in xs for x in m]
    ys = function(flat)
    outputs = len(ys) // SIZE
    here = slice(RANK * outputs, (RANK + 1) * outputs)
    gs = [oracle.weights_for(y, k, "") for k, y in enumerate(ys)]
    want = oracle.pull(function, flat, gs)[RANK * n : (RANK + 1) * n]
    for history in (False, True):
        leaves = [torch.ones(y.shape[0] + 2, 2, dtype=torch.float64) for y in ys[here]]
        if history:
            leaves = [leaf.requires_grad_() for leaf in leaves]
        bases = [leaf * 3 for leaf in leaves]
        targets = [base[1:-1] for base in bases]
        mine = [x.detach().clone().requires_grad_() for x in xs[RANK]]
        got = f.run([x * 1 for x in mine], op=op, targets=targets)
        assert all(y is t for y, t in zip(got, targets, strict=True))
        for base, y in zip(bases, ys[here], strict=True):
            assert base.requires_grad
            oracle.check(base[1:-1], y, f"{f.name}: base", exact=False)
            assert (base[0] == 3).all()
            assert (base[-1] == 3).all()
        # Through the bases, of which only the rows outside come from the leaves.
        total = sum(
            (base[1:-1] * g).sum() + base[0].sum() for base, g in zip(bases, gs[here], strict=True)
        )
        total.backward()
        check_all([x.grad for x in mine], want, f"{f.name}, view, history {history}")
        if history:
            for leaf in leaves:
                expected = torch.zeros_like(leaf)
                expected[0] = 3
                oracle.check(leaf.grad, expected, f"{f.name}: gradient of the base", exact=True)


@every_filling_function
def test_outputs_with_history(f):
    """What an output was before gets a zero gradient; second derivatives pass the node, too."""
    op = ReduceOp.SUM if f.reduces else None
    olds = []

    def run(mine, *, op, root, group, rank, size):
        leaves = [t.requires_grad_() for t in f.targets(mine[0].dtype, size, rank)]
        olds.extend(leaves)
        return f.run(mine, op=op, targets=[leaf * 2 for leaf in leaves])

    compare(f, torch.float64, op, 0, run=run)
    xs = f.inputs(torch.float64)
    leaf = [t.requires_grad_() for t in f.targets(torch.float64, SIZE, RANK)]
    ys = f.run([x.requires_grad_() for x in xs[RANK]], op=op, targets=[t * 2 for t in leaf])
    sum((y * y).sum() for y in ys).backward()
    for t in leaf:
        assert t.grad is None or not t.grad.any()
    for x in xs[RANK]:
        assert x.grad is not None


@every_filling_function
def test_leaf_outputs_are_rejected(f, works):
    """Before anything is sent: the others need not take part. Without grad mode they are fine."""
    op = ReduceOp.SUM if f.reduces else None
    xs = f.inputs(torch.float64)
    views = (lambda t: t, lambda t: t[:], lambda t: t.view(t.shape))
    for number in range(len(f.targets(torch.float64, SIZE, RANK))):
        for view in views:
            if number % SIZE == RANK:
                targets = f.targets(torch.float64, SIZE, RANK)
                before = targets[number].clone()
                targets[number].requires_grad_()
                leaf = targets[number]
                targets[number] = view(leaf)
                with pytest.raises(RuntimeError, match=f"{f.name}: output.*leaf"):
                    f.run(xs[RANK], op=op, targets=targets)
                oracle.check(leaf, before, "the leaf", exact=True)
            works()
    targets = [t.requires_grad_() for t in f.targets(torch.float64, SIZE, RANK)]
    with torch.no_grad():
        f.run(xs[RANK], op=op, targets=targets)
    check_all(targets, f.reference(xs, op, 0)[RANK], f"{f.name}, no_grad")
    assert all(t.is_leaf and t.requires_grad for t in targets)


@every_filling_function
def test_saved_outputs_are_noticed(f):
    op = ReduceOp.SUM if f.reduces else None
    xs = f.inputs(torch.float64)
    targets = f.targets(torch.float64, SIZE, RANK)
    weights = [torch.ones_like(t).requires_grad_() for t in targets]
    kept = sum((w * t).sum() for w, t in zip(weights, targets, strict=True))  # saves the targets
    f.run(xs[RANK], op=op, targets=targets)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        kept.backward()


@every_filling_function
def test_wrong_outputs(f, works):
    op = ReduceOp.SUM if f.reduces else None
    xs = f.inputs(torch.float64)

    def run(change):
        targets = f.targets(torch.float64, SIZE, RANK)
        targets[0] = change(targets[0])
        f.run(xs[RANK], op=op, targets=targets)

    if RANK == SIZE - 1:
        with pytest.raises(TypeError, match=f"{f.name}: output.*torch.float32"):
            run(lambda t: t.float())
        with pytest.raises(TypeError, match=r"must be a torch\.Tensor"):
            run(lambda t: None)
        with pytest.raises(TypeError, match="meta"):
            run(lambda t: t.to("meta"))
        with pytest.raises(ValueError, match="expanded"):
            run(lambda t: torch.zeros(1, 2, dtype=t.dtype).expand(max(2, t.shape[0]), 2))
    works()
    if f.name != "all_to_all":  # whose sizes only the ranks together know
        if RANK == 0:
            with pytest.raises(ValueError, match=f"{f.name}: "):
                run(lambda t: torch.zeros(t.shape[0], 3, dtype=t.dtype))
        works()


def test_all_gather_single_shapes():
    """Rank-major on dimension 0: concatenated, or stacked; a 0-d input gives W elements."""
    x = torch.arange(6.0).reshape(3, 2) + 100 * RANK
    everything = [torch.arange(6.0).reshape(3, 2) + 100 * r for r in range(SIZE)]
    x.requires_grad_()
    for shape, want in (
        ((3 * SIZE, 2), torch.cat(everything)),
        ((SIZE, 3, 2), torch.stack(everything)),
    ):
        y = mf.all_gather_single(torch.empty(shape), x)
        oracle.check(y, want, str(shape), exact=True)
        (g,) = torch.autograd.grad(y, x, (RANK + 1.0) * torch.ones(shape))
        assert g.unique().tolist() == [SIZE * (SIZE + 1) / 2]
    y = mf.all_gather_single(torch.empty(SIZE), torch.tensor(RANK + 1.0))
    assert y.tolist() == [r + 1.0 for r in range(SIZE)]


def test_all_to_all_single_even_splits(works):
    """None means equal parts; rows that W does not divide are an error of this rank."""
    x = torch.arange(2.0 * SIZE).reshape(2 * SIZE, 1) + 100 * RANK
    want = torch.cat(
        [torch.tensor([[2.0 * RANK], [2.0 * RANK + 1]]) + 100 * s for s in range(SIZE)]
    )
    for splits in ((), (None, None), ([2] * SIZE, None), (None, [2] * SIZE)):
        y = mf.all_to_all_single(torch.empty(2 * SIZE, 1), x, *splits)
        oracle.check(y, want, str(splits), exact=True)
    if SIZE > 1 and RANK == 0:
        with pytest.raises(ValueError, match=f"{SIZE + 1} rows.*{SIZE} ranks do not divide"):
            mf.all_to_all_single(torch.empty(SIZE + 1, 1), torch.empty(2 * SIZE, 1))
        with pytest.raises(ValueError, match=f"{SIZE + 1} rows.*{SIZE} ranks do not divide"):
            mf.all_to_all_single(torch.empty(2 * SIZE, 1), torch.empty(SIZE + 1, 1))
    if RANK == SIZE - 1:
        with pytest.raises(ValueError, match="output_split_sizes"):
            mf.all_to_all_single(torch.empty(2 * SIZE, 1), x, [2 * SIZE + 1] + [0] * (SIZE - 1))
        with pytest.raises(ValueError, match=r"input_split_sizes\[0\] is -1"):
            mf.all_to_all_single(torch.empty(2 * SIZE, 1), x, None, [-1] * SIZE)
        with pytest.raises(TypeError, match=r"input_split_sizes.*float"):
            mf.all_to_all_single(torch.empty(2 * SIZE, 1), x, None, [2.0] * SIZE)
        with pytest.raises(ValueError, match="0-d"):
            mf.all_to_all_single(torch.empty(2 * SIZE, 1), torch.tensor(1.0))
    works()


@pytest.mark.parametrize("name", ["all_to_all", "all_to_all_single"])
def test_sizes_that_do_not_fit(name, works):
    """What one rank sends and the other expects differ: the same error on all ranks."""

    def call(sends, expected, dtype=torch.float32):
        parts = [torch.ones(n, dtype=dtype) for n in sends]
        targets = [torch.empty(n, dtype=dtype) for n in expected]
        if name == "all_to_all":
            mf.all_to_all(targets, parts)
        else:
            mf.all_to_all_single(torch.cat(targets), torch.cat(parts), expected, sends)

    odd = SIZE - 1
    sends = [2 + (odd == RANK and s == 0) for s in range(SIZE)]
    words = f"rank {odd} sends 3 elements to rank 0, which expects 2"
    with pytest.raises(ValueError, match=words):
        call(sends, [2] * SIZE)
    works()
    if SIZE > 1:
        with pytest.raises(TypeError, match="differ in dtype"):
            call([2] * SIZE, [2] * SIZE, torch.float32 if RANK else torch.float64)
        works()


# ---------------------------------------------------------------- arguments and roots


@every_rooted_function
def test_wrong_roots(f, works):
    """Raised where the mistake is, before anything is sent."""
    name = {"broadcast": "src", "reduce": "dst", "gather": "dst", "scatter": "src"}[f.name]
    op = ReduceOp.SUM if f.reduces else None
    xs = f.inputs(torch.float64)
    if RANK == 0:
        for wrong, error in (
            (SIZE, ValueError),
            (-1, ValueError),
            (0.0, TypeError),
            (None, TypeError),
        ):
            with pytest.raises(error, match=f"{f.name}: {name} "):
                f.run(xs[RANK], op=op, root=wrong)
    works()


@pytest.mark.parametrize("name", [f.name for f in FUNCTIONS])
def test_wrong_tensors(name, works):
    f = next(f for f in FUNCTIONS if f.name == name)
    op = ReduceOp.SUM if f.reduces else None
    if name == "scatter":  # only the source's count: see below
        return
    if RANK == SIZE - 1:
        for wrong, words in (([1.0], "list"), (None, "NoneType"), (3, "int")):
            xs = f.inputs(torch.float64)[RANK]
            xs[0] = wrong
            with pytest.raises(TypeError, match=words):
                f.run(xs, op=op, targets=f.targets(torch.float64, SIZE, RANK))
        xs = f.inputs(torch.float64)[RANK]
        xs[0] = xs[0].to_sparse()
        with pytest.raises(TypeError, match="sparse"):
            f.run(xs, op=op)
        if len(xs) > 1:
            xs = f.inputs(torch.float64)[RANK]
            with pytest.raises(ValueError, match=f"has {SIZE - 1} tensors; the group has {SIZE}"):
                f.run(xs[1:], op=op)
            xs[1] = xs[1].float()
            with pytest.raises(TypeError, match=r"\[1\] has dtype torch.float32"):
                f.run(xs, op=op)
    works()


def test_scatter_placeholders():
    """Off the source the list may be None, empty or anything: the source alone decides."""
    for src in range(SIZE):
        for dtype in (torch.float64, torch.complex64, torch.bfloat16, torch.int16, torch.bool):
            for wants in (False, True):
                if wants and not (dtype.is_floating_point or dtype.is_complex):
                    continue
                for others in (None, [], [torch.zeros(1)], [torch.zeros(2, requires_grad=True)]):
                    tensors = [
                        oracle.values((i + 1, *[2] * i), dtype, i).requires_grad_(wants)
                        for i in range(SIZE)
                    ]
                    y = mf.scatter(tensors if src == RANK else others, src)
                    what = f"scatter from {src}, {dtype}, grad {wants}, others {others}"
                    oracle.check(y, tensors[RANK], what, exact=True)
                    assert y.is_contiguous()
                    assert y.requires_grad == wants, what
                    if not wants:
                        continue
                    y.backward(torch.full_like(y, RANK + 1))
                    if src == RANK:
                        for i, t in enumerate(tensors):
                            oracle.check(t.grad, torch.full_like(t, i + 1), what, exact=True)
                    elif others and others[0].requires_grad:
                        assert others[0].grad.tolist() == [0, 0], what
                        others[0].grad = None


def test_scatter_errors_reach_all_ranks(works):
    good = [torch.ones(2) for _ in range(SIZE)]
    for src in range(SIZE):
        for wrong in (None, good[1:], [*good, good[0]], torch.ones(SIZE), [1.0] * SIZE, "tensors",
                      [t.to_sparse() for t in good]):  # fmt: skip
            expected = (TypeError, ValueError) if src == RANK else ValueError
            with pytest.raises(expected, match="scatter") as caught:
                mf.scatter(wrong if src == RANK else good, src)
            if src != RANK:
                assert f"the source, rank {src}" in str(caught.value)
            works()
        if SIZE > 1:
            mixed = [good[0].double(), *good[1:]]
            with pytest.raises((TypeError, ValueError), match="scatter"):
                mf.scatter(mixed if src == RANK else None, src)
            works()


def test_reduce_scatter_shapes(works):
    """Inputs unlike the output are refused; slices of one tensor are not copied or changed."""
    if RANK == 0:
        with pytest.raises(ValueError, match=r"input_list\[0\] has shape \(3,\), output \(2,\)"):
            mf.reduce_scatter(torch.empty(2), [torch.ones(3)] * SIZE)
    works()
    whole = oracle.values((SIZE, 3), torch.float64, RANK)
    want = sum(oracle.values((SIZE, 3), torch.float64, r)[RANK] for r in range(SIZE))
    for inputs in (list(whole), list(whole.unbind(0)), [row.clone() for row in whole],
                   [whole[i] for i in range(SIZE)]):  # fmt: skip
        y = mf.reduce_scatter(torch.empty(3, dtype=torch.float64), inputs)
        oracle.check(y, want, "rows of one tensor", exact=False)
    # Neighbours in memory that are not rows of one another.
    pool = torch.arange(3.0 * SIZE + 2)
    inputs = [pool[i + (1 if i else 0) : i + 3 + (1 if i else 0)] for i in range(SIZE)]
    y = mf.reduce_scatter(torch.empty(3), inputs)
    oracle.check(y, inputs[RANK] * SIZE, "overlapping slices", exact=False)


def test_output_that_shares_memory_with_the_input():
    """The usual in-place idioms: a rank's own part of the output is its input, and the reverse."""
    whole = torch.zeros(SIZE, 3)
    whole[RANK] = RANK + 1
    mf.all_gather_single(whole, whole[RANK])
    assert whole[:, 0].tolist() == [r + 1.0 for r in range(SIZE)]
    rows = torch.arange(3.0 * SIZE).reshape(SIZE, 3) + RANK
    want = rows[RANK] * SIZE - RANK * SIZE + sum(range(SIZE))
    mf.reduce_scatter(rows[RANK], list(rows))
    oracle.check(rows[RANK], want, "reduce_scatter into a row of its input", exact=True)
    x = torch.arange(float(SIZE)) + 10 * RANK
    mf.all_to_all_single(x, x)
    assert x.tolist() == [10.0 * s + RANK for s in range(SIZE)]
    x = torch.arange(float(SIZE)) + 10 * RANK
    parts = list(x.split(1))
    mf.all_to_all(parts, parts)
    assert x.tolist() == [10.0 * s + RANK for s in range(SIZE)]


def test_golden_numbers():
    """Results and gradients by hand."""
    x = torch.tensor([2.0, 3.0], dtype=torch.float64).mul_(RANK + 1).requires_grad_()
    t = SIZE * (SIZE + 1) / 2
    y = mf.all_reduce(x)
    assert y.tolist() == [2 * t, 3 * t]
    ((RANK + 1) * y.sum()).backward()  # L = sum of all ranks' losses
    assert x.grad.tolist() == [t, t]
    x.grad = None
    parts = mf.all_gather(x)
    assert [p[0].item() for p in parts] == [2.0 * (r + 1) for r in range(SIZE)]
    sum((RANK + 1) * (s + 1) * p.sum() for s, p in enumerate(parts)).backward()
    assert x.grad.tolist() == [t * (RANK + 1)] * 2
    x.grad = None
    y = mf.broadcast(x, SIZE - 1)
    assert y.tolist() == [2.0 * SIZE, 3.0 * SIZE]
    (y.sum() * (RANK + 1)).backward()
    assert x.grad.tolist() == ([t, t] if RANK == SIZE - 1 else [0, 0])
    x.grad = None
    y = mf.reduce(x, 0)
    assert y.tolist() == ([2 * t, 3 * t] if RANK == 0 else [0, 0])
    (y.sum() * (RANK + 5)).backward()
    assert x.grad.tolist() == [5, 5]


@every_function
def test_long_messages(f, limits):
    """With the limits lowered, everything arrives whole, and gradients, too."""
    op = ReduceOp.SUM if f.reduces else None
    for setting in ({"count_limit": 5}, {"chunk_bytes": 40}, {"count_limit": 1}):
        before = limits()
        limits(**setting)
        for dtype in (torch.float64, torch.bfloat16, torch.complex128):
            xs = f.inputs(dtype)
            got = f.run(xs[RANK], op=op, root=SIZE - 1 if f.rooted else 0)
            want = f.reference(xs, op, SIZE - 1 if f.rooted else 0)[RANK]
            what = f"{f.name}, {dtype}, {setting}"
            check_all(got, want, what, exact=not oracle.rounds(op, dtype))
        compare(f, torch.float64, op, f.roots[-1])
        limits(*before)
