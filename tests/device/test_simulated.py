"""Tensors of a device that MPI knows nothing of: staged through the host, in bounded chunks.

The oracle is the same call on CPU tensors with the same values; the values are small integers, so
that results are exact whatever the order of additions. That the CPU calls are right is what
``tests/spmd`` shows.
"""

from __future__ import annotations

import weakref

import numpy as np
import pytest
import torch
from device_cases import (
    AHEAD,
    BEHIND,
    DTYPES,
    FUNCTIONS,
    LAYOUTS,
    MESSAGES,
    RANK,
    SIZE,
    TOTAL,
    WORLD,
    WRITABLE,
    arguments,
    as_is,
    columns,
    counted,
    gradients,
    sliced,
    values,
    wanting,
    weights,
)
from simulated import DEVICE, on_device, raw_of, traffic

import mpicoll
from mpicoll import ReduceOp
from mpicoll.nn import functional as F
from mpicoll.ops import OPERATIONS, REDUCTIONS, Kind
from mpicoll.staging import Pipeline, kind_of

AGREEING = ("agree", "swap")


def same(mine: torch.Tensor, host: torch.Tensor) -> None:
    """`mine` is on the device, with dtype, shape and the very values of `host`."""
    assert mine.device == DEVICE
    assert (mine.dtype, mine.shape) == (host.dtype, host.shape)
    assert torch.equal(raw_of(mine).resolve_conj(), host.resolve_conj()), (mine, host)


class Held:
    """Host buffers that exist: the memory itself, however many tensors look at it."""

    def __init__(self, monkeypatch) -> None:
        self.now = self.most = self.longest = self.buffers = 0
        monkeypatch.setattr(Pipeline, "buffer", lambda _, count, dtype: self._buffer(count, dtype))

    def _buffer(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        nbytes = count * dtype.itemsize
        memory = np.empty(max(nbytes, dtype.itemsize), np.uint8)
        weakref.finalize(memory, self._release, nbytes)
        self.now += nbytes
        self.most = max(self.most, self.now)
        self.longest = max(self.longest, nbytes)
        self.buffers += 1
        return torch.from_numpy(memory).view(dtype)[:count]

    def _release(self, nbytes: int) -> None:
        self.now -= nbytes


# ---------------------------------------------------------------- the communicator family


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", OPERATIONS)
def test_operations_equal_those_of_the_cpu(name, dtype):
    call = getattr(WORLD, name)
    for lay in LAYOUTS.values():
        host = lay(values((TOTAL, columns(name)), dtype))
        mine = on_device(host)
        assert (mine.is_contiguous(), mine.is_conj()) == (host.is_contiguous(), host.is_conj())
        before = host.clone()
        result = call(mine, **arguments(name))
        same(result, call(host, **arguments(name)))
        assert result.is_contiguous()
        same(mine, before)


@pytest.mark.parametrize(
    "dtype", [d for d in DTYPES if d.is_floating_point or d.is_complex], ids=str
)
@pytest.mark.parametrize("name", OPERATIONS)
def test_gradients_of_operations_equal_those_of_the_cpu(name, dtype):
    for lay in LAYOUTS.values():
        host, found = lay(values((TOTAL, columns(name)), dtype)), []
        for put in (as_is, on_device):
            x = put(host).requires_grad_()
            y = getattr(WORLD, name)(x, **arguments(name))
            assert y.requires_grad
            found += gradients([y], [x], weights(put))
        same(found[1], found[0])


REDUCED = [
    (op, dtype)
    for op, row in REDUCTIONS.items()
    for dtype in (torch.float64, torch.bfloat16, torch.int64, torch.bool, torch.complex128)
    if kind_of(dtype) in row.kinds
]


@pytest.mark.parametrize(("op", "dtype"), REDUCED, ids=lambda v: getattr(v, "name", str(v)))
def test_every_reduction(op, dtype):
    host = values((TOTAL, 2), dtype)  # two columns: (value, index) pairs fit too
    for name, row in OPERATIONS.items():
        if row.reduces and not (row.prefix and op is ReduceOp.AVG):
            call = getattr(WORLD, name)
            same(call(on_device(host), **arguments(name, op)), call(host, **arguments(name, op)))


@pytest.mark.parametrize(
    "op", [op for op, row in REDUCTIONS.items() if row.differentiable], ids=repr
)
def test_gradient_of_every_reduction(op):
    host = values((TOTAL, 2), torch.float64)
    for name in ("Allreduce", "Reduce", "Reduce_scatter"):
        found = []
        for put in (as_is, on_device):
            x = put(host).requires_grad_()
            y = getattr(WORLD, name)(x, **arguments(name, op))
            found += gradients([y], [x], weights(put))
        same(found[1], found[0])


def test_second_derivative_stays_on_the_device():
    x = on_device(torch.tensor([RANK + 1.0], dtype=torch.float64)).requires_grad_()
    y = WORLD.Allreduce(x, mpicoll.MPI_SUM)
    (first,) = torch.autograd.grad((y**2).sum(), x, create_graph=True)
    same(first.detach(), torch.tensor([2.0 * SIZE * TOTAL], dtype=torch.float64))
    first.sum().backward()
    same(x.grad, torch.tensor([2.0 * SIZE**2], dtype=torch.float64))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["Bcast_", "Reduce_"])
