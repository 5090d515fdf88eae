"""Short messages through shared memory: the same values as through MPI, and ranks that disagree."""

from __future__ import annotations

import os
import tempfile
import threading
import time
from pathlib import Path

import pytest
import torch
from groups import ranks
from mpi4py import MPI

import mpicoll
from mpicoll import MPI_MAX, MPI_SUM, CollectiveMismatchError, ReduceOp
from mpicoll._core import shared_memory
from mpicoll._core.collectives import by_mpi_alone
from mpicoll.dispatch import CODES
from mpicoll.nn import functional
from mpicoll.staging import code_of

LIMIT = 256  # bytes; short, so that tests meet both sides of it
DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.uint16, torch.int32, torch.int64, torch.float16,
    torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128,
]  # fmt: skip


@pytest.fixture
def dup(monkeypatch):
    """``dup(comm, nbytes)``: a duplicate whose messages up to `nbytes` are short."""
    made = []

    def make(comm: mpicoll.Communicator, nbytes: int) -> mpicoll.Communicator:
        monkeypatch.setenv("MPICOLL_SHARED_BYTES", str(nbytes))
        made.append(comm.Dup())
        return made[-1]

    yield make
    for comm in made:
        comm.Free()


def numbers(n: int, dtype: torch.dtype, rank: int) -> torch.Tensor:
    """Distinct per element and rank; small enough for every dtype, with a sign where it has one."""
    x = (torch.arange(n) * 7 + 3 * rank) % 5 + rank
    if dtype is torch.bool:
        return x % 3 == 0
    if dtype.is_floating_point or dtype.is_complex:
        x = x / 3 - 1
    x = x.to(dtype)
    return x * torch.tensor(1 - 0.5j, dtype=dtype) if dtype.is_complex else x


# ---------------------------------------------------------------- where there is any


@ranks(2, 3, 4)
def test_ranks_of_a_node_share(comm):
    assert comm._comm.shared_bytes == int(os.environ.get("MPICOLL_SHARED_BYTES", "4096"))


def test_one_rank_shares_with_nobody(dup):
    assert mpicoll.COMM_SELF._comm.shared_bytes == 0
    assert dup(mpicoll.COMM_SELF, LIMIT)._comm.shared_bytes == 0


@ranks(2, 3, 4)
def test_the_smallest_limit_counts(comm, dup):
    assert dup(comm, LIMIT + 8 * comm.rank)._comm.shared_bytes == LIMIT
    assert dup(comm, LIMIT * (comm.rank + 1 != comm.size))._comm.shared_bytes == 0


@ranks(2, 3, 4)
@pytest.mark.parametrize("what", ["no folder", "full", "not found", "too many", "another file"])
def test_without_shared_memory_mpi_carries_all(comm, dup, monkeypatch, what, tmp_path):
    """On one rank there is none: no rank uses it, and no file is left."""
    last = comm.rank == comm.size - 1
    if what == "no folder" and last:
        monkeypatch.setattr(shared_memory, "FOLDER", str(tmp_path / "none"))
    elif what == "full" and comm.rank == 0:

        def full(*_):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "posix_fallocate", full)
    elif what == "not found" and last:
        opened = os.open
        monkeypatch.setattr(os, "open", lambda path, *flags: opened(f"{path}-elsewhere", *flags))
    elif what == "another file" and last:
        (tmp_path / "file").write_bytes(b"xyz")
        opened = os.open
        monkeypatch.setattr(os, "open", lambda path, *flags: opened(tmp_path / "file", *flags))
    elif what == "too many":
        monkeypatch.setattr(shared_memory, "shared_ranks", lambda: 1)
    made = dup(comm, LIMIT)
    monkeypatch.undo()
    assert made._comm.shared_bytes == 0
    total = made.Allreduce(torch.tensor([comm.rank + 1.0]), MPI_SUM)
    assert total.item() == comm.size * (comm.size + 1) / 2


@ranks(2, 3, 4)
def test_no_file_is_left(comm, dup, monkeypatch):
    created = []
    mkstemp = tempfile.mkstemp

    def recorded(**options):
        descriptor, path = mkstemp(**options)
        created.append(path)
        return descriptor, path

    monkeypatch.setattr(tempfile, "mkstemp", recorded)
    assert dup(comm, LIMIT)._comm.shared_bytes == LIMIT
    assert len(created) == (comm.rank == 0)
    assert [path for path in created if os.path.exists(path)] == []


