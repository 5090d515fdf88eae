"""A program for mpi4torch runs unchanged with ``import mpicoll as mpi4torch``."""

from __future__ import annotations

import pytest
import torch

import mpicoll as mpi4torch

NAMES = [
    "MPI_MAX", "MPI_MIN", "MPI_SUM", "MPI_PROD", "MPI_LAND", "MPI_BAND", "MPI_LOR", "MPI_BOR",
    "MPI_LXOR", "MPI_BXOR", "MPI_MINLOC", "MPI_MAXLOC", "WaitHandle", "JoinDummies",
    "JoinDummiesHandle", "MPI_Communicator", "COMM_WORLD", "comm_from_mpi4py",
    "deactivate_cuda_aware_mpi_support",
]  # fmt: skip
comm = mpi4torch.COMM_WORLD
right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size


def test_every_name_is_there():
    for name in NAMES:
        assert hasattr(mpi4torch, name), name
        assert name in mpi4torch.__all__, name


def test_constants():
    """Plain integers 0 to 11, in mpi4torch's order."""
    for value, name in enumerate(NAMES[:12]):
        constant = getattr(mpi4torch, name)
        assert isinstance(constant, int), name
        assert constant == value, name


def test_operations_by_integer():
    x = torch.tensor([comm.rank + 1.0])
    for name, value in (("MPI_SUM", sum(range(1, comm.size + 1))), ("MPI_MAX", comm.size)):
        assert comm.Allreduce(x, int(getattr(mpi4torch, name))).item() == value


def test_keywords():
    """Every method takes the documented names."""
    W, r = comm.size, comm.rank
    x = torch.ones(W, 2, dtype=torch.float64)
    assert comm.Allreduce(tensor=x, op=mpi4torch.MPI_SUM)[0, 0] == W
    assert comm.Bcast_(tensor=x.clone(), root=0)[0, 0] == 1
    assert comm.Reduce_(tensor=x.clone(), op=mpi4torch.MPI_SUM, root=0)[0, 0] == (
        W if r == 0 else 0
    )
    assert comm.Gather(tensor=x, gatheraxis=0, root=0).shape == ((W * W if r == 0 else 0), 2)
    assert comm.Allgather(tensor=x, gatheraxis=1).shape == (W, 2 * W)
    assert comm.Scatter(tensor=x, scatteraxis=0, numelem=1, root=0).shape == (1, 2)
    assert comm.Alltoall(tensor=x, gatheraxis=1, scatteraxis=0, numelem=1).shape == (1, 2 * W)
    handle = comm.Isend(tensor=x * r, dest=right, tag=1)
    got = comm.Irecv(tensor=torch.empty_like(x), source=left, tag=1)
    assert comm.Wait(waithandle=got)[0, 0] == left
    assert comm.Wait(waithandle=handle)[0, 0] == r
    handle = comm.Isend(tensor=x, dest=right, tag=2)
    comm.Recv(tensor=torch.empty_like(x), source=left, tag=2)
    comm.Wait(waithandle=handle)
    handle = comm.Irecv(tensor=torch.empty_like(x), source=left, tag=3)
    comm.Send(tensor=x, dest=right, tag=3)
    comm.Wait(waithandle=handle)


def test_properties_and_types():
    assert isinstance(comm, mpi4torch.MPI_Communicator)
    handle = comm.Isend(torch.ones(1), right, 0)
    assert isinstance(handle, mpi4torch.WaitHandle)
    assert isinstance(handle.dummy, torch.Tensor)
    comm.Recv(torch.empty(1), left, 0)
    comm.Wait(handle)
    with pytest.raises(AttributeError):
        comm.rank = 1


def test_from_mpi4py():
    from mpi4py import MPI

    wrapped = mpi4torch.comm_from_mpi4py(MPI.COMM_WORLD)
    assert (wrapped.rank, wrapped.size) == (comm.rank, comm.size)
    assert wrapped.Allreduce(torch.ones(1), mpi4torch.MPI_SUM).item() == comm.size


# ---------------------------------------------------------------- its documentation's examples


