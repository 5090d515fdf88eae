"""Cases from public bug reports: each holds the exact numbers of a single-process oracle.

The oracle is always L = the sum of all ranks' losses. A name ends with the letter and number of
the case; its docstring says who ran into it.
"""

from __future__ import annotations

import gc
import os

import pytest
import torch
from groups import RANK, SIZE, every, part, ranks

import mpicoll
import mpicoll.nn.functional as F
from mpicoll import ReduceOp
from mpicoll._core import mpi
from mpicoll.ops import OPERATIONS, REDUCTIONS

f64 = torch.float64
INTEGERS = [
    torch.uint8, torch.int8, torch.uint16, torch.int16,
    torch.uint32, torch.int32, torch.uint64, torch.int64,
]  # fmt: skip


def leaf(values, dtype=f64) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype, requires_grad=True)


def same(got: torch.Tensor, expected) -> None:
    """Equal bit for bit, in value, shape and dtype."""
    if not isinstance(expected, torch.Tensor):
        expected = torch.tensor(expected, dtype=got.dtype)
    torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)


# ---------------------------------------------------------------- gradient values


@ranks(2, 3)
@pytest.mark.parametrize("words", ["mpi", "torch"])
def test_scale_of_the_gradient_A1(comm, words):
    """pytorch#58005, xla#2086: with L the sum of all losses the gradient is W times larger."""
    x = leaf(1.0)
    z = (comm.rank + 2) * x
    y = comm.Allreduce(z, mpicoll.MPI_SUM) if words == "mpi" else F.all_reduce(z, group=comm)
    same(y.detach(), {2: 5.0, 3: 9.0}[comm.size])
    y.backward()
    same(x.grad, {2: [4.0, 6.0], 3: [6.0, 9.0, 12.0]}[comm.size][comm.rank])


@ranks(2, 3)
def test_one_replicated_loss_A1(comm):
    """The same program with the pair for a loss that all ranks compute alike: 2, 3 (and 4)."""
    x = leaf(1.0)
    shared = mpicoll.copy_to_group(x, comm)
    y = mpicoll.reduce_from_group((comm.rank + 2) * x, comm)
    same(y.detach(), {2: 5.0, 3: 9.0}[comm.size])
    y.backward()
    same(x.grad, float(comm.rank + 2))
    x.grad = None
    ((comm.rank + 2) * shared).backward()
    same(x.grad, {2: 5.0, 3: 9.0}[comm.size])


@ranks(2, 3)
@pytest.mark.parametrize("form", ["Allgather", "all_gather", "all_gather_single"])
def test_all_gather_adds_the_other_ranks_gradients_A2(comm, form):
    """pytorch#153016, xla#5784: only the own gradient came back."""
    x = leaf([10.0 * comm.rank + 1, 10.0 * comm.rank + 2])
    if form == "Allgather":
        o = comm.Allgather(x, 0)
    elif form == "all_gather":
        o = torch.cat(F.all_gather(x, comm))
    else:
        o = F.all_gather_single(torch.empty(2 * comm.size, dtype=f64), x, comm)
    same(o.detach(), [10.0 * r + i for r in range(comm.size) for i in (1, 2)])
    ((comm.rank + 1) * o).sum().backward()
    same(x.grad, [{2: 3.0, 3: 6.0}[comm.size]] * 2)


@ranks(2)
def test_average_keeps_its_factor_all_reduce_A4(comm):
    """pytorch#190007, #162338: the gradient of AVG lost its 1/W."""
    for average in (
        lambda z: F.all_reduce(z, ReduceOp.AVG, comm),
        lambda z: comm.Allreduce(z, ReduceOp.AVG),
    ):
        x = leaf(comm.rank + 1.0)
        y = average(x)
        same(y.detach(), 1.5)
        ((comm.rank + 1) * y).backward()
        same(x.grad, 1.5)


@ranks(2)
@pytest.mark.parametrize("form", ["reduce", "Reduce", "Reduce_"])
def test_average_keeps_its_factor_reduce_A4(comm, form):
    """pytorch#190007: AVG to one rank; the loss counts there alone."""
    x = leaf(comm.rank + 1.0)
    if form == "reduce":
        y = F.reduce(x, 0, ReduceOp.AVG, comm)
    elif form == "Reduce":
        y = comm.Reduce(x, ReduceOp.AVG, 0)
    else:
        y = comm.Reduce_(x * 1, ReduceOp.AVG, 0)
    same(y.detach(), 1.5 if comm.rank == 0 else 0.0)
    (3 * y if comm.rank == 0 else 0 * y).backward()
    same(x.grad, 1.5)


@ranks(2)
@pytest.mark.parametrize("form", ["reduce_scatter", "Reduce_scatter"])
def test_average_keeps_its_factor_reduce_scatter_A4(comm, form):
    """pytorch#190007: AVG of [1, 2, 3, 4] and [10, 20, 30, 40], two to each rank."""
    x = leaf([1.0, 2.0, 3.0, 4.0] if comm.rank == 0 else [10.0, 20.0, 30.0, 40.0])
    if form == "reduce_scatter":
        y = F.reduce_scatter(torch.empty(2, dtype=f64), list(x.split(2)), ReduceOp.AVG, comm)
    else:
        y = comm.Reduce_scatter(x, 0, 2, ReduceOp.AVG)
    same(y.detach(), [[5.5, 11.0], [16.5, 22.0]][comm.rank])
    ((comm.rank + 1) * y).sum().backward()
    same(x.grad, [0.5, 0.5, 1.0, 1.0])


@ranks(1)
def test_average_of_one_is_the_sum_A4(comm):
    """W=1: AVG equals SUM, in value and gradient."""
    for op in (ReduceOp.AVG, ReduceOp.SUM):
        x = leaf([0.1, -3.0])
        y = F.all_reduce(x, op, comm)
        same(y.detach(), [0.1, -3.0])
        (7 * y).sum().backward()
        same(x.grad, [7.0, 7.0])


@every
def test_average_of_integers_does_not_exist_A4(comm):
    """int64 AVG: TypeError on all ranks, before anything is sent."""
    x = torch.arange(comm.size)
    for call in (
        lambda: F.all_reduce(x, ReduceOp.AVG, comm),
        lambda: F.reduce(x, 0, ReduceOp.AVG, comm),
        lambda: F.reduce_scatter(x[0].clone(), list(x), ReduceOp.AVG, comm),
        lambda: comm.Allreduce(x, ReduceOp.AVG),
        lambda: comm.Reduce(x, ReduceOp.AVG, 0),
        lambda: comm.Reduce_(x, ReduceOp.AVG, 0),
        lambda: comm.Reduce_scatter(x, 0, 1, ReduceOp.AVG),
    ):
        with pytest.raises(TypeError, match=r"AVG of torch\.int64"):
            call()
    same(x, list(range(comm.size)))