def test_in_place_results_land_in_the_callers_tensor(name, dtype):
    given = arguments(name[:-1])
    for layout in WRITABLE:
        host = LAYOUTS[layout](values((TOTAL, 3), dtype))
        mine = on_device(LAYOUTS[layout](values((TOTAL, 3), dtype)))
        strides, version = mine.stride(), mine._version
        expected = getattr(WORLD, name)(host, **given)
        result = getattr(WORLD, name)(mine, **given)
        same(result, expected)
        same(mine, expected)
        assert mine.stride() == strides
        assert mine._version > version


def test_in_place_leaves_the_neighbours_alone():
    """C1: column 0 of a 3×2 becomes 0, 20, 40; column 1 stays."""
    memory = torch.arange(6, dtype=torch.float64).view(3, 2) * (10 if RANK == 0 else 100)
    mine = on_device(memory)
    WORLD.Bcast_(mine[:, 0], 0)
    assert memory[:, 0].tolist() == [0, 20, 40]
    assert memory[:, 1].tolist() == [k * (10 if RANK == 0 else 100) for k in (1, 3, 5)]


@pytest.mark.parametrize("name", ["Bcast_", "Reduce_"])
def test_gradients_of_in_place_operations(name):
    found = []
    for put in (as_is, on_device):
        x = put(values((TOTAL, 3), torch.float64)).requires_grad_()
        y = getattr(WORLD, name)(x * 2, **arguments(name[:-1]))
        found += gradients([y], [x], weights(put))
    same(found[1], found[0])


def test_no_dimension():
    for name in ("Allreduce", "Bcast", "Reduce", "Scan", "Exscan"):
        host = values((), torch.float64)
        call = getattr(WORLD, name)
        same(call(on_device(host), **arguments(name)), call(host, **arguments(name)))


# ---------------------------------------------------------------- nn.functional


def test_every_function_is_here():
    assert set(FUNCTIONS) == set(F.__all__) - {"ReduceOp"}


@pytest.mark.parametrize("dtype", [d for d in DTYPES if d != torch.bool], ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_equal_those_of_the_cpu(name, dtype):
    _, expected = FUNCTIONS[name](as_is, as_is, dtype)
    _, results = FUNCTIONS[name](on_device, on_device, dtype)
    assert len(results) == len(expected)
    for mine, host in zip(results, expected, strict=True):
        same(mine, host)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex128], ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_gradients_of_functions_equal_those_of_the_cpu(name, dtype):
    found = []
    for put in (as_is, on_device):
        inputs, results = FUNCTIONS[name](put, wanting(put), dtype)
        found.append(gradients(results, inputs, weights(put)))
    assert all(g is not None for g in found[0])
    for host, mine in zip(*found, strict=True):
        same(mine, host)


# ---------------------------------------------------------------- point to point


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", MESSAGES)
def test_messages_equal_those_of_the_cpu(name, dtype):
    for layout in WRITABLE:
        found = []
        for put in (as_is, on_device):
            x = put(LAYOUTS[layout](values((3, 4), dtype)))
            into = put(LAYOUTS[layout](torch.zeros(3, 4, dtype=dtype)))
            with torch.no_grad():
                result = MESSAGES[name](x, into)
            assert result.stride() == into.stride()
            found.append((result, into))
        same(found[1][0], found[0][0])
        same(found[1][1], found[0][1])


@pytest.mark.parametrize("name", MESSAGES)
def test_gradients_of_messages(name):
    found = []
    for put in (as_is, on_device):
        x = put(values((3, 4), torch.float64)).requires_grad_()
        into = put(torch.zeros(3, 4, dtype=torch.float64))
        y = MESSAGES[name](x * 2, into)
        found.append(gradients([y], [x], weights(put))[0])
    assert (found[0] is None) == (found[1] is None)
    if found[0] is not None:
        same(found[1], found[0])


