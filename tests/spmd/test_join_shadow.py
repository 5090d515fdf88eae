"""``Join([comm])``: values and gradients of the active ranks are those of the active ranks alone.

Every rank computes the expected results of all ranks in one process, with plain torch.
"""

from __future__ import annotations

import pytest
import torch
from groups import several

import mpicoll
import mpicoll.nn.functional as F
from mpicoll.algorithms import CollectiveMismatchError, Join
from mpicoll.ops import OPERATIONS, REDUCTIONS, ReduceOp
from mpicoll.staging.dtypes import DTYPES

SCHEDULES = {
    "first out first": lambda r, size: 1 + r,
    "first out last": lambda r, size: size - r,
    "from the middle": lambda r, size: (3, 0, 2, 1)[r % 4],
}


@pytest.fixture(params=SCHEDULES)
def lengths(request, world):
    """How many iterations every rank does."""
    return [SCHEDULES[request.param](r, world.size) for r in range(world.size)]


def active_in(lengths, k):
    return [r for r, n in enumerate(lengths) if n > k]


def longest(lengths):
    """The rank that is always active."""
    return max(range(len(lengths)), key=lambda r: lengths[r])


def make(r, k, shape, dtype=torch.float64):
    """Distinct on every rank and in every iteration; small integers, exact in every dtype."""
    n = torch.Size(shape).numel()
    values = (torch.arange(n) * 7 + r * 5 + k * 3) % 11 - 4
    return values.reshape(shape).to(dtype)


def run(comm, lengths, apply, reference, shape, *, shapes=None, gradient=True, **options):
    """Iterate under Join and compare with `reference(leaves, active)`, a list of results."""
    rank = comm.rank
    shape_of = shapes or (lambda r, k: shape)
    with Join([comm], **options) as context:
        for k in range(lengths[rank]):
            active = active_in(lengths, k)
            leaves = {r: make(r, k, shape_of(r, k)).requires_grad_(gradient) for r in active}
            mine = make(rank, k, shape_of(rank, k)).requires_grad_(gradient)
            got = apply(mine, k)
            want = reference(leaves, active)[active.index(rank)]
            torch.testing.assert_close(got, want, rtol=0, atol=1e-12)
            if gradient:
                sums = [
                    (y * make(r + 1, k + 1, y.shape)).sum()
                    for r, y in zip(active, reference(leaves, active), strict=True)
                ]
                total = sum(sums)
                if total.requires_grad:  # alone, Exscan gives a constant
                    total.backward()
                (got * make(rank + 1, k + 1, got.shape)).sum().backward()
                expected = leaves[rank].grad
                if expected is None:
                    expected = torch.zeros_like(mine)
                torch.testing.assert_close(mine.grad, expected, rtol=1e-12, atol=1e-12)
    rounds = max(lengths) - lengths[rank]
    assert (context.shadowed > 0) == (rounds > 0)
    return context


def table(name, **arguments):
    """The reference of the table of operations, over the active ranks."""

    def reference(leaves, active):
        given = dict(arguments)
        if "root" in given:
            given["root"] = active.index(given["root"])
        return OPERATIONS[name].reference([leaves[r] for r in active], **given)

    return reference


DIFFERENTIABLE = [op for op, row in REDUCTIONS.items() if row.differentiable]


@pytest.mark.parametrize("op", DIFFERENTIABLE, ids=lambda op: op.name)
def test_allreduce(world, works, lengths, op):
    shape = (3, 2)
    run(world, lengths, lambda x, k: world.Allreduce(x, op), table("Allreduce", op=op), shape)
    run(world, lengths, lambda x, k: F.all_reduce(x, op), table("Allreduce", op=op), shape)
    works()


@pytest.mark.parametrize("op", DIFFERENTIABLE, ids=lambda op: op.name)
def test_reduce(world, works, lengths, op):
    root = longest(lengths)
    expected = table("Reduce", op=op, root=root)
    run(world, lengths, lambda x, k: world.Reduce(x, op, root), expected, (2, 2))
    run(world, lengths, lambda x, k: world.Reduce_(x.clone(), op, root), expected, (2, 2))
    run(world, lengths, lambda x, k: F.reduce(x, root, op), expected, (2, 2))
    works()


