"""The all-reduce that goes on while the program computes: the core, and what stages for it."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from groups import every, several

import mpicoll
from mpicoll import watch
from mpicoll._core import nonblocking
from mpicoll.arguments import _TAKES
from mpicoll.dispatch import BACKWARD, USER, Call
from mpicoll.nonblocking import Pending
from mpicoll.ops import OPERATIONS, REDUCTIONS, ReduceOp
from mpicoll.staging.dtypes import DTYPES

CASES = [(op, dtype) for op in ReduceOp for dtype in DTYPES if dtype in _TAKES[op]]
SUMS = [torch.float64, torch.bfloat16]


def values(rank, n, dtype, op=ReduceOp.SUM):
    """Fractions, so that the order of additions counts; pairs where the operation takes them."""
    made = torch.Generator().manual_seed(rank + 1)
    real = torch.randint(-9, 10, (n,), generator=made)
    if dtype.is_complex:
        return torch.complex(real / 7, torch.randint(-9, 10, (n,), generator=made) / 7).to(dtype)
    result = (real / 7).to(dtype) if dtype.is_floating_point else real.to(dtype)
    return result.view(-1, 2) if REDUCTIONS[op].pairs else result


def start(comm, x, y=None, op=ReduceOp.SUM, present=None):
    y = x if y is None else y
    return nonblocking.iallreduce(comm._comm, USER, BACKWARD, x, y, int(op), present)


@every
@pytest.mark.parametrize("count_limit", [2**31 - 1, 64])
@pytest.mark.parametrize(("op", "dtype"), CASES)
def test_as_the_blocking_one(comm, op, dtype, count_limit, limits):
    """Bit for bit: the same additions; two in flight, completed in another order on some ranks."""
    for n in (0, 2, 10, 6000):
        x = values(comm.rank, n, dtype, op)
        expected = comm.Allreduce(x, op)
        limits(count_limit=count_limit)
        first, second = torch.empty_like(x), x.clone()
        requests = [start(comm, x, first, op), start(comm, second, op=op)]
        for request in reversed(requests) if comm.rank % 2 else requests:
            while comm.rank != 1 and not request.test():
                pass
            request.wait()
        limits(count_limit=2**31 - 1)
        assert all(request.done for request in requests)
        close = {"rtol": 0, "atol": 0, "equal_nan": True}
        if dtype in (torch.float32, torch.float64, torch.complex64, torch.complex128):
            close |= {"rtol": 1e-5, "atol": 1e-5}  # the library's own order
        torch.testing.assert_close(first, expected, **close)
        torch.testing.assert_close(second, expected, **close)
    assert nonblocking.in_flight() == []


@every
@pytest.mark.parametrize("n", [3, 9000])
@pytest.mark.parametrize("dtype", SUMS)
def test_average_of_the_present(comm, dtype, n):
    """The others give zeros and are not counted."""
    present = tuple(range(comm.size - 1, comm.size)) if comm.size < 3 else (0, comm.size - 1)
    x = values(comm.rank, n, dtype)
    if comm.rank not in present:
        x.zero_()
    start(comm, x, op=ReduceOp.AVG, present=present).wait()
    parts = torch.stack([values(r, n, dtype) for r in present]).to(torch.float64)
    if dtype == torch.bfloat16:
        parts = parts.float()
    expected = (parts.sum(0) / len(present)).to(dtype)
    torch.testing.assert_close(x, expected, rtol=0, atol=1e-15 if dtype == torch.float64 else 0)


@every
@pytest.mark.parametrize("dtype", SUMS)
def test_many_in_flight(comm, dtype):
    """Two kinds of messages between one another, completed only by the last."""
    xs = [values(comm.rank + k, 1 + 700 * k, SUMS[k % 2] if k % 3 else dtype) for k in range(12)]
    wanted = [comm.Allreduce(x, ReduceOp.SUM) for x in xs]
    requests = [start(comm, x) for x in xs]
    for request in reversed(requests):
        request.wait()
    for x, want in zip(xs, wanted, strict=True):
        torch.testing.assert_close(x, want, rtol=0, atol=1e-12 if x.dtype == torch.float64 else 0)


@several
@every
@pytest.mark.parametrize("dtype", SUMS)
def test_nobody_holds_it(comm, dtype):
    """The buffers live until MPI is done with them, and no longer."""
    x = values(comm.rank, 9000, dtype)
    kept = weakref.ref(x)
    comm.Barrier()
    if comm.rank == 0:
        start(comm, x)
        del x
        gc.collect()
        assert kept() is not None
    comm.Barrier()
    if comm.rank:
        start(comm, x)
        del x
    while nonblocking.in_flight():
        nonblocking.reap()
    gc.collect()
    assert kept() is None
    comm.Barrier()


@every
def test_what_is_refused(comm):
    core = comm._comm
    x = torch.ones(3)
    with pytest.raises(ValueError, match="one dtype and size"):
        nonblocking.iallreduce(core, 0, 1, x, torch.ones(4), 2)
    with pytest.raises(ValueError, match="contiguous"):
        nonblocking.iallreduce(core, 0, 1, torch.ones(6)[::2], x, 2)
    with pytest.raises(TypeError, match="moved, not reduced"):
        nonblocking.iallreduce(core, 0, 1, x.to(torch.float8_e5m2), x.to(torch.float8_e5m2), 2)
    other = comm.Dup()
    other.Free()
    with pytest.raises(ValueError, match="freed"):
        nonblocking.iallreduce(other._comm, 0, 1, x, x, 2)
    assert nonblocking.in_flight() == []


def call_on(comm):
    return Call(OPERATIONS["Allreduce"], comm._comm, channel=USER, op=ReduceOp.SUM)


@every
def test_observers_see_start_and_end(comm):
    seen = []
    observer = watch.observe(
        lambda event: seen.append(("started", event)),
        lambda event: seen.append(("finished", event)),
    )
    try:
        one, two = (Pending(call_on(comm), torch.ones(n), BACKWARD) for n in (3, 5))
        assert seen == [], "nothing has started"
        while not (one.launch() and two.launch()):
            pass
        assert [word for word, _ in seen] == ["started", "started"]
        assert one.wait().tolist() == [comm.size] * 3
        assert two.wait().tolist() == [comm.size] * 5
        assert one.wait() is one.target, "a second wait is nothing"
    finally:
        watch.stop(observer)
    assert [word for word, _ in seen] == ["started", "started", "finished", "finished"]
    events = [event for _, event in seen]
    assert events[0] is events[2]
    assert events[1] is events[3]
    assert [(e.op, e.reduce_op, e.count, e.nbytes, e.error) for e in events[:2]] == [
        ("Allreduce", "SUM", 3, 12, None), ("Allreduce", "SUM", 5, 20, None),
    ]  # fmt: skip
    assert all(e.t_end >= e.t_start for e in events)


@every
def test_an_observer_may_not_start_one(comm):
    def started(_event):
        with pytest.raises(RuntimeError, match="observer must not communicate"):
            Pending(call_on(comm), torch.ones(1), BACKWARD).launch()

    observer = watch.observe(started, lambda event: None)
    try:
        assert comm.Allreduce(torch.ones(1), mpicoll.MPI_SUM).item() == comm.size
    finally:
        watch.stop(observer)


@every
def test_a_strided_tensor_gets_the_result(comm):
    whole = torch.arange(6.0).view(2, 3)
    pending = Pending(call_on(comm), whole.t()[::2], BACKWARD)
    pending.wait()
    factor = torch.tensor([comm.size, 1, comm.size])
    assert torch.equal(whole, torch.arange(6.0).view(2, 3) * factor)