@pytest.mark.parametrize("layout", ["contiguous", "sliced"])
def test_a_shorter_message_leaves_the_tail(layout):
    memory = torch.full((3, 4), -1, dtype=torch.int64)
    into = on_device(LAYOUTS[layout](memory))
    WORLD.Sendrecv(on_device(torch.arange(5) + RANK), AHEAD, into, BEHIND)
    expected = [BEHIND + k for k in range(5)] + [-1] * 7
    assert raw_of(into).reshape(-1).tolist() == expected


def test_nobody_leaves_the_tensor_alone():
    into = on_device(torch.arange(3))
    same(WORLD.Recv(into, None, 0), torch.arange(3))
    same(WORLD.Send(into, None, 0), torch.arange(3))


def test_copies_of_messages():
    x, into = on_device(torch.ones(5)), on_device(torch.zeros(5))
    traffic.clear()
    send = WORLD.Isend(x, AHEAD, 0)
    assert traffic.copies == (1, 0)
    WORLD.Recv(into, BEHIND, 0)
    assert traffic.copies == (1, 1)
    WORLD.Wait(send)
    assert traffic.copies == (1, 1)
    assert traffic.to_host == traffic.to_device == [20]


# ---------------------------------------------------------------- H1: one copy each way, one call


def _expected_copies(name: str, root: int) -> tuple[int, int]:
    row = OPERATIONS[name]
    sends = row.counts_at == "all" or root == RANK
    gets = row.result_at == "all" or root == RANK or name == "Reduce"  # zeros land there too
    if name == "Bcast" and root == RANK:
        gets = False  # it has the values
    return int(sends), int(gets)


@pytest.mark.parametrize("layout", ["contiguous", "sliced"])
@pytest.mark.parametrize("name", OPERATIONS)
def test_one_copy_out_one_call_one_copy_in(name, layout):
    row, root = OPERATIONS[name], SIZE - 1
    x = on_device(LAYOUTS[layout](values((TOTAL, columns(name)), torch.float32))).requires_grad_()
    traffic.clear()
    with counted() as made, counted(AGREEING) as agreed:
        y = getattr(WORLD, name)(x, **arguments(name, root=root))
    assert traffic.copies == _expected_copies(name, root)
    assert len(made) == 1
    assert len(agreed) == (row.pattern == "blocks")
    y_gradient = on_device(values(tuple(y.shape), y.dtype))
    traffic.clear()
    with counted() as made, counted(AGREEING) as agreed:
        y.backward(y_gradient)
    assert traffic.copies == _expected_copies(row.dual, root)
    assert len(made) == 1
    assert agreed == []
    assert x.grad.device == DEVICE


@pytest.mark.parametrize("name", ["Bcast_", "Reduce_"])
def test_one_copy_each_way_in_place(name):
    x = on_device(sliced(values((TOTAL, 3), torch.float32)))
    traffic.clear()
    with counted() as made:
        getattr(WORLD, name)(x, **arguments(name[:-1]))
    assert traffic.copies == _expected_copies(name[:-1], SIZE - 1)
    assert made == ["elementwise"]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_copy_once_each_way(name):
    traffic.clear()
    with counted() as made:
        inputs, results = FUNCTIONS[name](on_device, wanting(on_device), torch.float64)
    assert len(made) == 1
    out, into = traffic.copies
    assert max(out, into) <= 1
    if SIZE > 1 and name in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all"):
        assert (out, into) == (1, 1)
    traffic.clear()
    with counted() as made:
        gradients(results, inputs, weights(on_device))
    assert len(made) == 1
    assert max(traffic.copies) <= 1


# ---------------------------------------------------------------- bounded chunks

CHUNK = 256


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.complex128], ids=str)
@pytest.mark.parametrize("name", [*OPERATIONS, "Bcast_", "Reduce_"])
def test_never_more_than_two_chunks(name, dtype, limits, monkeypatch):
    bare = name.rstrip("_")
    shape = (37 * TOTAL, 4 * columns(bare))
    given = arguments(bare)
    if "numelem" in given:
        given["numelem"] *= 37
    host, found = values(shape, dtype), []
    for put in (as_is, on_device):
        if put is on_device:
            limits(chunk_bytes=CHUNK)
            held = Held(monkeypatch)
        x = put(host).requires_grad_()
        with counted() as made:
            # In place on a copy: the leaf keeps its values for the comparison.
            y = getattr(WORLD, name)(x * 1 if name.endswith("_") else x, **given)
        found.append((y.detach(), *gradients([y], [x], weights(put))))
    assert len(made) > 1
    same(found[1][0], found[0][0])
    same(found[1][1], found[0][1])
    assert 0 < held.longest <= CHUNK
    assert held.most <= 2 * CHUNK
    assert held.now == 0