@pytest.mark.parametrize("op", REDUCTIONS, ids=lambda op: op.name)
def test_reductions_of_all_dtypes(world, works, lengths, op):
    """The neutral element of every dtype: the least unsigned integer is 0, all bits are set, ..."""
    dtypes = [dtype for dtype, (_, kind) in DTYPES.items() if kind in REDUCTIONS[op].kinds]
    calls = ["Allreduce"] if op is ReduceOp.AVG else ["Allreduce", "Scan", "Exscan"]
    with Join([world]):
        for k in range(lengths[world.rank]):
            active = active_in(lengths, k)
            for dtype in dtypes:
                tensors = {r: make(r, k, (3, 2), torch.int64).abs().to(dtype) for r in active}
                for call in calls:
                    got = getattr(world, call)(tensors[world.rank], op)
                    if op is ReduceOp.AVG and dtype.is_complex:  # real and imaginary parts each
                        got = torch.view_as_real(got)
                        tensors = {r: torch.view_as_real(t) for r, t in tensors.items()}
                    want = OPERATIONS[call].reference([tensors[r] for r in active], op=op)
                    assert torch.equal(got, want[active.index(world.rank)]), (call, dtype, k)
    works()


@pytest.mark.parametrize("name", ["Scan", "Exscan"])
def test_prefix(world, works, lengths, name):
    expected = table(name, op=ReduceOp.SUM)
    run(world, lengths, lambda x, k: getattr(world, name)(x, mpicoll.MPI_SUM), expected, (3,))
    works()


@pytest.mark.parametrize("inplace", [False, True])
def test_bcast(world, works, lengths, inplace):
    root = longest(lengths)

    def apply(x, k):
        return world.Bcast_(x.clone(), root) if inplace else world.Bcast(x, root)

    run(world, lengths, apply, table("Bcast", root=root), (2, 3))
    run(world, lengths, lambda x, k: F.broadcast(x, root), table("Bcast", root=root), (2, 3))
    works()


@pytest.mark.parametrize("axis", [0, 1])
def test_gathers(world, works, lengths, axis):
    """Uneven rows; no row of a rank that has run out."""
    root = longest(lengths)

    def shape(r, k):
        return (1 + (r + k) % 3, 2) if axis == 0 else (2, 1 + (r + k) % 3)

    run(
        world, lengths, lambda x, k: world.Allgather(x, axis), table("Allgather", gatheraxis=axis),
        (), shapes=shape,
    )  # fmt: skip
    run(
        world, lengths, lambda x, k: world.Gather(x, axis, root),
        table("Gather", gatheraxis=axis, root=root), (), shapes=shape,
    )  # fmt: skip
    works()


@pytest.mark.parametrize("op", DIFFERENTIABLE, ids=lambda op: op.name)
def test_reduce_scatter(world, works, lengths, op):
    """A rank that has run out leaves its piece to nobody; the pieces stay where they were."""
    size = world.size
    counts = [3 if r == 0 else 2 for r in range(size)]
    shape = (sum(counts), 2)

    def reference(leaves, active):
        whole = REDUCTIONS[op].reference(torch.stack([leaves[r] for r in active]))
        return [whole[sum(counts[:r]) : sum(counts[: r + 1])] for r in active]

    def apply(x, k):
        return world.Reduce_scatter(x, 0, counts[world.rank], op)

    run(world, lengths, apply, reference, shape)

    def even(leaves, active):
        whole = REDUCTIONS[op].reference(torch.stack([leaves[r] for r in active]))
        return [whole[r] for r in active]

    def functional(x, k):
        return F.reduce_scatter(torch.empty(3, 2, dtype=x.dtype), list(x.unbind(0)), op)

    run(world, lengths, functional, even, (size, 3, 2))
    works()


def test_scatter(world, works, lengths):
    root, size = longest(lengths), world.size

    def reference(leaves, active):
        return [leaves[root][2 * r : 2 * r + 2] for r in active]

    run(world, lengths, lambda x, k: world.Scatter(x, 0, 2, root), reference, (2 * size, 2))

    def functional(x, k):
        return F.scatter(list(x.split(2)) if world.rank == root else None, root)

    with Join([world]):
        for k in range(lengths[world.rank]):
            active = active_in(lengths, k)
            x = make(root, k, (2 * size, 2)).requires_grad_()
            got = functional(x, k)
            assert torch.equal(got, x.detach()[2 * world.rank : 2 * world.rank + 2])
            (got * (world.rank + 1)).sum().backward()
            want = torch.zeros(2 * size, 2, dtype=x.dtype)
            for r in active:
                want[2 * r : 2 * r + 2] = r + 1
            assert x.grad is None or world.rank == root
            if world.rank == root:
                assert torch.equal(x.grad, want)
    works()


