"""Communicators: how they are made, shared, dropped and freed."""

from __future__ import annotations

import copy
import pickle
import threading
import time

import pytest
import torch
from groups import RANK, SIZE, every, ranks
from mpi4py import MPI

import mpicoll
import mpicoll.nn.functional as F
from mpicoll import COMM_SELF, COMM_WORLD, ReduceOp

SUM = ReduceOp.SUM


def same(got: torch.Tensor, expected) -> None:
    if not isinstance(expected, torch.Tensor):
        expected = torch.tensor(expected, dtype=got.dtype)
    torch.testing.assert_close(got.detach(), expected, rtol=0, atol=0)


def total(comm) -> float:
    """What an all-reduce of the world's ranks gives."""
    return comm.Allreduce(torch.tensor(float(RANK)), SUM).item()


# ---------------------------------------------------------------- the ready ones


def test_predefined(world):
    assert (COMM_WORLD.rank, COMM_WORLD.size) == (MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size)
    assert (COMM_SELF.rank, COMM_SELF.size) == (0, 1)
    same(COMM_SELF.Allreduce(torch.tensor([3.0]), SUM), [3.0])
    same(COMM_WORLD.Allreduce(torch.ones(1), SUM), [float(SIZE)])
    assert mpicoll.MPI_Communicator is mpicoll.Communicator
    for comm, name in ((COMM_WORLD, "COMM_WORLD"), (COMM_SELF, "COMM_SELF")):
        with pytest.raises(ValueError, match=f"Free: {name} is predefined"):
            comm.Free()
    with pytest.raises(AttributeError):
        COMM_WORLD.rank = 3
    with pytest.raises(AttributeError):
        COMM_WORLD.size = 3


def test_repr():
    assert repr(COMM_WORLD) == f"<mpicoll.Communicator COMM_WORLD, rank {RANK} of {SIZE}>"
    dup = COMM_WORLD.Dup()
    assert repr(dup) == f"<mpicoll.Communicator Dup of COMM_WORLD, rank {RANK} of {SIZE}>"
    dup.Free()
    assert repr(dup) == "<mpicoll.Communicator Dup of COMM_WORLD, freed>"


def test_pickling():
    """The predefined ones are the same everywhere; the others live in their process."""
    assert pickle.loads(pickle.dumps(COMM_WORLD)) is COMM_WORLD
    assert pickle.loads(pickle.dumps(COMM_SELF)) is COMM_SELF
    assert copy.deepcopy(COMM_WORLD) is COMM_WORLD
    dup = COMM_WORLD.Dup()
    with pytest.raises(TypeError, match="lives in this process and cannot be pickled"):
        pickle.dumps(dup)
    dup.Free()


# ---------------------------------------------------------------- Split, Dup, Free


def test_split_by_color():
    half = COMM_WORLD.Split(RANK % 2)
    members = list(range(RANK % 2, SIZE, 2))
    assert half.size == len(members)
    assert half.rank == members.index(RANK)
    assert total(half) == sum(members)
    half.Free()


def test_split_by_key():
    back = COMM_WORLD.Split(0, -RANK)
    assert (back.rank, back.size) == (SIZE - 1 - RANK, SIZE)
    same(back.Allgather(torch.tensor([float(RANK)]), 0), [float(r) for r in reversed(range(SIZE))])
    same(back.Bcast(torch.tensor([float(RANK)]), 0), [SIZE - 1.0])
    back.Free()
    tied = COMM_WORLD.Split(7, 5)
    assert tied.rank == RANK
    tied.Free()


def test_split_without_a_color():
    part = COMM_WORLD.Split(None if RANK == 0 else 3)
    if RANK == 0:
        assert part is None
    else:
        assert (part.rank, part.size) == (RANK - 1, SIZE - 1)
        assert total(part) == sum(range(1, SIZE))
        part.Free()
    assert COMM_WORLD.Split(None) is None


