"""Corners where an adjoint, a refusal or a report is easily lost."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from groups import every, ranks

import mpicoll
from mpicoll.nn import functional

f64 = torch.float64
SUM, MAX = mpicoll.MPI_SUM, mpicoll.MPI_MAX


def equal(got: torch.Tensor, expected) -> None:
    torch.testing.assert_close(
        got.detach(), torch.as_tensor(expected, dtype=got.dtype), rtol=0, atol=0
    )


@every
def test_moving_dtypes_have_no_summed_gradient(comm, works):
    """float8 and complex32 are moved; where the gradient would be a sum, forward refuses."""
    for dtype in (torch.float8_e4m3fn, torch.complex32):
        x = torch.ones(4).to(dtype).requires_grad_()
        for call in (
            lambda x: comm.Bcast(x, 0),
            lambda x: comm.Allgather(x, 0),
            lambda x: functional.all_gather(x, group=comm),
        ):
            with pytest.raises(RuntimeError, match="would have to be summed"):
                call(x)
        assert comm.Gather(x, 0, 0).requires_grad
        works(comm)


@every
def test_ties_share_in_the_dtype_of_the_tensor(comm):
    x = torch.ones(2, dtype=f64, requires_grad=True)
    comm.Allreduce(x, MAX).sum().backward()
    equal(x.grad, [float(comm.size) / comm.size] * 2)
    x.grad = None
    y = comm.Allreduce(x, MAX)
    (y * (1.0 if comm.rank == 0 else 0.0)).sum().backward()
    equal(x.grad, [1.0 / comm.size] * 2)


@every
def test_receive_from_nobody_is_the_identity(comm):
    x = torch.full((3,), 2.0, dtype=f64, requires_grad=True)
    (comm.Recv(x * 1, None, 0) * 5).sum().backward()
    equal(x.grad, [5.0] * 3)
    x.grad = None
    (comm.Sendrecv(torch.ones(1, dtype=f64), None, x * 1, None) * 7).sum().backward()
    equal(x.grad, [7.0] * 3)


@every
def test_sendrecv_whose_gradient_could_not_return(comm, works):
    x = torch.ones(2, requires_grad=True)
    with pytest.raises(RuntimeError, match="could not come back"):
        comm.Sendrecv(x, comm.rank, torch.zeros(2, dtype=torch.int64), comm.rank)
    works(comm)


@ranks(2)
def test_refused_buffer_receives_nothing(comm):
    """What torch does not allow to be written in place is refused before the receive is posted."""
    x = torch.ones(4, requires_grad=True)
    refused, _ = (x * 1).chunk(2)
    if comm.rank == 1:
        with pytest.raises(RuntimeError, match="modified inplace"):
            comm.Irecv(refused, 0, 0)
    comm.Barrier()
    if comm.rank == 0:
        comm.Send(torch.tensor([7.0, 8.0]), 1, 0)
    else:
        equal(comm.Recv(torch.zeros(2), 0, 0), [7.0, 8.0])
        equal(refused, [1.0, 1.0])


@every
def test_refused_broadcast_sends_nothing(comm, works):
    x = torch.full((4,), comm.rank + 1.0, requires_grad=True)
    refused, _ = (x * 1).chunk(2)
    with pytest.raises(RuntimeError, match="modified inplace"):
        comm.Bcast_(refused, comm.size - 1)
    equal(refused, [comm.rank + 1.0] * 2)
    works(comm)


@every
def test_sparse_gradient(comm):
    """An embedding asks for a sparse gradient; the broadcast's adjoint adds it up all the same."""
    weight = torch.ones(3, 2, requires_grad=True)
    shared = comm.Bcast(weight, 0)
    index = torch.tensor([0, 2])
    out = torch.nn.functional.embedding(index, shared, sparse=True)
    ((comm.rank + 1) * out).sum().backward()
    total = float(sum(range(1, comm.size + 1)) if comm.rank == 0 else 0)
    equal(weight.grad, [[total] * 2, [0.0] * 2, [total] * 2])


@every
def test_default_device_does_not_matter(comm):
    x = torch.full((2,), comm.rank + 1.0, dtype=f64, requires_grad=True)
    buffer = torch.zeros(2, dtype=f64)
    mine = [torch.ones(2, dtype=f64)] * comm.size if comm.rank == 0 else [torch.ones(2, dtype=f64)]
    with torch.device("meta"):
        part = functional.scatter(mine, 0, comm)
        got = comm.Sendrecv(x, comm.rank, buffer, comm.rank)
        kept = comm.Recv(buffer.clone(), None, 0)
    (3 * got + part + kept).sum().backward()
    equal(x.grad, [3.0, 3.0])


@every
def test_overlap_is_seen_through_other_owners_of_memory(comm):
    """Two tensors from numpy share memory though torch sees two storages."""
    memory = np.zeros((comm.size, 3), np.float32)
    memory[comm.rank] = comm.rank + 1
    whole, own = torch.from_numpy(memory), torch.from_numpy(memory[comm.rank : comm.rank + 1])
    functional.all_gather_single(whole, own, comm)
    equal(whole, [[r + 1.0] * 3 for r in range(comm.size)])
    line = np.arange(5, dtype=np.float32)
    with pytest.raises(ValueError, match="share memory"):
        comm.Sendrecv(torch.from_numpy(line[:4]), None, torch.from_numpy(line[1:]), None)


@every
def test_zeros_without_memory(comm):
    """Torch makes zeros that have no storage; they are sent as zeros."""
    zeros = torch._efficientzerotensor(3)
    equal(comm.Allreduce(zeros, SUM), [0.0] * 3)
    equal(comm.Allgather(zeros, 0), [0.0] * 3 * comm.size)


@every
def test_func_grad_through_messages(comm, works):
    """torch.func.grad over a ring; what it could not run in backward is refused in forward."""
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    x = torch.full((2,), comm.rank + 2.0, dtype=f64)
    grad = torch.func.grad(
        lambda x: ((comm.rank + 1) * comm.Sendrecv(x**2, right, 0 * x, left)).sum()
    )(x)
    equal(grad, (right + 1) * 2 * x)
    with pytest.raises(RuntimeError, match=r"transform of torch\.func"):
        torch.func.grad(lambda x: (x * comm.Recv(torch.empty(2, dtype=f64), left, 0)).sum())(x)
    works(comm)


@every
def test_a_copied_module_keeps_its_communicator(comm):
    import copy

    module = torch.nn.Linear(1, 1)
    module.comm = comm
    assert copy.deepcopy(module).comm is comm