def test_functional_gathers(world, works, lengths):
    """Their shapes are fixed: zeros of the ranks that have run out."""
    size, root = world.size, longest(lengths)

    def stacked(leaves, active):
        zero = torch.zeros(2, 3, dtype=torch.float64)
        whole = torch.stack([leaves[r] if r in active else zero for r in range(size)])
        return [whole for _ in active]

    def rooted(leaves, active):
        return [
            y if r == root else 0 * y for r, y in zip(active, stacked(leaves, active), strict=True)
        ]

    def single(x, k):
        return F.all_gather_single(torch.empty(size, 2, 3, dtype=x.dtype), x)

    run(world, lengths, lambda x, k: torch.stack(F.all_gather(x)), stacked, (2, 3))
    run(world, lengths, single, stacked, (2, 3))
    run(world, lengths, lambda x, k: torch.stack(F.gather(x, root)), rooted, (2, 3))
    works()


def test_all_to_all_of_the_active_ranks(world, works, lengths):
    """Nothing is sent to a rank that has run out, so that it is shadowed."""
    size, rank = world.size, world.rank
    with Join([world]):
        for k in range(lengths[rank]):
            active = active_in(lengths, k)
            counts = [1 + (s + rank) % 2 if s in active else 0 for s in range(size)]
            x = make(rank, k, (sum(counts), 2)).requires_grad_()
            y = F.all_to_all_single(torch.empty(sum(counts), 2, dtype=x.dtype), x, counts, counts)
            want = []
            for s in active:
                theirs = [1 + (t + s) % 2 if t in active else 0 for t in range(size)]
                start = sum(theirs[:rank])
                want.append(make(s, k, (sum(theirs), 2))[start : start + theirs[rank]])
            assert torch.equal(y, torch.cat(want))
            (y * (rank + 1)).sum().backward()
            scale = [s + 1 for s in range(size) for _ in range(counts[s])]
            assert torch.equal(x.grad, torch.tensor(scale, dtype=x.dtype)[:, None].expand(-1, 2))

            parts = [make(rank, s, (n,)) for s, n in enumerate(counts)]
            into = [torch.empty(n, dtype=torch.float64) for n in counts]
            F.all_to_all(into, parts)
            for s, n in enumerate(counts):
                assert torch.equal(into[s], make(s, rank, (n,)))

            share = 2 if rank == active[0] else 0
            z = world.Alltoall(make(rank, k, (1, 2)), 0, 1, share)
            if share:
                assert torch.equal(z, torch.cat([make(s, k, (1, 2)) for s in active]))
            else:
                assert z.shape == (len(active), 0)
    works()


def test_average_by_all(world, works, lengths):
    """With the option of torch, AVG divides by the number of all ranks."""
    size = world.size

    def reference(leaves, active):
        return [sum(leaves[r] for r in active) / size for _ in active]

    run(
        world, lengths, lambda x, k: world.Allreduce(x, ReduceOp.AVG), reference, (3,),
        divide_by_initial_world_size=True,
    )  # fmt: skip
    works()


def test_average_of_bfloat16_rounds_once(world, lengths):
    """256 + 1 + 1 is 258 in bfloat16 when it is added in float32."""
    with Join([world]):
        for k in range(lengths[world.rank]):
            active = active_in(lengths, k)
            tensors = [
                torch.tensor([256.0 if i == 0 else 1.0]).bfloat16() for i in range(len(active))
            ]
            got = world.Allreduce(tensors[active.index(world.rank)], ReduceOp.AVG)
            want = torch.stack(tensors).float().mean(0).bfloat16()
            assert torch.equal(got, want)


def test_second_derivatives(world, works, lengths):
    """Y = (Σ x²)², twice differentiated, with only the active ranks in the sum."""
    with Join([world]):
        for k in range(lengths[world.rank]):
            active = active_in(lengths, k)
            x = make(world.rank, k, (2,)).requires_grad_()
            s = world.Allreduce(x**2, mpicoll.MPI_SUM)
            (g,) = torch.autograd.grad((s**2).sum(), x, create_graph=True)
            total = sum(make(r, k, (2,)) ** 2 for r in active)
            n = len(active)
            torch.testing.assert_close(g, 4 * n * total * x.detach(), rtol=1e-12, atol=1e-12)
            (h,) = torch.autograd.grad(g.sum(), x)
            # dL/dx of Σ_r Σ 4 n (Σ_s x_s²) x_r
            mine, others = x.detach(), sum(make(r, k, (2,)) for r in active)
            want = 4 * n * (total + 2 * mine * others)
            torch.testing.assert_close(h, want, rtol=1e-12, atol=1e-12)
    works()


def test_several_calls_in_an_iteration(world, works, lengths):
    """Different collectives one after the other, with a barrier; every one is a round."""
    rank = world.rank
    with Join([world]) as context:
        for k in range(lengths[rank]):
            active = active_in(lengths, k)
            total = world.Allreduce(torch.tensor([rank + 1.0]), mpicoll.MPI_SUM)
            world.Barrier()
            rows = world.Allgather(torch.full((1,), rank), 0)
            assert total.item() == sum(r + 1 for r in active)
            assert rows.tolist() == active
    assert context.iterations == 3 * lengths[rank]
    assert context.shadowed == 3 * (max(lengths) - lengths[rank])
    works()