@pytest.mark.parametrize(
    "op", [ReduceOp.MINLOC, ReduceOp.MAX, ReduceOp.PROD, ReduceOp.AVG], ids=repr
)
def test_reductions_in_pieces(op, limits, monkeypatch):
    """Pairs are never cut apart, and adjoints that are not one operation are bounded too."""
    host = values((53 * TOTAL, 2), torch.float64)
    expected, found = [], []
    for put, into in ((as_is, expected), (on_device, found)):
        if put is on_device:
            limits(chunk_bytes=CHUNK)
            held = Held(monkeypatch)
        for name in ("Allreduce", "Reduce_scatter"):
            given = arguments(name, op)
            if "numelem" in given:
                given["numelem"] *= 53
            x = put(host).requires_grad_()
            y = getattr(WORLD, name)(x, **given)
            into += [y.detach(), *gradients([y], [x], weights(put))]
    for mine, reference in zip(found, expected, strict=True):
        same(mine, reference)
    assert held.longest <= CHUNK
    assert held.most <= 2 * CHUNK


@pytest.mark.parametrize("count_limit", [6, 10, 1 << 20])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_in_pieces(name, count_limit, limits, monkeypatch):
    dtype = torch.float64
    cases = []
    for put in (as_is, on_device):
        if put is on_device:
            limits(chunk_bytes=128, count_limit=count_limit)
            held = Held(monkeypatch)
        with counted() as made:
            inputs, results = FUNCTIONS[name](put, wanting(put), dtype, k=9)
        kept = [y.detach() for y in results]
        cases.append((kept, gradients(results, inputs, weights(put))))
    for host, mine in zip(cases[0][0] + cases[0][1], cases[1][0] + cases[1][1], strict=True):
        same(mine, host)
    assert held.longest <= 128
    assert held.most <= 256
    if SIZE > 1:
        assert len(made) > 1


@pytest.mark.parametrize("source", range(SIZE))
def test_lists_of_long_uneven_blocks(source, limits, monkeypatch):
    """One rank sends far more than the others, and one block is empty."""
    limits(chunk_bytes=CHUNK)
    held = Held(monkeypatch)

    def rows(r: int, s: int) -> int:
        return 0 if (r, s) == (source, (source + 1) % SIZE) else 700 * (r == source) + 31 * r + s

    sends = [on_device(values((rows(RANK, s),), torch.float64, RANK + 3 * s)) for s in range(SIZE)]
    outputs = [on_device(torch.zeros(rows(s, RANK), dtype=torch.float64)) for s in range(SIZE)]
    F.all_to_all(outputs, sends)
    for s, output in enumerate(outputs):
        same(output, values((rows(s, RANK),), torch.float64, s + 3 * RANK))
    assert held.longest <= CHUNK
    assert held.most <= 2 * CHUNK


def test_copies_of_a_long_tensor_are_as_long_as_a_chunk(limits):
    """Nothing is copied twice: as many bytes as the tensor has, in chunks."""
    limits(chunk_bytes=CHUNK)
    x = on_device(torch.arange(1000, dtype=torch.float64))
    traffic.clear()
    WORLD.Allreduce(x, mpicoll.MPI_SUM)
    assert sum(traffic.to_host) == sum(traffic.to_device) == 8000
    assert set(traffic.to_host[:-1]) == {CHUNK}


# ---------------------------------------------------------------- ranks with different devices

PLACES = {
    "only the first on the CPU": as_is if RANK == 0 else on_device,
    "only the first on the device": on_device if RANK == 0 else as_is,
    "every other": as_is if RANK % 2 else on_device,
}


def _equal(mine: torch.Tensor, host: torch.Tensor, put) -> None:
    if put is on_device:
        same(mine, host)
    else:
        assert mine.device.type == "cpu"
        assert torch.equal(mine, host)