@ranks(2, 3, 4)
def test_a_communicator_holds_no_file(comm, dup):
    dup(comm, LIMIT)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        assert dup(comm, LIMIT)._comm.shared_bytes == LIMIT
    assert len(os.listdir("/proc/self/fd")) == before


@ranks(2, 3, 4)
def test_memory_goes_with_the_communicator(comm, dup):
    def mapped() -> int:
        return Path("/proc/self/maps").read_text().count("/dev/shm/mpicoll-")

    before = mapped()
    for _ in range(5):
        made = comm.Dup()
        assert mapped() == before + (made._comm.shared_bytes > 0)
        made.Free()
        del made
    assert mapped() == before


# ---------------------------------------------------------------- the same values


@ranks(2, 3, 4)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("op", list(ReduceOp), ids=lambda op: op.name)
def test_same_as_through_mpi(comm, dup, op, dtype):
    """Around the limit, with tiny messages (which fit in a cache line) and without any."""
    short, long = dup(comm, LIMIT), dup(comm, 0)
    edge = LIMIT // dtype.itemsize
    for n in (0, 2, 16 // dtype.itemsize // 2 * 2, 18, edge, edge + 2):
        x = numbers(n, dtype, comm.rank)
        for name, arguments in (
            ("Allreduce", (op,)),
            ("Reduce", (op, comm.size - 1)),
            ("Scan", (op,)),
            ("Exscan", (op,)),
            ("Bcast", (1,)),
        ):
            try:
                expected = getattr(long, name)(x, *arguments)
            except (TypeError, ValueError) as error:  # not defined for these
                with pytest.raises(type(error)):
                    getattr(short, name)(x, *arguments)
                continue
            result = getattr(short, name)(x, *arguments)
            assert result.dtype == expected.dtype
            if op in (ReduceOp.SUM, ReduceOp.AVG, ReduceOp.PROD) and x.dtype.itemsize >= 4:
                torch.testing.assert_close(result, expected)  # the library adds in its own order
            else:
                assert torch.equal(result, expected), (name, n)


@ranks(3, 4)
def test_added_in_rank_order(comm, dup):
    """Large numbers cancel only where rank 0 and rank 1 are added first."""
    made = dup(comm, LIMIT)
    x = torch.tensor([[1e30, -1e30, 1.0, 2.0][comm.rank]])
    assert made.Allreduce(x, MPI_SUM).item() == {3: 1.0, 4: 3.0}[comm.size]


@ranks(2, 3, 4)
def test_many_in_a_row(comm, dup):
    """Nobody reads what the next call has written, however the ranks overtake one another."""
    made = dup(comm, LIMIT)
    generator = torch.Generator().manual_seed(comm.rank)
    base = torch.arange(40, dtype=torch.float64)
    for i in range(2000):
        if torch.randint(50, (), generator=generator) == 0:
            time.sleep(0.0005)
        n = 1 + i % 40
        root = i % comm.size
        y = made.Allreduce(base[:n] + i * 10 + comm.rank, MPI_MAX)
        assert torch.equal(y, base[:n] + i * 10 + comm.size - 1)
        y = made.Bcast(base[:n] - i + comm.rank, root)
        assert torch.equal(y, base[:n] - i + root)


@ranks(2)
def test_a_waiting_rank_serves_the_messages_of_others(comm, dup):
    """Rank 1 comes only after its long message, for which rank 0 must take part."""
    made = dup(comm, LIMIT)
    group = made.to_mpi4py()
    data = torch.arange(1 << 20, dtype=torch.float64)
    other = 1 - comm.rank
    received = torch.zeros_like(data)
    requests = [group.Irecv(received.numpy(), other), group.Isend(data.numpy(), other)]
    if comm.rank == 1:
        MPI.Request.Waitall(requests)
    assert made.Allreduce(torch.ones(1), MPI_SUM).item() == 2
    if comm.rank == 0:
        MPI.Request.Waitall(requests)
    assert torch.equal(received, data)


@ranks(2, 3, 4)
def test_one_thread_at_a_time(comm, dup):
    """Of two threads of rank 0 that use one communicator at once the second is refused."""
    made = dup(comm, LIMIT)
    errors = []

    def enter():
        try:
            made.Barrier()
        except RuntimeError as error:
            errors.append(str(error))
            comm.Barrier()  # let the others come

    if comm.rank == 0:
        threads = [threading.Thread(target=enter) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        (error,) = errors
        assert error.startswith(f"Barrier on rank 0 of {comm.size}: another thread is inside")
    else:
        comm.Barrier()
        made.Barrier()
    assert made.Allreduce(torch.ones(1), MPI_SUM).item() == comm.size


# ---------------------------------------------------------------- ranks that disagree

F = torch.float32
PAIR = torch.ones(2)
DISAGREEMENTS = {
    "count": (
        lambda c, odd: c.Allreduce(torch.ones(3 + odd), MPI_SUM),
        "Allreduce, SUM, 3 elements, float32", "Allreduce, SUM, 4 elements, float32",
    ),
    "short and long": (
        lambda c, odd: c.Allreduce(torch.ones(3 + 1000 * odd), MPI_SUM),
        "Allreduce, SUM, 3 elements, float32", "Allreduce, SUM, 1003 elements, float32",
    ),
    "both long": (
        lambda c, odd: c.Allreduce(torch.ones(1000 + odd), MPI_SUM),
        "Allreduce, SUM, 1000 elements, float32", "Allreduce, SUM, 1001 elements, float32",
    ),
    "empty": (
        lambda c, odd: c.Allreduce(torch.ones(int(odd)), MPI_SUM),
        "Allreduce, SUM, 0 elements, float32", "Allreduce, SUM, 1 element, float32",
    ),
    "reduction": (
        lambda c, odd: c.Allreduce(torch.ones(3), MPI_MAX if odd else MPI_SUM),
        "Allreduce, SUM, 3 elements, float32", "Allreduce, MAX, 3 elements, float32",
    ),
    "dtype": (
        lambda c, odd: c.Allreduce(torch.ones(3, dtype=torch.bfloat16 if odd else F), MPI_SUM),
        "Allreduce, SUM, 3 elements, float32", "Allreduce, SUM, 3 elements, bfloat16",
    ),
    "moved dtype": (
        lambda c, odd: c.Bcast(torch.ones(3, dtype=torch.int32 if odd else F), 0),
        "Bcast, root 0, 3 elements, float32", "Bcast, root 0, 3 elements, int32",
    ),
    "root": (
        lambda c, odd: c.Bcast(torch.ones(3), int(odd)),
        "Bcast, root 0, 3 elements, float32", "Bcast, root 1, 3 elements, float32",
    ),
    "root of a reduction": (
        lambda c, odd: c.Reduce(torch.ones(2, dtype=torch.bool), ReduceOp.BOR, int(odd)),
        "Reduce, BOR, root 0, 2 elements, bool", "Reduce, BOR, root 1, 2 elements, bool",
    ),
    "operation": (
        lambda c, odd: c.Scan(torch.ones(3), MPI_SUM) if odd else c.Exscan(torch.ones(3), MPI_SUM),
        "Exscan, SUM, 3 elements, float32", "Scan, SUM, 3 elements, float32",
    ),
    "barrier": (
        lambda c, odd: c.Barrier() if odd else c.Allreduce(torch.ones((), dtype=torch.cdouble), 2),
        "Allreduce, SUM, 1 element, complex128", "Barrier",
    ),
    "uneven sizes": (
        lambda c, odd: c.Gather(torch.ones(3), 0, 0) if odd else c.Allreduce(torch.ones(1), 2),
        "Allreduce, SUM, 1 element, float32",
        "Exchange of sizes, 14 numbers",
    ),
    "making a communicator": (
        lambda c, odd: c.Split(0).Free() if odd else c.Allreduce(torch.ones(1), MPI_SUM),
        "Allreduce, SUM, 1 element, float32", "Exchange of sizes, 1 number",
    ),
    "gathers": (
        lambda c, odd: c.Gather(torch.ones(3), 0, 0) if odd else c.Allgather(torch.ones(3), 0),
        "Allgather, {W*3} elements in all, float32",
        "Gather, root 0, {W*3} elements in all, float32",
    ),
    "gathers of equal sizes": (
        lambda c, odd: functional.gather(PAIR, 1, c) if odd else functional.all_gather(PAIR, c),
        "Allgather, {W*2} elements in all, float32",
        "Gather, root 1, {W*2} elements in all, float32",
    ),
}  # fmt: skip


@ranks(2, 3, 4)
@pytest.mark.parametrize("which", DISAGREEMENTS)
@pytest.mark.parametrize("odd", ["first", "last"])
def test_all_ranks_hear_of_a_disagreement(comm, dup, which, odd):
    made = dup(comm, LIMIT)
    call, usual, other = DISAGREEMENTS[which]
    line = call.__code__.co_firstlineno
    odd_one = 0 if odd == "first" else comm.size - 1
    with pytest.raises((CollectiveMismatchError, ValueError)) as caught:
        call(made, comm.rank == odd_one)
    text = str(caught.value)
    if caught.type is CollectiveMismatchError:
        assert f" on rank {comm.rank} of {comm.size}: the ranks of the communicator do not" in text
        for r in range(comm.size):
            words = (other if r == odd_one else usual).replace("{W*3}", str(3 * comm.size))
            words = words.replace("{W*2}", str(2 * comm.size))
            assert f"\n  rank {r}: {words}, {__file__}:{line} in <lambda>" in text
    else:  # found by the exchange of sizes
        assert which == "gathers"
        assert "the ranks disagree" in text
    # ... and the communicator works as before.
    assert made.Allreduce(torch.ones(1), MPI_SUM).item() == comm.size


@ranks(2, 3, 4)
def test_disagreement_in_backward(comm, dup):
    """The gradients meet on a channel of their own, and are checked there."""
    made = dup(comm, LIMIT)
    x = torch.ones(3, requires_grad=True)
    y = made.Allreduce(x, MPI_SUM)
    z = made.Bcast(x, 0)
    with pytest.raises(CollectiveMismatchError) as caught:
        (y if comm.rank else z).sum().backward()
    assert "\n  rank 0: Reduce, SUM, root 0, 3 elements, float32" in str(caught.value)
    assert "\n  rank 1: Allreduce, SUM, 3 elements, float32" in str(caught.value)


# ---------------------------------------------------------------- memory of a device


@ranks(1, 2, 3, 4)
def test_what_mpi_does_alone(comm, dup, limits):
    """Only then may elements lie where the core cannot read them."""
    limits(chunk_bytes=4096)
    short, plain = dup(comm, LIMIT)._comm, dup(comm, 0)._comm
    longest = short.shared_bytes  # 0 on one rank

    def alone(core, name, dtype, op=None, nbytes=4096, reverse=False):
        number = -1 if op is None else int(op)
        size = dtype.itemsize
        return by_mpi_alone(
            core, CODES[name], code_of(dtype), number, nbytes // size, size, reverse
        )

    for dtype in (torch.float32, torch.complex128, torch.int64, torch.uint32):
        assert alone(short, "Allreduce", dtype, ReduceOp.SUM)
        assert alone(short, "Scan", dtype, ReduceOp.PROD)
        assert alone(short, "Bcast", dtype)
        assert not alone(short, "Scan", dtype, ReduceOp.SUM, reverse=True)
        for name in ("Reduce", "Exscan"):
            assert not alone(short, name, dtype, ReduceOp.SUM)
        assert not alone(short, "Allreduce", dtype, ReduceOp.BOR)
        assert not alone(short, "Allreduce", dtype, ReduceOp.MAX)
        assert alone(short, "Allreduce", dtype, ReduceOp.SUM, longest + 16)
        assert alone(plain, "Allreduce", dtype, ReduceOp.SUM, 16)
        assert not alone(short, "Allreduce", dtype, ReduceOp.SUM, longest)
        # A rest of the last piece that is short goes through shared memory on the other ranks.
        assert alone(short, "Bcast", dtype, None, 4096 + 16) == (comm.size == 1)
        assert not alone(plain, "Bcast", dtype, None, 0)
    for dtype in (torch.bool, torch.int16, torch.bfloat16, torch.float16):
        assert not alone(plain, "Allreduce", dtype, ReduceOp.SUM)
        assert alone(plain, "Bcast", dtype)
    assert alone(plain, "Allreduce", torch.float64, ReduceOp.AVG)
    assert alone(plain, "Bcast", torch.float8_e5m2)