def test_parameter_averaging():
    """Every rank has part of the data; parameters are shared, and the loss is their sum."""
    target = torch.tensor([0.1, 1.0, -2.0], dtype=torch.double)

    def polynomial(x, p):
        return p[2] * (x * x) + p[1] * x + p[0]

    x = torch.linspace(-1, 1, 100, dtype=torch.double)
    mine = x[comm.rank :: comm.size]
    data = polynomial(mine, target)
    params = torch.zeros(3, dtype=torch.double, requires_grad=True)

    def loss():
        # Averaging equal parameters makes every rank's gradient the one of the whole loss.
        shared = comm.Allreduce(params, mpi4torch.MPI_SUM) / comm.size
        local = torch.square(data - polynomial(mine, shared)).sum()
        return comm.Allreduce(local, mpi4torch.MPI_SUM)

    loss().backward()
    alone = torch.zeros(3, dtype=torch.double, requires_grad=True)
    torch.square(polynomial(x, target) - polynomial(x, alone)).sum().backward()
    torch.testing.assert_close(params.grad, alone.grad, rtol=1e-12, atol=1e-12)

    # Newton's method ends in one step: the loss is quadratic.
    (g,) = torch.autograd.grad(loss(), params, create_graph=True)
    rows = [torch.autograd.grad(g[i], params, retain_graph=True)[0] for i in range(3)]
    with torch.no_grad():
        params -= torch.linalg.solve(torch.stack(rows), g)
    torch.testing.assert_close(params.detach(), target, rtol=0, atol=1e-12)
    everyone = comm.Allgather(params.detach()[None], 0)
    assert torch.equal(everyone, everyone[:1].expand(comm.size, 3))


def test_isend_recv_wait():
    """The ring of its chapter on non-blocking communication."""
    a = torch.tensor([1.0 + comm.rank], requires_grad=True)
    handle = comm.Isend(a, right, 0)
    recvbuffer = mpi4torch.JoinDummies(torch.empty_like(a), [handle.dummy])
    b = comm.Recv(recvbuffer, left, 0)
    wait_ret = comm.Wait(mpi4torch.JoinDummiesHandle(handle, [b]))
    res = mpi4torch.JoinDummies(a + b, [wait_ret])
    assert res.item() == (1.0 + comm.rank) + (1.0 + left)
    res.backward()
    assert a.grad.item() == 2.0


def test_irecv_send_wait():
    a = torch.tensor([1.0 + comm.rank], requires_grad=True)
    handle = comm.Irecv(mpi4torch.JoinDummies(torch.empty_like(a), [a]), left, 0)
    send_ret = comm.Send(mpi4torch.JoinDummies(a, [handle.dummy]), right, 0)
    b = comm.Wait(mpi4torch.JoinDummiesHandle(handle, [send_ret]))
    res = a + b
    assert res.item() == (1.0 + comm.rank) + (1.0 + left)
    res.backward()
    assert a.grad.item() == 2.0


def test_isend_irecv_wait():
    a = torch.tensor([1.0 + comm.rank], requires_grad=True)
    send = comm.Isend(a, right, 0)
    recv = comm.Irecv(mpi4torch.JoinDummies(torch.empty_like(a), [send.dummy]), left, 0)
    sent = comm.Wait(mpi4torch.JoinDummiesHandle(send, [recv.dummy]))
    b = comm.Wait(mpi4torch.JoinDummiesHandle(recv, [sent]))
    (comm.rank * b).backward()
    assert a.grad.item() == right


def test_reduce_needs_its_return_value():
    """Its guard, word for word in spirit: the tensor that went in must not be used again."""
    tmp = torch.rand(10, dtype=torch.double, requires_grad=True) * 1
    res = tmp + comm.Reduce_(tmp, mpi4torch.MPI_SUM, 0)
    with pytest.raises(RuntimeError, match="use the return value instead"):
        res.sum().backward()


def test_reduce_then_broadcast_is_an_allreduce():
    x = torch.rand(10, dtype=torch.double, requires_grad=True)
    y = comm.Bcast_(comm.Reduce_(x * 1, mpi4torch.MPI_SUM, 0), 0)
    assert torch.equal(y, comm.Allreduce(x, mpi4torch.MPI_SUM))
    y.sum().backward()
    assert torch.equal(x.grad, torch.full((10,), float(comm.size), dtype=torch.double))


def test_scatter_and_gather_are_inverse():
    whole = torch.rand(2, comm.size, 3, dtype=torch.double)
    tensor = (
        whole.clone().requires_grad_() if comm.rank == 0 else torch.rand([1], dtype=torch.double)
    )
    part = comm.Scatter(tensor, 1, 1, 0)
    back = comm.Gather(part, 1, 0)
    if comm.rank == 0:
        assert torch.equal(back, whole)
    else:
        assert back.shape == (2, 0, 3)
    back.sum().backward()
    if comm.rank == 0:
        assert torch.equal(tensor.grad, torch.ones_like(whole))