def test_split_of_a_split():
    outer = COMM_WORLD.Split(0, -RANK)
    inner = outer.Split(outer.rank // 2)
    assert inner.rank == outer.rank % 2
    inner.Free()
    outer.Free()


def test_dup_is_a_channel_of_its_own():
    dup = COMM_WORLD.Dup()
    assert (dup.rank, dup.size) == (RANK, SIZE)
    right, left = (RANK + 1) % SIZE, (RANK - 1) % SIZE
    handles = [COMM_WORLD.Isend(torch.zeros(1), right, 0), dup.Isend(torch.ones(1), right, 0)]
    same(dup.Recv(torch.empty(1), left, 0), [1.0])
    same(COMM_WORLD.Recv(torch.empty(1), left, 0), [0.0])
    for handle in handles:
        handle.wait()
    dup.Free()


def test_freed(works):
    dup = COMM_WORLD.Dup()
    x = torch.ones(SIZE)
    dup.Free()
    with pytest.raises(ValueError, match="Free: Dup of COMM_WORLD has been freed already"):
        dup.Free()
    for call in (
        lambda: dup.Allreduce(x, SUM),
        lambda: dup.Reduce_scatter(x, 0, 1),
        lambda: dup.Bcast_(x, 0),
        lambda: dup.Gather(x, 0, 0),
        lambda: dup.Scatter(x, 0, 1, 0),
        lambda: dup.Alltoall(x, 0, 0, SIZE),
        lambda: dup.Isend(x, 0, 0),
        lambda: dup.Irecv(x, 0, 0),
        lambda: dup.Sendrecv(x, 0, x.clone(), 0),
        dup.Barrier,
        dup.Dup,
        lambda: dup.Split(0),
        dup.to_mpi4py,
        lambda: F.all_reduce(x, group=dup),
        lambda: F.all_gather(x, dup),
        lambda: F.scatter([x] * SIZE, 0, dup),
        lambda: F.all_to_all([torch.empty(1)] * SIZE, [x[:1]] * SIZE, dup),
    ):
        with pytest.raises(ValueError, match="been freed"):
            call()
    works()


def test_freed_before_backward():
    """The graph outlives its communicator: a clear error, not a crash."""
    dup = COMM_WORLD.Dup()
    x = torch.ones(2, requires_grad=True)
    y = dup.Allreduce(x, SUM)
    dup.Free()
    with pytest.raises(ValueError, match="been freed"):
        y.sum().backward()


def test_many_made_and_freed():
    """More than a library has context ids if one of them were kept."""
    for _ in range(300):
        COMM_SELF.Dup().Free()
    for _ in range(800):
        COMM_SELF.Split(0).Free()


@ranks(2)
@pytest.mark.filterwarnings("error")
def test_successor_gets_nothing_of_a_freed_communicator(comm):
    """Libraries reuse contexts: messages that nobody received must not meet the next one."""
    other = 1 - comm.rank
    for kind in ("message", "gradient"):
        for _ in range(3):
            dup = comm.Dup()
            if kind == "message":
                handle = dup.Isend(torch.full((2,), -1.0), other, 0)
                dup.Barrier()
                handle.wait()
                dup.Free()
            else:
                x = torch.ones(2, requires_grad=True)
                if comm.rank == 0:
                    dup.Send(x, 1, 0)
                else:
                    dup.Recv(torch.empty(2), 0, 0).sum().backward()
                dup.Barrier()
                if comm.rank == 0:
                    with pytest.warns(RuntimeWarning, match="no node received"):
                        dup.Free()
                else:
                    dup.Free()
        fresh = comm.Dup()
        x = torch.full((2,), comm.rank + 1.0, requires_grad=True)
        handle = fresh.Isend(x, other, 0)
        got = fresh.Recv(torch.empty(2), other, 0)
        same(got, [other + 1.0] * 2)
        ((comm.rank + 5) * got + 0 * fresh.Wait(handle)).sum().backward()
        same(x.grad, [other + 5.0] * 2)
        fresh.Free()


@every
def test_dropped_is_freed_at_the_next_collective_act(comm):
    dup = comm.Dup()
    handle = dup.to_mpi4py()
    channels = dup._comm.channels
    with pytest.warns(
        ResourceWarning, match=r"\(Dup of part 0 of COMM_WORLD\) was dropped without Free"
    ):
        del dup
    assert MPI.COMM_NULL not in channels
    if comm.rank == 0:
        same(comm.Sendrecv(torch.ones(1), 0, torch.zeros(1), 0), [1.0])  # not collective: not yet
    assert MPI.COMM_NULL not in channels
    comm.Dup().Free()
    assert all(channel == MPI.COMM_NULL for channel in channels)
    assert handle == MPI.COMM_NULL


@ranks(2, 3)
def test_dropped_on_one_rank_only(comm):
    """Freed once every rank has let go."""
    dup = comm.Dup()
    handle = dup.to_mpi4py()
    if comm.rank == 0:
        with pytest.warns(ResourceWarning, match="was dropped"):
            del dup
    comm.Dup().Free()
    assert handle != MPI.COMM_NULL
    if comm.rank != 0:
        same(torch.tensor(float(dup.size)), float(comm.size))
        with pytest.warns(ResourceWarning, match="was dropped"):
            del dup
    comm.Split(0).Free()
    assert handle == MPI.COMM_NULL


@every
def test_dropped_while_a_graph_needs_it(comm):
    """A helper that splits, reduces and returns: backward still has its communicator."""

    def group_sum(x):
        return comm.Split(0).Allreduce(x, SUM)

    def run(x):
        ((comm.rank + 1) * group_sum(group_sum(x))).sum().backward()

    x = torch.full((2,), comm.rank + 1.0, dtype=torch.float64, requires_grad=True)
    with pytest.warns(ResourceWarning, match="was dropped"):
        run(x)
    weights = sum(range(1, comm.size + 1))
    same(x.grad, [float(comm.size * weights)] * 2)
    comm.Dup().Free()  # a collective act buries them


@every
def test_dropped_parent_takes_its_dropped_children_along(comm):
    def make_and_drop():
        made = comm.Dup()
        return made.to_mpi4py(), made.Dup().to_mpi4py()

    with pytest.warns(ResourceWarning, match="was dropped"):
        parent, child = make_and_drop()
    assert MPI.COMM_NULL not in (parent, child)
    comm.Dup().Free()
    assert parent == child == MPI.COMM_NULL


@ranks(2, 3, 4)
def test_ranks_left_out_of_a_split_count_on(comm):
    """What is dropped has the same number on every rank, also where a Split gave None."""
    part = comm.Split(None if comm.rank == 0 else 0)
    dup = comm.Dup()
    handle = dup.to_mpi4py()
    with pytest.warns(ResourceWarning, match="Dup"):
        del dup
    comm.Dup().Free()
    assert handle == MPI.COMM_NULL
    if part is not None:
        same(part.Allreduce(torch.ones(1), SUM), [comm.size - 1.0])
        part.Free()


def test_from_mpi4py_twice_is_the_same():
    theirs = MPI.COMM_WORLD.Dup()
    ours = mpicoll.comm_from_mpi4py(theirs)
    assert mpicoll.comm_from_mpi4py(theirs) is ours
    ours.Free()
    again = mpicoll.comm_from_mpi4py(theirs)
    assert again is not ours
    assert total(again) == sum(range(SIZE))
    theirs.Free()  # takes along what was made of it
    assert again._made.freed


# ---------------------------------------------------------------- mpi4py


def test_from_mpi4py_shares_the_handle():
    theirs = MPI.COMM_WORLD.Dup()
    ours = mpicoll.comm_from_mpi4py(theirs)
    assert ours.to_mpi4py() == theirs
    assert ours.to_mpi4py().handle == theirs.handle
    assert (ours.rank, ours.size) == (theirs.rank, theirs.size)
    assert total(ours) == sum(range(SIZE))
    assert "mpi4py communicator" in repr(ours)
    ours.Free()
    assert theirs.allreduce(1) == SIZE  # it stays the caller's
    with pytest.raises(ValueError, match="been freed"):
        ours.Allreduce(torch.ones(1), SUM)
    theirs.Free()


def test_to_mpi4py_shares_the_handle():
    dup = COMM_WORLD.Dup()
    theirs = dup.to_mpi4py()
    assert isinstance(theirs, MPI.Comm)
    assert theirs.allreduce(1) == SIZE
    assert MPI.Comm.Compare(theirs, MPI.COMM_WORLD) == (MPI.CONGRUENT)
    assert COMM_WORLD.to_mpi4py() == MPI.COMM_WORLD
    dup.Free()


def test_from_mpi4py_of_the_predefined():
    assert mpicoll.comm_from_mpi4py(MPI.COMM_WORLD) is COMM_WORLD
    assert mpicoll.comm_from_mpi4py(MPI.COMM_SELF) is COMM_SELF
    for value in (None, 3, "world", COMM_WORLD):
        with pytest.raises(TypeError, match=r"comm must be an mpi4py\.MPI\.Comm, not"):
            mpicoll.comm_from_mpi4py(value)
    with pytest.raises(ValueError, match=r"comm is MPI\.COMM_NULL"):
        mpicoll.comm_from_mpi4py(MPI.COMM_NULL)


@ranks(2, 3)
def test_intercommunicator_is_refused(comm):
    base = comm.to_mpi4py()
    local = base.Split(min(comm.rank, 1))
    between = local.Create_intercomm(0, base, 1 if comm.rank == 0 else 0)
    with pytest.raises(ValueError, match="intercommunicator"):
        mpicoll.comm_from_mpi4py(between)
    between.Free()
    local.Free()


def test_mpi4py_communicator_as_group():
    """Wrapped once, and what is made for it goes when the user frees it."""
    back = MPI.COMM_WORLD.Split(0, -RANK)
    x = torch.tensor([float(RANK)], requires_grad=True)
    y = F.broadcast(x, 0, back)
    same(y, [SIZE - 1.0])
    first = F.all_reduce(torch.ones(1), group=back)
    same(first, [float(SIZE)])
    from mpicoll.communicator import as_communicator

    kept = as_communicator("test", back)
    assert as_communicator("test", back) is kept
    assert kept.to_mpi4py() == back
    y.sum().backward()
    same(x.grad, [float(SIZE) if RANK == SIZE - 1 else 0.0])
    core = kept._comm
    back.Free()
    assert core.freed
    same(F.all_reduce(torch.ones(1), group=MPI.COMM_WORLD), [float(SIZE)])
    same(F.all_reduce(torch.ones(1), group=MPI.COMM_SELF), [1.0])


def test_mpi4py_operations():
    """A reduction may be an mpi4py operation, torch's, a constant or its value."""
    x = torch.tensor([RANK + 1.0])
    for op, expected in (
        (MPI.SUM, sum(range(1, SIZE + 1))),
        (torch.distributed.ReduceOp.SUM, sum(range(1, SIZE + 1))),
        (mpicoll.MPI_SUM, sum(range(1, SIZE + 1))), (2, sum(range(1, SIZE + 1))),
        (MPI.MAX, SIZE), (torch.distributed.ReduceOp.MAX, SIZE), (0, SIZE), (1, 1),
        (MPI.MIN, 1), (torch.distributed.ReduceOp.MIN, 1),
        (torch.distributed.ReduceOp.AVG, (SIZE + 1) / 2),
    ):  # fmt: skip
        same(COMM_WORLD.Allreduce(x, op), [float(expected)])
        same(F.all_reduce(x, op), [float(expected)])


def test_errors_return_on_what_mpicoll_makes():
    dup = COMM_WORLD.Dup()
    for channel in dup._comm.channels:
        assert channel.Get_errhandler() == MPI.ERRORS_RETURN
    dup.Free()


# ---------------------------------------------------------------- the GIL


@ranks(2)
@pytest.mark.parametrize(
    "call", ["Allreduce", "Barrier", "Recv", "Sendrecv", "Allgather", "backward"]
)
def test_other_threads_run_while_blocked(comm, call):
    """Rank 1 comes late; a thread of rank 0 ticks meanwhile."""
    x = torch.ones(1, dtype=torch.float64, requires_grad=call == "backward")
    y = comm.Allreduce(x, SUM) if call == "backward" else None
    other = 1 - comm.rank
    run = {
        "Allreduce": lambda: comm.Allreduce(x, SUM),
        "Barrier": comm.Barrier,
        "Recv": lambda: comm.Recv(torch.empty(1, dtype=torch.float64), 1, 0)
        if comm.rank == 0 else comm.Send(x, 0, 0),
        "Sendrecv": lambda: comm.Sendrecv(x, other, x.clone(), other),
        "Allgather": lambda: comm.Allgather(x, 0),
        "backward": lambda: y.sum().backward(),
    }[call]  # fmt: skip
    ticks, blocked = [], threading.Event()

    def tick():
        while not blocked.is_set():
            ticks.append(time.monotonic())
            time.sleep(0.001)

    comm.Barrier()
    if comm.rank == 1:
        time.sleep(0.3)
        run()
        return
    thread = threading.Thread(target=tick)
    thread.start()
    start = time.monotonic()
    run()
    end = time.monotonic()
    blocked.set()
    thread.join()
    assert end - start > 0.2
    assert sum(start < t < end for t in ticks) > 20


# ---------------------------------------------------------------- devices


def test_cuda_aware_answer():
    enabled, reason = mpicoll.cuda_aware_mpi_support()
    assert enabled is False  # the MPIs of the tests have no device support
    assert reason
    assert isinstance(reason, str)


def test_cuda_aware_by_the_environment(monkeypatch):
    for value, expected in (("0", False), ("1", True)):
        monkeypatch.setenv("MPICOLL_CUDA_AWARE", value)
        assert mpicoll.cuda_aware_mpi_support() == (expected, f"MPICOLL_CUDA_AWARE={value}")
    for value in ("yes", "2", "true"):
        monkeypatch.setenv("MPICOLL_CUDA_AWARE", value)
        with pytest.raises(ValueError, match=f"MPICOLL_CUDA_AWARE is '{value}'; it must be 0 or 1"):
            mpicoll.cuda_aware_mpi_support()


def test_cuda_aware_switched_off(monkeypatch):
    from mpicoll.staging import devices

    monkeypatch.setattr(devices, "_deactivated", False)
    monkeypatch.setenv("MPICOLL_CUDA_AWARE", "1")
    assert mpicoll.cuda_aware_mpi_support()[0] is True
    mpicoll.deactivate_cuda_aware_mpi_support()
    enabled, reason = mpicoll.cuda_aware_mpi_support()
    assert enabled is False
    assert "deactivate_cuda_aware_mpi_support" in reason


# ---------------------------------------------------------------- replicated losses


@every
def test_copy_to_group(comm):
    x = torch.tensor([1.0, -2.0], dtype=torch.float64, requires_grad=True)
    y = mpicoll.copy_to_group(x, comm)
    assert y is not x
    assert y.data_ptr() != x.data_ptr()
    same(y, [1.0, -2.0])
    ((comm.rank + 1) * y**2).sum().backward()
    total = sum(range(1, comm.size + 1))
    same(x.grad, [2.0 * total, -4.0 * total])
    strided = torch.arange(6.0).view(2, 3).t()
    same(mpicoll.copy_to_group(strided, comm), strided)
    assert mpicoll.copy_to_group(strided, comm).is_contiguous()


@every
def test_reduce_from_group(comm):
    x = torch.tensor([comm.rank + 1.0, 2.0], dtype=torch.float64, requires_grad=True)
    y = mpicoll.reduce_from_group(x, comm)
    total = sum(range(1, comm.size + 1))
    same(y, [float(total), 2.0 * comm.size])
    (3 * y).sum().backward()
    same(x.grad, [3.0, 3.0])


@every
def test_the_pair_is_the_gradient_of_one_loss(comm):
    """A linear layer cut into columns, as in Megatron-LM: equal to the same layer in one piece."""
    W, r = comm.size, comm.rank
    torch.manual_seed(0)
    weight = torch.randn(2 * W, 3, dtype=torch.float64)
    x = torch.randn(4, 3, dtype=torch.float64)

    whole_w, whole_x = weight.clone().requires_grad_(), x.clone().requires_grad_()
    whole_loss = ((whole_x @ whole_w.t()).tanh().sum(1) ** 2).sum()
    gx, gw = torch.autograd.grad(whole_loss, (whole_x, whole_w), create_graph=True)
    (hx,) = torch.autograd.grad(gx.square().sum(), whole_x)

    mine = weight[2 * r : 2 * r + 2].clone().requires_grad_()
    own_x = x.clone().requires_grad_()
    inner = mpicoll.copy_to_group(own_x, comm)
    loss = (mpicoll.reduce_from_group((inner @ mine.t()).tanh().sum(1), comm) ** 2).sum()
    torch.testing.assert_close(loss, whole_loss, rtol=1e-13, atol=1e-13)
    g, gm = torch.autograd.grad(loss, (own_x, mine), create_graph=True)
    torch.testing.assert_close(g, gx, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gm, gw[2 * r : 2 * r + 2], rtol=1e-12, atol=1e-12)
    (h,) = torch.autograd.grad(g.square().sum(), own_x)
    torch.testing.assert_close(h, hx, rtol=1e-11, atol=1e-11)
