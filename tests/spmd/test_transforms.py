"""torch.func, forward-mode AD and torch's older vmap around every operation that has a derivative.

Every rank applies a transform to its own function; what it must give is that transform of the
function of all ranks' inputs, which plain torch computes in one process.
"""

from __future__ import annotations

import functools

import oracle
import pytest
import torch
from torch.autograd import forward_ad

import mpicoll
import mpicoll.nn.functional as F
from mpicoll import dispatch
from mpicoll.ops import OPERATIONS, REDUCTIONS

COMM = mpicoll.COMM_WORLD
RANK, SIZE = COMM.rank, COMM.size
func = torch.func
f64 = torch.float64

every_row = pytest.mark.parametrize("row", OPERATIONS.values(), ids=lambda row: row.name)
every_elementwise_row = pytest.mark.parametrize(
    "row",
    [row for row in OPERATIONS.values() if row.pattern == "elementwise"],
    ids=lambda row: row.name,
)


def problems(row, **more):
    """One problem for every reduction with a derivative, with ties and zeros where they matter."""
    for case, op in enumerate(row.reductions or [None]):
        shape = (4, 3, 2)
        for r in range(min(SIZE, 2) if "root" in row.arguments else 1):
            root = (case + r) % SIZE
            yield oracle.problem(row.name, SIZE, op=op, root=root, shape=shape, **more)


def tensors_of(p, salt="", dtype=f64):
    tensors = p.tensors(dtype, salt)
    op = p.arguments.get("op")
    if op is not None and not REDUCTIONS[op].pairs:
        for r, x in enumerate(tensors):  # the same element on all ranks, and a zero on one
            x.view(-1)[:1] = 1.25
            x.view(-1)[r + 1 : r + 2] = 0
    return tensors


def local(p):
    return lambda x: oracle.outer(p.call(COMM, oracle.inner(x)))


def together(p):
    return lambda *xs: tuple(oracle.outer(y) for y in p.reference([oracle.inner(x) for x in xs]))


def close(got, want, what):
    torch.testing.assert_close(
        got, want, equal_nan=True, msg=lambda text: f"{what} on rank {RANK}: {text}"
    )


def local_loss(p):
    y = together(p)(*p.tensors(f64))[RANK]
    weights = oracle.weights_for(y, RANK, "t")  # no random numbers inside vmap
    return lambda x: oracle.loss(local(p)(x), weights)


@every_row
def test_first_and_second_derivatives(row):
    """func.grad; forward over reverse, reverse over reverse, all with different directions."""
    for p in problems(row):
        tensors = tensors_of(p)
        want = oracle.simulate(together_list(p), tensors, "t")
        x = tensors[RANK]
        gradient = func.grad(local_loss(p))
        close(gradient(x), want.gradients[RANK], f"grad of {p}")
        direction = oracle.weights_for(x, RANK, "direction t")
        _, curvature = func.jvp(gradient, (x,), (direction,))
        close(curvature, want.curvatures[RANK], f"jvp of grad of {p}")
        twice = func.grad(lambda x, d=direction, g=gradient: (g(x) * d).sum())(x)
        close(twice, want.curvatures[RANK], f"grad of grad of {p}")


def together_list(p):
    return lambda xs: list(together(p)(*xs))


@every_row
def test_tangents(row):
    """func.jvp and dual numbers; a rank whose tensor has no tangent counts as zeros."""
    for p in problems(row):
        xs = tensors_of(p)
        for absent in {None, 0, SIZE - 1} if SIZE > 1 else {None}:
            ts = [oracle.values(x.shape, f64, r, "tangent") for r, x in enumerate(xs)]
            if absent is not None:
                ts[absent] = torch.zeros_like(xs[absent])
            ys, dys = func.jvp(together(p), tuple(xs), tuple(ts))
            what = f"jvp of {p} with no tangent on rank {absent}"
            x, t = xs[RANK], ts[RANK]
            if absent == RANK:
                y, dy = func.jvp(lambda _, p=p, x=x: local(p)(x), (x,), (t,))
            else:
                y, dy = func.jvp(local(p), (x,), (t,))
            close(y, ys[RANK], what)
            close(dy, dys[RANK], what)
            with forward_ad.dual_level():
                dual = x if absent == RANK else forward_ad.make_dual(x, t)
                y, dy = forward_ad.unpack_dual(local(p)(dual))
                close(y, ys[RANK], what)
                assert dy is not None
                close(dy, dys[RANK], what)