# ---------------------------------------------------------------- what cannot be shadowed


def refused(world, works, body, *words):
    """`body()` runs on all ranks but the last, which has no inputs: all raise the same."""
    with pytest.raises(RuntimeError) as caught, Join([world]):
        body() if world.rank < world.size - 1 else None
    for word in words:
        assert word in str(caught.value), str(caught.value)
    assert type(caught.value) is RuntimeError
    works()


@several
@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("Bcast", lambda c, x: c.Bcast(x, c.size - 1)),
        ("Bcast", lambda c, x: c.Bcast_(x, c.size - 1)),
        ("Bcast", lambda c, x: F.broadcast(x, c.size - 1)),
        ("Scatter", lambda c, x: c.Scatter(x, 0, 1, c.size - 1)),
        ("scatter", lambda c, x: F.scatter(None, c.size - 1)),
        ("Alltoall", lambda c, x: c.Alltoall(x[None], 0, 1, 1)),
        ("all_to_all_single", lambda c, x: F.all_to_all_single(torch.empty_like(x), x)),
        ("all_to_all", lambda c, x: F.all_to_all(list(torch.empty_like(x)), list(x))),
        ("Send", lambda c, x: c.Send(x, 0, 1)),
        ("Recv", lambda c, x: c.Recv(x, 0, 1)),
        ("Isend", lambda c, x: c.Isend(x, 0, 1)),
        ("Irecv", lambda c, x: c.Irecv(x, 0, 1)),
        ("Sendrecv", lambda c, x: c.Sendrecv(x, 0, torch.empty_like(x), 0)),
        ("Split", lambda c, x: c.Split(0)),
        ("Dup", lambda c, x: c.Dup()),
    ],
)  # fmt: skip
def test_refused(world, works, name, call):
    refused(world, works, lambda: call(world, torch.zeros(world.size)), name, "shadow")


@several
def test_a_message_is_refused_also_before_anybody_has_run_out(world, works):
    x = torch.zeros(1)
    with pytest.raises(RuntimeError, match="Send cannot be shadowed"), Join([world]):
        world.Send(x, 1, 0) if world.rank == 0 else world.Allreduce(x, mpicoll.MPI_SUM)
    works()


@several
@pytest.mark.parametrize(
    "other",
    [
        lambda c: c.Allreduce(torch.ones(3), mpicoll.MPI_MAX),
        lambda c: c.Allreduce(torch.ones(4), mpicoll.MPI_SUM),
        lambda c: c.Allreduce(torch.ones(3).double(), mpicoll.MPI_SUM),
        lambda c: c.Bcast(torch.ones(3), 0),
        lambda c: c.Barrier(),
        lambda c: c.Allgather(torch.ones(3), 0),
    ],
)  # fmt: skip
def test_disagreement(world, works, other):
    def one(c):
        return c.Allreduce(torch.ones(3), mpicoll.MPI_SUM)

    with pytest.raises(CollectiveMismatchError, match=r"rank 0: .*; rank 1: "), Join([world]):
        (one if world.rank == 0 else other)(world)
    works()


@several
def test_gathers_that_disagree(world, works):
    """The sizes are agreed on first; the error is the same on all ranks."""
    x = torch.ones(3)
    with pytest.raises(RuntimeError, match="rank 0: Allgather; rank 1: Gather"), Join([world]):
        world.Allgather(x, 0) if world.rank == 0 else world.Gather(x, 0, 0)
    works()


@several
@pytest.mark.parametrize("op", [ReduceOp.PROD, ReduceOp.MAX], ids=lambda op: op.name)
def test_gradient_after_a_rank_has_left(world, works, op):
    """What an absent rank contributed is not known any more: an error, never a wrong gradient."""

    def body():
        x = torch.full((2,), world.rank + 2.0, requires_grad=True)
        y = world.Allreduce(x, op)
        if world.rank == 0:
            y.sum().backward()

    with pytest.raises(RuntimeError, match="took part in it"), Join([world]):
        body()
    works()


def test_linear_gradient_after_a_rank_has_left(world, works):
    """Its loss has no part in it: its gradient is zero. The average keeps its divisor."""
    size = world.size
    with Join([world]):
        x = torch.full((2,), world.rank + 2.0, requires_grad=True)
        y = world.Allreduce(x, ReduceOp.AVG)
        assert torch.equal(y, torch.full((2,), (sum(range(size)) + 2 * size) / size))
        if world.rank == 0:
            (3 * y).sum().backward()
            assert torch.equal(x.grad, torch.full((2,), 3 / size))
    works()