@ranks(2)
@pytest.mark.parametrize("form", ["broadcast", "Bcast", "Bcast_"])
def test_broadcast_gradient_A6(comm, form):
    """horovod#2654, Megatron-LM#1635: the source gets the sum, the others zeros."""
    x = leaf([5.0, 6.0] if comm.rank == 1 else [-1.0, -2.0])
    if form == "broadcast":
        y = F.broadcast(x, 1, comm)
    elif form == "Bcast":
        y = comm.Bcast(x, 1)
    else:
        y = comm.Bcast_(x * 1, 1)
    same(y.detach(), [5.0, 6.0])
    ((comm.rank + 1) * y).sum().backward()
    same(x.grad, [3.0, 3.0] if comm.rank == 1 else [0.0, 0.0])


@ranks(3)
def test_scatter_gradient_A6(comm):
    """horovod#2654: the root's gradient is put together from all ranks'."""
    x = leaf([1.0, 2.0, 3.0, 4.0, 5.0, 6.0]) if comm.rank == 0 else leaf([9.0])
    y = comm.Scatter(x, 0, 2, 0)
    same(y.detach(), [2.0 * comm.rank + 1, 2.0 * comm.rank + 2])
    ((comm.rank + 1) * y).sum().backward()
    same(x.grad, [1.0, 1.0, 2.0, 2.0, 3.0, 3.0] if comm.rank == 0 else [0.0])

    x = leaf([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    y = F.scatter(list(x.split(2)) if comm.rank == 0 else None, 0, comm)
    same(y.detach(), [2.0 * comm.rank + 1, 2.0 * comm.rank + 2])
    ((comm.rank + 1) * y).sum().backward()
    if comm.rank == 0:
        same(x.grad, [1.0, 1.0, 2.0, 2.0, 3.0, 3.0])


@ranks(2)
@pytest.mark.parametrize("words", ["mpi", "torch"])
def test_double_backward_A8(comm, words):
    """Pytorch PR 40762: the backward of the backward."""

    def total(z):
        return comm.Allreduce(z, mpicoll.MPI_SUM) if words == "mpi" else F.all_reduce(z, group=comm)

    x = leaf(comm.rank + 1.0)
    (g,) = torch.autograd.grad(total(x) ** 2, x, create_graph=True)
    same(g.detach(), 12.0)
    g.sum().backward()
    same(x.grad, 8.0)

    x = leaf(comm.rank + 1.0)
    (g,) = torch.autograd.grad(total(x**3), x, create_graph=True)
    same(g.detach(), [6.0, 24.0][comm.rank])
    g.sum().backward()
    same(x.grad, [12.0, 24.0][comm.rank])


# ---------------------------------------------------------------- graph


def _operations(comm, op=None):
    """Every operation of both families as a function of one float64 tensor of W elements.

    With `op`, the reducing ones with that reduction; without, those that only move data.
    """
    W = comm.size
    if op is not None:
        return {
            "Allreduce": lambda x: comm.Allreduce(x, op),
            "Reduce": lambda x: comm.Reduce(x, op, 0),
            "Reduce_": lambda x: comm.Reduce_(x, op, 0),
            "Reduce_scatter": lambda x: comm.Reduce_scatter(x, 0, 1, op),
            "Scan": lambda x: comm.Scan(x, op),
            "Exscan": lambda x: comm.Exscan(x, op),
            "all_reduce": lambda x: F.all_reduce(x, op, comm),
            "reduce": lambda x: F.reduce(x, 0, op, comm),
            "reduce_scatter": lambda x: F.reduce_scatter(
                torch.empty((), dtype=f64), list(x.unbind()), op, comm
            ),
        }
    right, left = (comm.rank + 1) % W, (comm.rank - 1) % W
    return {
        "Bcast": lambda x: comm.Bcast(x, 0),
        "Bcast_": lambda x: comm.Bcast_(x, 0),
        "Gather": lambda x: comm.Gather(x, 0, 0),
        "Allgather": lambda x: comm.Allgather(x, 0),
        "Scatter": lambda x: comm.Scatter(x, 0, 1, 0),
        "Alltoall": lambda x: comm.Alltoall(x, 0, 0, W),
        "Sendrecv": lambda x: comm.Sendrecv(x, right, torch.empty(W, dtype=f64), left),
        "Isend": lambda x: _isend_recv(comm, x, right, left)[0],
        "Irecv": lambda x: _isend_recv(comm, x, right, left)[1],
        "Send": lambda x: _send_irecv(comm, x, right, left)[0],
        "Recv": lambda x: _send_irecv(comm, x, right, left)[1],
        "broadcast": lambda x: F.broadcast(x, 0, comm),
        "gather": lambda x: F.gather(x, 0, comm)[-1],
        "scatter": lambda x: F.scatter(list(x.unbind()), 0, comm),
        "all_gather": lambda x: F.all_gather(x, comm)[-1],
        "all_gather_single": lambda x: F.all_gather_single(torch.empty(W * W, dtype=f64), x, comm),
        "all_to_all": lambda x: F.all_to_all(
            [torch.empty((), dtype=f64) for _ in range(W)], list(x.unbind()), comm
        )[0],
        "all_to_all_single": lambda x: F.all_to_all_single(
            torch.empty(W, dtype=f64), x, group=comm
        ),
        "copy_to_group": lambda x: mpicoll.copy_to_group(x, comm),
        "reduce_from_group": lambda x: mpicoll.reduce_from_group(x, comm),
    }


def _isend_recv(comm, x, right, left):
    handle = comm.Isend(x, right, 3)
    got = comm.Recv(torch.empty_like(x), left, 3)
    return comm.Wait(handle), got


def _send_irecv(comm, x, right, left):
    handle = comm.Irecv(torch.empty_like(x), left, 4)
    sent = comm.Send(x, right, 4)
    return sent, comm.Wait(handle)


@every
def test_nothing_cuts_the_graph_B1(comm):
    """pytorch#152127, #151240: a result without grad_fn, and gradients silently missing."""
    for name, call in _operations(comm).items():
        y = call(torch.ones(comm.size, dtype=f64, requires_grad=True) * 1)
        assert y.grad_fn is not None, name
        assert y.requires_grad, name
        with torch.no_grad():
            y = call(torch.ones(comm.size, dtype=f64, requires_grad=True) * 1)
        assert y.grad_fn is None, name
        assert not y.requires_grad, name


@every
@pytest.mark.parametrize("op", list(ReduceOp), ids=lambda op: op.name)
def test_reductions_give_a_gradient_or_an_error_B1(comm, op):
    """pytorch#152127: what has no gradient says so in forward, on every rank."""
    if op in (ReduceOp.MINLOC, ReduceOp.MAXLOC):
        calls = {
            name: call
            for name, call in _operations(comm, op).items()
            if name not in ("Reduce_scatter", "reduce_scatter")
        }
        shape = (comm.size, 2)
    else:
        calls, shape = _operations(comm, op), (comm.size,)
    for name, call in calls.items():
        x = torch.ones(shape, dtype=f64, requires_grad=True) * 1
        prefix = name in ("Scan", "Exscan")
        if op in (ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR):
            with pytest.raises(TypeError, match=op.name):
                call(x)
        elif prefix and op is ReduceOp.AVG:
            with pytest.raises(ValueError, match="AVG"):
                call(x)
        elif not REDUCTIONS[op].differentiable or (prefix and op is not ReduceOp.SUM):
            with pytest.raises(RuntimeError, match=f"{op.name} has no gradient"):
                call(x)
            with torch.no_grad():
                assert call(x).grad_fn is None, name
        else:
            y = call(x)
            assert y.grad_fn is not None, name
            with torch.no_grad():
                y = call(torch.ones(shape, dtype=f64, requires_grad=True) * 1)
            assert y.grad_fn is None, name
            assert not y.requires_grad, name


@ranks(2)
def test_what_the_other_ranks_hold_after_reduce_B4(comm):
    """pytorch#76527, #21480: off the destination the result was undefined, and its loss counted."""
    x = leaf(comm.rank + 1.0)
    y = F.reduce(x, 0, group=comm)
    same(y.detach(), 3.0 if comm.rank == 0 else 0.0)
    ((3 if comm.rank == 0 else 100) * y).backward()
    same(x.grad, 3.0)


# ---------------------------------------------------------------- layout, shape, size


@ranks(3)
def test_scatter_of_a_strided_tensor_C1(comm):
    """pytorch#24836: every second element, not the first three."""
    x = torch.linspace(0, 5, 6, dtype=f64)[::2]
    same(comm.Scatter(x, 0, 1, 0), [2.0 * comm.rank])
    same(F.scatter(list(x.unbind()), 0, comm), 2.0 * comm.rank)
    base = torch.linspace(0, 5, 6, dtype=f64)
    same(
        F.scatter([base[2 * r :][::3] for r in range(3)], 0, comm),
        [[0.0, 3.0], [2.0, 5.0], [4.0]][comm.rank],
    )


@every
def test_in_place_on_a_column_C1(comm):
    """pytorch#74809: the column gets the values, its neighbour keeps its own."""
    b = torch.tensor([[0, 1], [20, 3], [40, 5]], dtype=f64)
    if comm.rank:
        b[:, 0] = -1.0
    result = comm.Bcast_(b[:, 0], 0)
    same(b, [[0, 1], [20, 3], [40, 5]])
    same(result, [0, 20, 40])
    assert result.data_ptr() == b.data_ptr()


@every
def test_gather_of_a_transposed_tensor_C1(comm):
    """pytorch#192920, mpi4py#274: strides must not change the answer."""
    x = torch.arange(10, dtype=f64).view(2, 5).t() + 100 * comm.rank
    for axis in (0, 1):
        same(
            comm.Gather(x, axis, 0),
            comm.Gather(x.clone(memory_format=torch.contiguous_format), axis, 0),
        )
        whole = torch.cat(
            [torch.arange(10, dtype=f64).view(2, 5).t() + 100 * r for r in range(comm.size)], axis
        )
        same(comm.Allgather(x, axis), whole)
        if comm.rank == 0:
            same(comm.Gather(x, axis, 0), whole)
        else:
            assert comm.Gather(x, axis, 0).shape[axis] == 0


@every
def test_odd_strides_of_single_elements_C1(comm):
    """mpi4py#274: the stride of a dimension of size one means nothing."""
    x = torch.ones(4, dtype=f64).as_strided((1, 2, 2), (7, 2, 1))
    assert x.stride() == (7, 2, 1)
    same(comm.Allreduce(x, ReduceOp.SUM), torch.full((1, 2, 2), float(comm.size), dtype=f64))
    same(comm.Allgather(x, 0), torch.ones(comm.size, 2, 2, dtype=f64))
    y = torch.zeros(4, dtype=f64).as_strided((1, 2, 2), (7, 2, 1))
    peer = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    same(comm.Sendrecv(x, peer[0], y, peer[1]), torch.ones(1, 2, 2, dtype=f64))
    same(y.clone(), torch.ones(1, 2, 2, dtype=f64))


@every
def test_storage_offset_C1(comm):
    """pytorch#74809: a tensor need not start where its storage starts."""
    base = torch.arange(10, dtype=f64)
    x = base[3:7]
    same(comm.Allreduce(x, ReduceOp.MAX), [3, 4, 5, 6])
    same(F.all_gather(x, comm)[-1], [3, 4, 5, 6])
    if comm.rank:
        x.zero_()
    comm.Bcast_(x, 0)
    same(base, list(range(10)))
    comm.Reduce_(x, ReduceOp.SUM, 0)
    middle = [comm.size * v for v in (3, 4, 5, 6)] if comm.rank == 0 else [0] * 4
    same(base, [0, 1, 2, *middle, 7, 8, 9])


@every
def test_in_place_calls_land_in_strided_tensors_Also(comm):
    """Megatron-LM#5337: reducing a contiguous copy and returning the untouched input."""
    for view in (lambda t: t[:, ::2], lambda t: t.t(), lambda t: t[1:, 1:]):
        base = torch.full((3, 4), comm.rank + 1.0, dtype=f64)
        x = view(base)
        expected = base.clone()
        view(expected).fill_(float(sum(range(1, comm.size + 1))) if comm.rank == 0 else 0.0)
        y = comm.Reduce_(x, ReduceOp.SUM, 0)
        same(base, expected)
        same(y, view(expected))
        base.fill_(-1.0)
        expected.fill_(-1.0)
        view(expected).fill_(7.0)
        x.fill_(7.0 if comm.rank == comm.size - 1 else 3.0)
        same(comm.Bcast_(x, comm.size - 1), view(expected))
        same(base, expected)
        outs = [torch.zeros(4, 4, dtype=f64)[:, ::2] for _ in range(comm.size)]
        F.all_to_all(outs, [torch.full((4, 2), float(comm.rank), dtype=f64)] * comm.size, comm)
        for r, out in enumerate(outs):
            same(out.clone(), torch.full((4, 2), float(r), dtype=f64))


@every
def test_empty_contributions_C3(comm):
    """pytorch#85234, #150928: shape (1, 0, 2) through everything, forward and backward."""
    W = comm.size
    right, left = (comm.rank + 1) % W, (comm.rank - 1) % W

    def empty(*shape):
        return torch.empty(*shape, dtype=f64)

    calls = {
        "Allreduce": (lambda x: comm.Allreduce(x, ReduceOp.SUM), (1, 0, 2)),
        "Allreduce MAX": (lambda x: comm.Allreduce(x, ReduceOp.MAX), (1, 0, 2)),
        "Allreduce PROD": (lambda x: comm.Allreduce(x, ReduceOp.PROD), (1, 0, 2)),
        "Reduce": (lambda x: comm.Reduce(x, ReduceOp.SUM, 0), (1, 0, 2)),
        "Reduce_": (lambda x: comm.Reduce_(x, ReduceOp.SUM, 0), (1, 0, 2)),
        "Bcast": (lambda x: comm.Bcast(x, 0), (1, 0, 2)),
        "Bcast_": (lambda x: comm.Bcast_(x, 0), (1, 0, 2)),
        "Scan": (lambda x: comm.Scan(x), (1, 0, 2)),
        "Exscan": (lambda x: comm.Exscan(x), (1, 0, 2)),
        "Gather": (lambda x: comm.Gather(x, 0, 0), (W if comm.rank == 0 else 0, 0, 2)),
        "Allgather 0": (lambda x: comm.Allgather(x, 0), (W, 0, 2)),
        "Allgather 1": (lambda x: comm.Allgather(x, 1), (1, 0, 2)),
        "Scatter": (lambda x: comm.Scatter(x, 1, 0, 0), (1, 0, 2)),
        "Alltoall": (lambda x: comm.Alltoall(x, 0, 1, 0), (W, 0, 2)),
        "Alltoall 1": (lambda x: comm.Alltoall(x, 1, 1, 0), (1, 0, 2)),
        "Reduce_scatter": (lambda x: comm.Reduce_scatter(x, 1, 0), (1, 0, 2)),
        "Sendrecv": (lambda x: comm.Sendrecv(x, right, empty(1, 0, 2), left), (1, 0, 2)),
        "Isend, Recv": (lambda x: mpicoll.JoinDummies(*_received(comm, x, right, left)), (1, 0, 2)),
        "broadcast": (lambda x: F.broadcast(x, 0, comm), (1, 0, 2)),
        "all_reduce": (lambda x: F.all_reduce(x, group=comm), (1, 0, 2)),
        "reduce": (lambda x: F.reduce(x, 0, group=comm), (1, 0, 2)),
        "gather": (lambda x: F.gather(x, 0, comm)[-1], (1, 0, 2)),
        "scatter": (lambda x: F.scatter([x] * W, 0, comm), (1, 0, 2)),
        "all_gather": (lambda x: F.all_gather(x, comm)[-1], (1, 0, 2)),
        "all_gather_single": (
            lambda x: F.all_gather_single(empty(W, 0, 2), x, comm), (W, 0, 2),
        ),
        "reduce_scatter": (
            lambda x: F.reduce_scatter(empty(1, 0, 2), [x] * W, group=comm), (1, 0, 2),
        ),
        "all_to_all": (
            lambda x: F.all_to_all([empty(1, 0, 2) for _ in range(W)], [x] * W, comm)[-1],
            (1, 0, 2),
        ),
        "all_to_all_single": (
            lambda x: F.all_to_all_single(empty(0, 2), x[0], group=comm), (0, 2),
        ),
    }  # fmt: skip
    for name, (call, shape) in calls.items():
        x = torch.empty(1, 0, 2, dtype=f64, requires_grad=True)
        y = call(x * 1)
        assert y.shape == shape, name
        y.sum().backward()
        assert x.grad.shape == (1, 0, 2), name


def _received(comm, x, right, left):
    sent, got = _isend_recv(comm, x, right, left)
    return got, [sent]


@ranks(3)
@pytest.mark.parametrize("k", [1, 4])
def test_allgather_of_no_rows_C3(comm, k):
    """pytorch#85234: 0, 2 and 3 rows make 5, and the gradient of no rows has shape (0, k)."""
    rows = [0, 2, 3][comm.rank]
    x = torch.full((rows, k), float(comm.rank), dtype=f64, requires_grad=True)
    y = comm.Allgather(x, 0)
    same(y.detach(), torch.tensor([1.0, 1, 2, 2, 2], dtype=f64)[:, None].expand(5, k).contiguous())
    ((comm.rank + 1) * y).sum().backward()
    same(x.grad, torch.full((rows, k), 6.0, dtype=f64))


@every
def test_empty_messages_C3(comm):
    """pytorch#150928: an empty Isend and an empty Irecv meet."""
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    handle = comm.Isend(torch.empty(0, dtype=f64), right, 0)
    got = comm.Irecv(torch.empty(3, 0, dtype=f64), left, 0).wait()
    assert got.shape == (3, 0)
    assert comm.Wait(handle).shape == (0,)
    full = torch.arange(3, dtype=f64)
    handle = comm.Isend(torch.empty(0, dtype=f64), right, 0)
    same(comm.Recv(full, left, 0).detach(), [0, 1, 2])
    comm.Wait(handle)


@ranks(3)
@pytest.mark.parametrize("axis", [1, -1])
def test_uneven_along_another_axis_C5(comm, axis):
    """pytorch#23299, #156627, xla#8660: sizes that differ along axis 1."""
    r = comm.rank
    x = torch.full((2, r + 1), float(r), dtype=f64, requires_grad=True)
    o = comm.Allgather(x, axis)
    same(o.detach(), [[0, 1, 1, 2, 2, 2]] * 2)
    w = torch.arange(12, dtype=f64).view(2, 6) + 3
    ((2 * r + 1) * o * w).sum().backward()
    same(
        x.grad,
        [
            [[27.0], [81.0]],
            [[36.0, 45.0], [90.0, 99.0]],
            [[54.0, 63.0, 72.0], [108.0, 117.0, 126.0]],
        ][r],
    )


@ranks(3)
@pytest.mark.parametrize("form", ["Allgather", "Gather", "Alltoall"])
def test_other_dimensions_unequal_C5(comm, form):
    """pytorch#23299: ValueError on all ranks, and the communicator goes on."""
    x = torch.zeros(2 + comm.rank, comm.rank + 1, dtype=f64)
    call = {
        "Allgather": lambda: comm.Allgather(x, 1),
        "Gather": lambda: comm.Gather(x, 1, 0),
        "Alltoall": lambda: comm.Alltoall(x, 1, 0, 1),
    }[form]
    with pytest.raises(ValueError, match=r"rank 2: \(4, 3\)"):
        call()
    same(comm.Allreduce(torch.ones(1), ReduceOp.SUM), [3.0])


@pytest.fixture
def chunks_of_1000():
    before = mpi.limits()
    mpi.limits(chunk_bytes=8 * 1000, count_limit=1000)
    yield
    mpi.limits(*before)


def _inputs(count: int, size: int) -> list[torch.Tensor]:
    """Every rank's tensor of `count` distinct values."""
    return [torch.arange(count, dtype=f64) + count * r + 1 for r in range(size)]


COUNTS = [999, 1000, 1001, 2500]


@every
@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("name", list(OPERATIONS))
def test_counts_above_the_limit_C6(comm, chunks_of_1000, name, count):
    """mpi4py#575, pytorch#104297: counts that one MPI call cannot hold, forward and backward."""
    row, W, r = OPERATIONS[name], comm.size, comm.rank
    cut = [count // W + (s < count % W) for s in range(W)]
    options = {}
    if "op" in row.arguments:
        options["op"] = ReduceOp.SUM
    if "root" in row.arguments:
        options["root"] = W - 1
    if "gatheraxis" in row.arguments:
        options["gatheraxis"] = 0
    if "scatteraxis" in row.arguments:
        options["scatteraxis"] = 0
    total = count * W if name == "Alltoall" else count
    if "numelem" in row.arguments:
        cut = [total // W + (s < total % W) for s in range(W)]
        options["numelem"] = cut
    leaves = [x.requires_grad_() for x in _inputs(count, W)]
    wanted = row.reference(leaves, **options)
    weights = [
        torch.arange(t.numel(), dtype=f64).view(t.shape) % 7 + s for s, t in enumerate(wanted)
    ]
    loss = sum((t * w).sum() for t, w in zip(wanted, weights, strict=True))
    gradients = torch.autograd.grad(loss + 0 * sum(x.sum() for x in leaves), leaves)

    x = _inputs(count, W)[r].requires_grad_()
    if "numelem" in options:
        options["numelem"] = cut[r]
    y = getattr(comm, name)(x, **options)
    same(y.detach(), wanted[r].detach())
    (y * weights[r]).sum().backward()
    same(x.grad, gradients[r])


@every
@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("op", [ReduceOp.MAX, ReduceOp.PROD, ReduceOp.AVG], ids=lambda op: op.name)
def test_other_reductions_above_the_limit_C6(comm, chunks_of_1000, count, op):
    """mpi4py#575: the reductions that mpicoll computes itself, in 64 and in 16 bits."""
    for dtype in (f64, torch.bfloat16):
        xs = [(x % 17 + 1).to(dtype) / 8 for x in _inputs(count, comm.size)]
        same(comm.Allreduce(xs[comm.rank], op), REDUCTIONS[op].reference(torch.stack(xs)))
        whole = comm.Reduce_scatter(
            xs[comm.rank], 0, count if comm.rank == comm.size - 1 else 0, op
        )
        if comm.rank == comm.size - 1:
            same(whole, REDUCTIONS[op].reference(torch.stack(xs)))


@every
@pytest.mark.parametrize("count", COUNTS)
def test_messages_above_the_limit_C6(comm, chunks_of_1000, count):
    """mpi4py#575: a long message arrives whole; its tensor may be longer than the message."""
    W, r = comm.size, comm.rank
    right, left = (r + 1) % W, (r - 1) % W
    x = _inputs(count, W)[r].requires_grad_()
    buffer = torch.full((count + 1500,), -5.0, dtype=f64)
    y = comm.Sendrecv(x, right, buffer, left)
    same(y.detach()[:count], _inputs(count, W)[left])
    same(y.detach()[count:], torch.full((1500,), -5.0, dtype=f64))
    ((r + 1) * y[:count]).sum().backward()
    same(x.grad, torch.full((count,), right + 1.0, dtype=f64))
    got = mpicoll.JoinDummies(*_received(comm, x, right, left))
    same(got.detach(), _inputs(count, W)[left])
    x.grad = None
    ((r + 1) * got).sum().backward()
    same(x.grad, torch.full((count,), right + 1.0, dtype=f64))


@every
@pytest.mark.parametrize("count", COUNTS)
def test_lists_above_the_limit_C6(comm, chunks_of_1000, count):
    """pytorch#104297: torch's words, with lists and output tensors."""
    W, r = comm.size, comm.rank
    xs = _inputs(count, W)
    whole = torch.cat(xs)
    for got, x in zip(F.all_gather(xs[r], comm), xs, strict=True):
        same(got, x)
    same(F.all_gather_single(torch.empty_like(whole), xs[r], comm), whole)
    if r == 0:
        same(torch.cat(F.gather(xs[r], 0, comm)), whole)
    else:
        same(torch.cat(F.gather(xs[r], 0, comm)), torch.zeros_like(whole))
    same(F.scatter(xs if r == 0 else None, 0, comm), xs[r])
    lists = [x * (r + 1) for x in xs]
    for s, got in enumerate(F.all_to_all([torch.empty_like(x) for x in xs], lists, comm)):
        same(got, xs[r] * (s + 1))
    same(
        F.all_to_all_single(torch.empty_like(whole), torch.cat(lists), group=comm),
        torch.cat([xs[r] * (s + 1) for s in range(W)]),
    )
    same(
        F.reduce_scatter(torch.empty_like(xs[r]), lists, group=comm),
        xs[r] * sum(range(1, W + 1)),
    )


if os.environ.get("MPICOLL_TEST_LARGE") == "1":  # takes 2 GiB per rank

    @every
    def test_more_bytes_than_an_int_counts_C6(comm):
        """mpi4py#575: 2**31 + 8 bytes; the last 8 arrive."""
        x = torch.zeros(2**31 + 8, dtype=torch.uint8)
        if comm.rank == 0:
            x[-8:] = torch.arange(1, 9)
        y = comm.Bcast_(x, 0)
        same(y[-8:], [1, 2, 3, 4, 5, 6, 7, 8])
        same(x[-9:], [0, 1, 2, 3, 4, 5, 6, 7, 8])


# ---------------------------------------------------------------- types


@ranks(2)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_sums_D1(comm, dtype):
    """pytorch#170073, #139178, mpich#7342: SUM of 16-bit floats was inf, or an invalid MPI_Op."""
    x = (torch.ones(4, 4, dtype=dtype) * (comm.rank + 1)).requires_grad_()
    for y, value in (
        (comm.Allreduce(x, ReduceOp.SUM), 3.0),
        (F.all_reduce(x, group=comm), 3.0),
        (comm.Reduce_scatter(x, 0, 2), 3.0),
        (comm.Allreduce(x, ReduceOp.MAX), 2.0),
        (comm.Allreduce(x, ReduceOp.MIN), 1.0),
        (comm.Allreduce(x, ReduceOp.PROD), 2.0),
        (comm.Allreduce(x, ReduceOp.AVG), 1.5),
    ):
        same(y.detach(), torch.full(y.shape, value, dtype=dtype))
        x.grad = None
        y.sum().backward()
        assert x.grad.dtype == dtype
    y = comm.Reduce(x, ReduceOp.SUM, 0)
    same(y.detach(), torch.full((4, 4), 3.0 if comm.rank == 0 else 0.0, dtype=dtype))
    y = comm.Allreduce(x, ReduceOp.SUM)
    x.grad = None
    ((comm.rank + 1) * y).sum().backward()
    same(x.grad, torch.full((4, 4), 3.0, dtype=dtype))


@ranks(3)
def test_one_rounding_D1(comm):
    """mpich#7342: 256 + 1 + 1 is 258 in bfloat16, not 256, however long the tensor is."""
    for shape in ((), (4, 4), (5000,)):
        x = torch.full(shape, 256.0 if comm.rank == 0 else 1.0, dtype=torch.bfloat16)
        same(comm.Allreduce(x, ReduceOp.SUM), torch.full(shape, 258.0, dtype=torch.bfloat16))
        same(F.all_reduce(x, group=comm), torch.full(shape, 258.0, dtype=torch.bfloat16))
        y = comm.Reduce(x, ReduceOp.SUM, 1)
        same(y, torch.full(shape, 258.0 if comm.rank == 1 else 0.0, dtype=torch.bfloat16))
        y = comm.Scan(x)
        same(y, torch.full(shape, [256.0, 256.0, 258.0][comm.rank], dtype=torch.bfloat16))
    x = torch.full((6,), 256.0 if comm.rank == 0 else 1.0, dtype=torch.bfloat16)
    same(comm.Reduce_scatter(x, 0, 2), torch.full((2,), 258.0, dtype=torch.bfloat16))
    g = torch.full((2,), 1.0, dtype=torch.bfloat16, requires_grad=True)
    comm.Allgather(g, 0).backward(x)
    same(g.grad, torch.full((2,), 258.0, dtype=torch.bfloat16))


@every
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, f64], ids=str)
def test_moved_bits_stay_D1(comm, dtype):
    """pytorch#139178: nan and -0.0 travel bit for bit."""
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    x = torch.tensor([float("nan"), -0.0, float("inf"), 1.0], dtype=dtype)
    x = torch.cat([x, -x])
    W = comm.size
    right, left = (comm.rank + 1) % W, (comm.rank - 1) % W
    moved = [
        comm.Bcast(x, 0),
        comm.Bcast_(x.clone(), 0),
        comm.Allgather(x, 0)[-8:],
        comm.Alltoall(x, 0, 0, 8),
        comm.Scatter(torch.cat([x] * W), 0, 8, 0),
        comm.Sendrecv(x, right, torch.empty_like(x), left),
        F.broadcast(x, 0, comm),
        F.all_gather(x, comm)[0],
        F.all_gather_single(torch.empty(8 * W, dtype=dtype), x, comm)[:8],
        F.scatter([x] * W, 0, comm),
        F.all_to_all([torch.empty_like(x) for _ in range(W)], [x] * W, comm)[0],
        F.all_to_all_single(torch.empty(8 * W, dtype=dtype), torch.cat([x] * W), group=comm)[:8],
    ]
    if comm.rank == 0:
        moved += [comm.Gather(x, 0, 0)[-8:], F.gather(x, 0, comm)[-1]]
    else:
        comm.Gather(x, 0, 0)
        F.gather(x, 0, comm)
    for y in moved:
        same(y.detach().contiguous().view(bits), x.view(bits))


@ranks(2)
def test_complex_D3(comm):
    """pytorch#45760, #71613: the gradient of |S|^2, in both complex dtypes."""
    for dtype in (torch.complex128, torch.complex64):
        for call in (
            lambda z: comm.Allreduce(z, ReduceOp.SUM),
            lambda z: F.all_reduce(z, group=comm),
        ):
            z = leaf((comm.rank + 1) * (1 + 1j), dtype)
            S = call(z)
            same(S.detach(), torch.tensor(3 + 3j, dtype=dtype))
            (S * S.conj()).real.backward()
            same(z.grad, torch.tensor(12 + 12j, dtype=dtype))


@every
@pytest.mark.parametrize("dtype", [torch.complex128, torch.complex64], ids=str)
def test_conjugated_views_D3(comm, dtype):
    """pytorch#71613: a lazily conjugated view sends conjugated values (so does a negated one)."""
    W, r = comm.size, comm.rank
    right, left = (r + 1) % W, (r - 1) % W

    def of(s):
        return torch.tensor([s + 1j, 2 + 3j * s], dtype=dtype)

    x = of(r).conj()
    assert x.is_conj()
    plain = [of(s).conj().resolve_conj() for s in range(W)]
    same(comm.Bcast(x, 0), plain[0])
    same(comm.Allreduce(x, ReduceOp.SUM), sum(plain))
    same(comm.Allgather(x, 0), torch.cat(plain))
    same(F.all_reduce(x, group=comm), sum(plain))
    same(F.all_gather(x, comm)[-1], plain[-1])
    same(comm.Sendrecv(x, right, torch.empty(2, dtype=dtype), left), plain[left])
    lists = F.all_to_all([torch.empty(2, dtype=dtype) for _ in range(W)], [x] * W, comm)
    for s, got in enumerate(lists):
        same(got, plain[s])
    n = x.imag
    assert n.is_neg()
    same(comm.Allgather(n, 0), torch.cat([p.imag.clone() for p in plain]))
    target = torch.zeros(2, dtype=dtype)
    comm.Bcast_(target.conj().copy_(x) if r == 0 else target.conj(), 0)
    same(target, of(0))


@every
@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_integers_D4(comm, dtype):
    """heat#497: every integer type, from its smallest to its largest value, and nothing beside."""
    W, r = comm.size, comm.rank
    right, left = (r + 1) % W, (r - 1) % W
    info = torch.iinfo(dtype)

    def of(s):
        return (
            torch.tensor([info.min, info.max, 0, 1, 17 + s], dtype=torch.int64).to(dtype)
            if (dtype != torch.uint64)
            else torch.tensor([0, -1, 0, 1, 17 + s], dtype=torch.int64).view(torch.uint64)
        )

    def guarded():
        whole = torch.full((9,), 99, dtype=dtype)
        return whole, whole[2:7]

    def check(whole, expected):
        same(whole[2:7], expected)
        same(whole[:2], torch.full((2,), 99, dtype=dtype))
        same(whole[7:], torch.full((2,), 99, dtype=dtype))

    x = of(r)
    whole, middle = guarded()
    comm.Sendrecv(x, right, middle, left)
    check(whole, of(left))
    whole, middle = guarded()
    handle = comm.Irecv(middle, left, 1)
    comm.Send(x, right, 1)
    handle.wait()
    check(whole, of(left))
    whole, middle = guarded()
    middle.copy_(x)
    comm.Bcast_(middle, W - 1)
    check(whole, of(W - 1))
    whole, middle = guarded()
    middle.copy_(of(0))
    comm.Reduce_(middle, ReduceOp.MAX, 0)
    check(whole, of(0) if r == 0 else torch.zeros(5, dtype=dtype))
    whole = torch.full((5 * W + 4,), 99, dtype=dtype)
    F.all_gather_single(whole[2:-2], x, comm)
    same(
        whole,
        torch.cat(
            [
                torch.full((2,), 99, dtype=dtype),
                *map(of, range(W)),
                torch.full((2,), 99, dtype=dtype),
            ]
        ),
    )
    same(comm.Allgather(x, 0), torch.cat([of(s) for s in range(W)]))
    same(comm.Allreduce(x, ReduceOp.MAX), of(W - 1))
    same(comm.Allreduce(x, ReduceOp.MIN), of(0))
    small = torch.tensor([1, 2], dtype=dtype)
    same(comm.Allreduce(small, ReduceOp.SUM), torch.tensor([W, 2 * W], dtype=dtype))
    same(comm.Allreduce(small, ReduceOp.PROD), torch.tensor([1, 2**W], dtype=dtype))


@every
def test_integers_stay_exact_D4(comm):
    """heat#497: 2**53 + 1 does not fit a double."""
    n = 2**53 + 1
    x = torch.tensor([n if comm.rank == 0 else 0])
    same(comm.Allreduce(x, ReduceOp.SUM), torch.tensor([n]))
    same(comm.Allreduce(torch.tensor([n - comm.rank]), ReduceOp.MAX), torch.tensor([n]))
    same(F.reduce(x, 0, group=comm), torch.tensor([n if comm.rank == 0 else 0]))


# ---------------------------------------------------------------- point to point


def _ring(comm, own):
    """What the left neighbour sends, and the dummy that closes the ring."""
    left, right = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
    handle = comm.Isend(own, right, 0)
    received = comm.Recv(mpicoll.JoinDummies(torch.empty_like(own), [handle.dummy]), left, 0)
    return received, comm.Wait(mpicoll.JoinDummiesHandle(handle, [received]))


@ranks(3)
def test_ring_E1(comm):
    """mpi4jax#2, nccl#479: every value is used twice, by its owner and by the right neighbour."""
    own = leaf([comm.rank + 1.0])
    received, sent = _ring(comm, own)
    res = mpicoll.JoinDummies(own + received, [sent])
    same(res.detach(), [comm.rank + 1.0 + (comm.rank - 1) % 3 + 1])
    res.sum().backward()
    same(own.grad, [2.0])


@ranks(3)
def test_long_ring_E1(comm):
    """nccl#479: the same ring with 10**6 doubles, weighted by the receiver's rank."""
    own = torch.full((10**6,), comm.rank + 1.0, dtype=f64, requires_grad=True)
    received, sent = _ring(comm, own)
    res = mpicoll.JoinDummies(comm.rank * received, [sent])
    res.sum().backward()
    same(own.grad, torch.full((10**6,), [1.0, 2.0, 0.0][comm.rank], dtype=f64))


@ranks(2)
@pytest.mark.parametrize("form", ["Sendrecv", "Isend"])
def test_symmetric_exchange_E1(comm, form):
    """mpi4jax#2: 8 MB both ways at once finish, in both directions of the graph."""
    other = 1 - comm.rank
    x = torch.full((2**20,), comm.rank + 1.0, dtype=f64, requires_grad=True)
    if form == "Sendrecv":
        y = comm.Sendrecv(x, other, torch.empty_like(x, requires_grad=False), other)
    else:
        received, sent = _ring(comm, x)
        y = mpicoll.JoinDummies(received, [sent])
    same(y.detach(), torch.full((2**20,), other + 1.0, dtype=f64))
    ((comm.rank + 1) * y).sum().backward()
    same(x.grad, torch.full((2**20,), other + 1.0, dtype=f64))


@every
@pytest.mark.parametrize("count", [3, 10**6])
def test_sent_temporary_lives_on_E3(comm, count):
    """pytorch#36140, #11630: the memory of a temporary in flight was used again."""
    left, right = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
    x = torch.full((count,), comm.rank + 1.0, dtype=f64)
    handle = comm.Isend(x * 2, right, 0)
    gc.collect()
    x.fill_(-7.0)
    junk = [torch.full((count,), -9.0, dtype=f64) for _ in range(4)]
    got = comm.Recv(torch.empty(count, dtype=f64), left, 0)
    comm.Wait(handle)
    del junk
    same(got.detach(), torch.full((count,), 2.0 * (left + 1), dtype=f64))


@every
def test_receive_into_strided_memory_E3(comm):
    """pytorch#36140: Irecv into a tensor that is not contiguous."""
    left, right = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
    base = torch.zeros(3, 4, dtype=f64)
    handle = comm.Irecv(base[:, 1:3].t(), left, 0)
    sent = comm.Isend(torch.arange(6, dtype=f64).view(2, 3) + 10 * comm.rank, right, 0)
    got = comm.Wait(handle)
    comm.Wait(sent)
    expected = torch.arange(6, dtype=f64).view(2, 3) + 10 * left
    same(got.detach(), expected)
    same(base[:, 1:3].t().contiguous(), expected)
    same(base[:, ::3], torch.zeros(3, 2, dtype=f64))


@every
def test_waiting_twice_E3(comm):
    """pytorch#11630: a handle completes once."""
    left, right = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
    receive = comm.Irecv(torch.empty(1), left, 0)
    send = comm.Isend(torch.ones(1), right, 0)
    comm.Wait(receive)
    comm.Wait(send)
    for handle in (receive, send):
        with pytest.raises(RuntimeError, match="waited for already"):
            comm.Wait(handle)


@every
def test_handle_dropped_E3(comm):
    """pytorch#11630: a handle that nobody waits for is reported, and harms nothing."""
    left, right = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
    handle = comm.Isend(torch.ones(2), right, 0)
    with pytest.warns(ResourceWarning, match=f"Isend with rank {right} .tag 0. was never waited"):
        del handle
    same(comm.Recv(torch.zeros(2), left, 0).detach(), [1.0, 1.0])


# ---------------------------------------------------------------- groups


@ranks(4)
@pytest.mark.parametrize("form", ["broadcast", "Bcast", "Bcast_"])
def test_root_in_a_subgroup_F1(comm, form):
    """pytorch#130515, #74602: roots are ranks of the group, not of the world."""
    half = comm.Split(comm.rank // 2)
    assert (half.rank, half.size) == (comm.rank % 2, 2)
    x = leaf(float(comm.rank))
    if form == "broadcast":
        y = F.broadcast(x, 1, half)
    elif form == "Bcast":
        y = half.Bcast(x, 1)
    else:
        y = half.Bcast_(x * 1, 1)
    same(y.detach(), [1.0, 1.0, 3.0, 3.0][comm.rank])
    ((half.rank + 1) * y).backward()
    same(x.grad, [0.0, 3.0, 0.0, 3.0][comm.rank])
    half.Free()


# ---------------------------------------------------------------- also


@ranks(2, 3, 4)
def test_rows_that_do_not_divide_Also(comm):
    """pytorch#101380: no splits, and W does not divide dimension 0."""
    rows = comm.size + 1
    with pytest.raises(ValueError, match=f"input has {rows} rows, which {comm.size} ranks"):
        F.all_to_all_single(torch.empty(rows), torch.empty(rows), group=comm)
    with pytest.raises(ValueError, match=f"output has {rows} rows"):
        F.all_to_all_single(torch.empty(rows), torch.empty(comm.size), group=comm)
    same(F.all_reduce(torch.ones(1), group=comm), [float(comm.size)])


@ranks(1, 2, 3)
def test_splits_of_no_rows_Also(comm):
    """pytorch#101380: rank r sends r rows to everyone else and none to itself."""
    W, r = comm.size, comm.rank
    sends = [0 if s == r else r for s in range(W)]
    receives = [0 if s == r else s for s in range(W)]
    x = torch.arange(2.0 * sum(sends), dtype=f64).view(-1, 2) + 100 * r
    x.requires_grad_()
    y = F.all_to_all_single(torch.empty(sum(receives), 2, dtype=f64), x, receives, sends, comm)
    expected = []
    for s in range(W):
        theirs = torch.arange(2.0 * s * (W - 1), dtype=f64).view(-1, 2) + 100 * s
        before = sum(0 if q == s else s for q in range(r))
        expected.append(theirs[before : before + receives[s]])
    same(y.detach(), torch.cat(expected))
    ((r + 1) * y).sum().backward()
    same(x.grad, torch.cat([torch.full((n, 2), s + 1.0, dtype=f64) for s, n in enumerate(sends)]))


@every
def test_broadcast_then_in_place_Also(comm):
    """A broadcast result may be changed in place, and the gradient is that of the change."""
    for call in (lambda x: F.broadcast(x, 0, comm), lambda x: comm.Bcast(x, 0)):
        x = leaf([1.0, 2.0])
        y = call(x)
        y.mul_(3)
        y[0] += 1
        same(y.detach(), [4.0, 6.0])
        y.sum().backward()
        same(x.grad, [3.0 * comm.size] * 2 if comm.rank == 0 else [0.0, 0.0])
        same(x.detach(), [1.0, 2.0])


@every
def test_expanded_gradient_Also(comm):
    """pytorch#73515: indexing the result and summing makes an expanded gradient."""
    x = torch.full((2, 3), comm.rank + 1.0, dtype=f64, requires_grad=True)
    parts = F.all_gather(x, comm)
    parts[0].sum().backward()
    same(x.grad, torch.full((2, 3), float(comm.size) if comm.rank == 0 else 0.0, dtype=f64))
    x.grad = None
    comm.Allgather(x, 0).sum().backward()
    same(x.grad, torch.full((2, 3), float(comm.size), dtype=f64))
    x.grad = None
    comm.Allreduce(x, ReduceOp.SUM)[0].expand(4, 3).sum().backward()
    same(x.grad, torch.tensor([[4.0] * 3, [0.0] * 3], dtype=f64) * comm.size)


@ranks(2)
def test_transposed_gradient_Also(comm):
    """pytorch#144060: logdet gives a transposed gradient."""
    for call in (lambda x: F.all_reduce(x, group=comm), lambda x: comm.Allreduce(x, ReduceOp.SUM)):
        x = (torch.eye(2, dtype=f64) * (comm.rank + 1)).requires_grad_()
        torch.logdet(call(x)).backward()
        torch.testing.assert_close(
            x.grad, torch.eye(2, dtype=f64) * (2 / 3), rtol=1e-15, atol=1e-15
        )


def test_ranks_cover_the_world():
    """Every rank of the run takes part in the group of a test that asks for all of them."""
    group = part(min(SIZE, 4))
    assert (group is None) == (RANK >= 4)
    if group is not None:
        assert (group.rank, group.size) == (RANK, min(SIZE, 4))
        group.Free()