@every_row
def test_a_batch_is_one_call(row, monkeypatch):
    """Neither vmap makes a loop of small messages."""
    made = []

    def run(call, tensors, run=dispatch.run):
        made.append(call.operation.name)
        return run(call, tensors)

    monkeypatch.setattr(dispatch, "run", run)
    p = next(iter(problems(row)))
    x = torch.stack([p.tensors(f64)[RANK]] * 5)
    func.vmap(lambda x: p.call(COMM, x))(x)
    assert made == [row.name]
    x = x[0].requires_grad_()
    y = p.call(COMM, x)
    made.clear()
    torch.autograd.grad(y, x, y.detach(), create_graph=True)  # through no express lane
    single = made.copy()
    made.clear()
    torch.autograd.grad(y, x, torch.stack([y.detach()] * 5), is_grads_batched=True)
    assert made == single
    assert row.dual in made


@every_row
def test_batches(row):
    """Vmap equals the loop; also where the samples of one rank are all the same tensor."""
    for p in problems(row):
        batches = [torch.stack([x, x * 0.5 + 1, -x]) for x in tensors_of(p)]
        samples = [together(p)(*xs) for xs in zip(*batches, strict=True)]
        want = torch.stack([ys[RANK] for ys in samples])
        x = batches[RANK]
        close(func.vmap(local(p))(x), want, f"vmap of {p}")
        last = func.vmap(local(p), in_dims=-1, out_dims=-1)(x.movedim(0, -1))
        close(last, want.movedim(0, -1), f"vmap over the last dimension of {p}")
        if SIZE > 1:  # the same tensor for all samples on one rank
            fixed = [b[:1].expand_as(b) if r == SIZE - 1 else b for r, b in enumerate(batches)]
            samples = [together(p)(*xs) for xs in zip(*fixed, strict=True)]
            want = torch.stack([ys[RANK] for ys in samples])
            if RANK == SIZE - 1:
                got = func.vmap(lambda _, p=p, x=x: local(p)(x[0]))(x)
            else:
                got = func.vmap(local(p))(x)
            close(got, want, f"vmap of {p} with one sample on the last rank")


@every_row
def test_gradients_of_batches(row):
    """A gradient for every sample, in both orders of the transforms."""
    for p in problems(row):
        batches = [torch.stack([x, x * 0.5 + 1]) for x in tensors_of(p)]
        want = torch.stack(
            [
                oracle.simulate(together_list(p), xs, "t", second=False).gradients[RANK]
                for xs in zip(*batches, strict=True)
            ]
        )
        x = batches[RANK]
        close(func.vmap(func.grad(local_loss(p)))(x), want, f"vmap of grad of {p}")
        outside = func.grad(lambda x, p=p: func.vmap(local_loss(p))(x).sum())(x)
        close(outside, want, f"grad of vmap of {p}")
        leaf = x.clone().requires_grad_()
        func.vmap(local_loss(p))(leaf).sum().backward()
        close(leaf.grad, want, f"backward through vmap of {p}")


@every_row
def test_batched_cotangents(row):
    """is_grads_batched uses torch's older vmap: one larger message as well."""
    for p in problems(row):
        tensors = tensors_of(p)
        ys = together(p)(*tensors)
        cotangents = [
            torch.stack([oracle.values(y.shape, f64, r, f"sample {i}") for i in range(3)])
            for r, y in enumerate(ys)
        ]
        want = [
            oracle.pull(together_list(p), tensors, [g[i] for g in cotangents]) for i in range(3)
        ]
        x = tensors[RANK].clone().requires_grad_()
        y = local(p)(x)
        (got,) = torch.autograd.grad(y, x, cotangents[RANK], is_grads_batched=True)
        close(got, torch.stack([w[RANK] for w in want]), f"batched gradients of {p}")