@pytest.mark.parametrize("chunk", [None, 256])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("name", [*OPERATIONS, "Bcast_", "Reduce_"])
def test_ranks_on_different_devices(name, where, dtype, chunk, limits):
    bare, place = name.rstrip("_"), PLACES[where]
    given = arguments(bare)
    if "numelem" in given:
        given["numelem"] *= 19
    host, found = values((19 * TOTAL, 2 * columns(bare)), dtype), []
    for put in (as_is, place):
        if found and chunk:
            limits(chunk_bytes=chunk)
        x = put(host).requires_grad_()
        y = getattr(WORLD, name)(x * 1, **given)
        found.append((y.detach(), *gradients([y], [x], weights(put))))
    _equal(found[1][0], found[0][0], place)
    _equal(found[1][1], found[0][1], place)


@pytest.mark.parametrize("chunk", [None, 256])
@pytest.mark.parametrize("op", [ReduceOp.PROD, ReduceOp.MAX, ReduceOp.AVG], ids=repr)
@pytest.mark.parametrize("where", PLACES)
def test_gradients_of_reductions_on_different_devices(where, op, chunk, limits):
    """Adjoints that move blocks of the input take the same pieces everywhere."""
    place, found = PLACES[where], []
    host = values((19 * TOTAL, 2), torch.float64)
    for put in (as_is, place):
        if found and chunk:
            limits(chunk_bytes=chunk)
        x = put(host).requires_grad_()
        y = WORLD.Allreduce(x * 1, op)
        found.append((y.detach(), *gradients([y], [x], weights(put))))
    _equal(found[1][0], found[0][0], place)
    _equal(found[1][1], found[0][1], place)


@pytest.mark.parametrize("chunk", [None, 128])
@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize(
    "name", ["broadcast", "reduce", "all_reduce", "scatter", "all_to_all", "all_to_all_single"]
)
def test_functions_with_ranks_on_different_devices(name, where, chunk, limits):
    place, cases = PLACES[where], []
    for put in (as_is, place):
        if cases and chunk:
            limits(chunk_bytes=chunk)
        inputs, results = FUNCTIONS[name](put, wanting(put), torch.float64, k=9)
        kept = [y.detach() for y in results]
        cases.append((kept, gradients(results, inputs, weights(put))))
    for host, mine in zip(cases[0][0] + cases[0][1], cases[1][0] + cases[1][1], strict=True):
        _equal(mine, host, place)


@pytest.mark.parametrize("where", PLACES)
def test_long_blocks_between_different_devices(where, limits):
    """Pieces far above any eager limit: a rank that serves one peer ahead of another would hang."""
    limits(chunk_bytes=1 << 18)
    place = PLACES[where]

    def length(r: int, s: int) -> int:
        return 60_000 + 50_000 * ((r + 2 * s) % 3)

    sends = [place(values((length(RANK, s),), torch.float64, RANK + 3 * s)) for s in range(SIZE)]
    outputs = [place(torch.zeros(length(s, RANK), dtype=torch.float64)) for s in range(SIZE)]
    F.all_to_all(outputs, sends)
    for s, output in enumerate(outputs):
        _equal(output, values((length(s, RANK),), torch.float64, s + 3 * RANK), place)


@pytest.mark.parametrize("name", MESSAGES)
def test_messages_between_different_devices(name):
    place, found = PLACES["every other"], []
    for put in (as_is, place):
        x = put(values((3, 4), torch.float64)).requires_grad_()
        y = MESSAGES[name](x * 2, put(torch.zeros(3, 4, dtype=torch.float64)))
        found.append((y.detach(), *gradients([y], [x], weights(put))))
    _equal(found[1][0], found[0][0], place)
    if found[0][1] is not None:
        _equal(found[1][1], found[0][1], place)


# ---------------------------------------------------------------- the simulation itself


def test_the_device_refuses_to_mix():
    with pytest.raises(RuntimeError, match="expected all tensors on simdev:0"):
        on_device(torch.ones(3)) + torch.ones(3)


def test_the_device_counts_copies():
    traffic.clear()
    x = on_device(torch.ones(3))
    assert traffic.copies == (0, 0)
    assert x.cpu().tolist() == [1, 1, 1]
    assert traffic.copies == (1, 0)
    x.copy_(torch.zeros(3))
    assert traffic.copies == (1, 1)
    (x + x).clone()
    assert traffic.copies == (1, 1)
    assert raw_of(x).tolist() == [0, 0, 0]


def test_halves_have_a_kind():
    """The dtypes above reach every kind of element that can be computed with."""
    assert {kind_of(dtype) for dtype in DTYPES} == set(Kind) - {Kind.OTHER}