@every_elementwise_row
def test_jacobians_and_hessians(row):
    """Every rank's i-th basis vector at the same time."""
    for case, op in enumerate(row.reductions or [None]):
        p = oracle.problem(row.name, SIZE, op=op, root=case % SIZE, shape=(2, 2))
        xs = tensors_of(p)
        n = xs[0].numel()
        eye = torch.eye(n, dtype=f64).view(n, 2, 2)
        forward = [func.jvp(together(p), tuple(xs), (e,) * SIZE)[1][RANK] for e in eye]
        x = xs[RANK]
        got = func.jacfwd(local(p))(x)
        close(got.movedim((2, 3), (0, 1)).reshape(n, 2, 2), torch.stack(forward), f"jacfwd of {p}")
        _, pull = func.vjp(together(p), *xs)
        backward = torch.stack([pull((e,) * SIZE)[RANK] for e in eye])
        close(func.jacrev(local(p))(x).view(n, 2, 2), backward, f"jacrev of {p}")
        older = torch.autograd.functional.jacobian(local(p), x, vectorize=True)
        close(older.view(n, 2, 2), backward, f"jacobian of {p}")

        def total(*xs, p=p):
            ys = together(p)(*xs)
            return sum(oracle.loss(y, oracle.weights_for(y, r, "t")) for r, y in enumerate(ys))

        slope = func.grad(total, argnums=tuple(range(SIZE)))
        curved = [func.jvp(slope, tuple(xs), (e,) * SIZE)[1][RANK] for e in eye]
        got = func.hessian(local_loss(p))(x)
        close(got.movedim((2, 3), (0, 1)).reshape(n, 2, 2), torch.stack(curved), f"hessian of {p}")


def test_a_constant_among_variables_is_refused_everywhere(works):
    """func.grad visits no node on a rank whose tensor does not depend on its input."""
    if SIZE == 1:
        pytest.skip("one rank agrees with itself")
    x = torch.ones(2, dtype=f64) * (RANK + 1)
    constant = x.clone()
    for call in (
        lambda x: COMM.Allreduce(x),
        lambda x: COMM.Allgather(x, 0),
        lambda x: F.all_gather(x)[0],
        lambda x: mpicoll.reduce_from_group(x),
    ):
        with pytest.raises(RuntimeError, match="rank 1 its tensor does not depend"):
            func.grad(lambda x, c=call: (c(constant if RANK == 1 else x) * x).sum())(x)
    works()


def test_different_transforms_are_refused_everywhere(works):
    if SIZE == 1:
        pytest.skip("one rank agrees with itself")
    x = torch.ones(3 if RANK else 2, 2, dtype=f64)
    with pytest.raises(RuntimeError, match="batches of different sizes"):
        func.vmap(COMM.Allreduce)(x)
    other = func.vmap(COMM.Allreduce) if RANK else func.grad(lambda x: COMM.Allreduce(x).sum())
    with pytest.raises(RuntimeError, match="different transforms"):
        other(x)
    works()


def test_linear_loss_on_one_rank():
    """Second derivatives where the first is a constant on one rank: its adjoint still runs."""
    x = torch.arange(1.0, 4.0, dtype=f64) + RANK

    def local_total(x):
        y = COMM.Allreduce(x)
        return (y**3).sum() if RANK == 0 else (2 * y).sum()

    got = func.jvp(func.grad(local_total), (x,), (torch.ones(3, dtype=f64),))[1]
    whole = sum(torch.arange(1.0, 4.0, dtype=f64) + r for r in range(SIZE))
    close(got, 6 * whole * SIZE, "a linear loss")
    got = func.grad(lambda x: func.grad(local_total)(x).sum())(x)
    close(got, 6 * whole * SIZE, "a linear loss")


@pytest.mark.parametrize("root", range(SIZE))
def test_functional_family(root):
    """Lists and tuples under jvp, grad and vmap."""
    xs = [oracle.values((3, 2), f64, r) for r in range(SIZE)]
    ts = [oracle.values((3, 2), f64, r, "tangent") for r in range(SIZE)]

    def scattered(x):
        return F.scatter([(s + 1) * x**2 for s in range(SIZE)], root)

    cases = [
        (
            lambda x: torch.stack(F.all_gather(x**2)),
            lambda *xs: [torch.stack([x**2 for x in xs])] * SIZE,
        ),
        (
            lambda x: torch.stack(F.gather(x**2, root)),
            lambda *xs: [
                torch.stack([x**2 if r == root else 0 * x for x in xs]) for r in range(SIZE)
            ],
        ),
        (scattered, lambda *xs: [(s + 1) * xs[root] ** 2 for s in range(SIZE)]),
        (lambda x: F.broadcast(x**2, root), lambda *xs: [xs[root] ** 2] * SIZE),
    ]
    for i, (mine, everybody) in enumerate(cases):
        what, f = f"case {i}", functools.partial(listed, everybody)
        ys, dys = func.jvp(f, tuple(xs), tuple(ts))
        close(func.jvp(mine, (xs[RANK],), (ts[RANK],)), (ys[RANK], dys[RANK]), what)
        weights = [oracle.values(y.shape, f64, r, "w") for r, y in enumerate(ys)]
        want = func.vjp(f, *xs)[1](tuple(weights))[RANK]
        close(func.vjp(mine, xs[RANK])[1](weights[RANK])[0], want, what)
        batch = [torch.stack([x, 2 * x]) for x in xs]
        want = torch.stack([everybody(*b)[RANK] for b in zip(*batch, strict=True)])
        close(func.vmap(mine)(batch[RANK]), want, what)


def listed(everybody, *xs):
    return tuple(everybody(*xs))


def test_replicated_losses():
    """The pair counts a loss that all ranks compute alike once."""
    xs = [oracle.values((3,), f64, r) for r in range(SIZE)]

    def replicated(x):
        return (mpicoll.reduce_from_group(mpicoll.copy_to_group(x) ** 2) ** 2).sum()

    whole = sum(x**2 for x in xs)
    want = sum(4 * whole * x for x in xs)
    x = xs[RANK]
    close(func.grad(replicated)(x), want, "grad")
    batch = torch.stack([x, x])
    close(func.vmap(func.grad(replicated))(batch), torch.stack([want, want]), "vmap of grad")
    y, dy = func.jvp(replicated, (x,), (torch.ones_like(x),))
    close((y, dy), ((whole**2).sum(), (2 * whole * sum(2 * x for x in xs)).sum()), "jvp")


def test_calls_that_write_into_a_given_tensor():
    """Right under grad and jvp, refused under vmap."""
    xs = [oracle.values((2, SIZE), f64, r) for r in range(SIZE)]
    x = xs[RANK]
    calls = [
        (lambda x: COMM.Bcast_(x * 1, 0), lambda *xs: [xs[0]] * SIZE),
        (
            lambda x: COMM.Reduce_(x * 1, mpicoll.MPI_PROD, 0),
            lambda *xs: [(r == 0) * torch.stack(xs).prod(0) for r in range(SIZE)],
        ),
        (
            lambda x: F.all_gather_single(x.new_empty(2 * SIZE, SIZE), x),
            lambda *xs: [torch.cat(xs)] * SIZE,
        ),
        (
            lambda x: F.reduce_scatter(x.new_empty(2), list(x.unbind(1))),
            lambda *xs: list(sum(xs).unbind(1)),
        ),
        (
            lambda x: torch.stack(
                F.all_to_all([torch.empty(2, dtype=f64) for _ in x.T], list(x.T))
            ),
            lambda *xs: list(torch.stack(xs).permute(2, 0, 1)),
        ),
    ]
    for i, (mine, everybody) in enumerate(calls):
        what, f = f"call {i}", functools.partial(listed, everybody)
        ys, dys = func.jvp(f, tuple(xs), tuple(xs[::-1]))
        close(func.jvp(mine, (x,), (xs[::-1][RANK],)), (ys[RANK], dys[RANK]), what)
        weights = [oracle.values(y.shape, f64, r, "w") for r, y in enumerate(ys)]
        want = func.vjp(f, *xs)[1](tuple(weights))[RANK]
        close(func.vjp(mine, x)[1](weights[RANK])[0], want, what)
        with pytest.raises(RuntimeError, match="vmap"):
            func.vmap(mine)(torch.stack([x, x]))
