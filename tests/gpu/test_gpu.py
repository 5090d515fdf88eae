"""The device checks on real CUDA devices: staged, and direct where the MPI library can.

mpiexec -n 2 python -m pytest tests/gpu
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

import mpicoll
from mpicoll.nn import functional as F
from mpicoll.ops import OPERATIONS, REDUCTIONS
from mpicoll.staging import kind_of, plan_for

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "device"))
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
    gradients,
    values,
    wanting,
    weights,
)

if not torch.cuda.is_available():
    pytest.skip("no CUDA device here: torch.cuda.is_available() is False", allow_module_level=True)

# A whole job on the CPU, and the question whether MPI knows devices, leave CUDA alone.
WORLD.Allreduce(torch.ones(3), mpicoll.MPI_SUM)
AWARE, REASON = mpicoll.cuda_aware_mpi_support()
UNTOUCHED = not torch.cuda.is_initialized()
COUNT = torch.cuda.device_count()
DEVICE = torch.device("cuda", RANK % COUNT)


@pytest.fixture(params=["staged", "direct"], autouse=True)
def plan(request, monkeypatch):
    """Run every test both ways."""
    if request.param == "staged":
        monkeypatch.setenv("MPICOLL_CUDA_AWARE", "0")
    elif not AWARE:
        pytest.skip(f"MPI does not know CUDA memory here: {REASON}")
    assert plan_for(DEVICE).direct == (request.param == "direct")
    torch.cuda.set_device(DEVICE)
    return request.param


def on_gpu(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` with its strides, offset and conjugate bit, on the device, as a leaf."""
    if tensor.is_conj():
        return on_gpu(tensor.detach().conj()).conj()
    memory = torch.empty(0, dtype=tensor.dtype).set_(tensor.detach().untyped_storage())
    made = memory.to(DEVICE).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
    return made.detach().requires_grad_(tensor.requires_grad)


def same(mine: torch.Tensor, host: torch.Tensor) -> None:
    """`mine` is on the device, with dtype, shape and the very values of `host`."""
    assert mine.device == DEVICE
    assert (mine.dtype, mine.shape) == (host.dtype, host.shape)
    assert torch.equal(mine.detach().cpu(), host.detach()), (mine, host)


def test_cuda_is_left_alone_until_a_tensor_needs_it():
    assert UNTOUCHED


# ---------------------------------------------------------------- H1: the results of the CPU


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", OPERATIONS)
def test_operations(name, dtype):
    call = getattr(WORLD, name)
    for lay in LAYOUTS.values():
        host = lay(values((TOTAL, columns(name)), dtype))
        mine = on_gpu(host)
        assert (mine.stride(), mine.is_conj()) == (host.stride(), host.is_conj())
        before = host.clone()
        same(call(mine, **arguments(name)), call(host, **arguments(name)))
        same(mine, before)


@pytest.mark.parametrize(
    "dtype", [d for d in DTYPES if d.is_floating_point or d.is_complex], ids=str
)
@pytest.mark.parametrize("name", OPERATIONS)
def test_gradients_of_operations(name, dtype):
    for lay in LAYOUTS.values():
        host, found = lay(values((TOTAL, columns(name)), dtype)), []
        for put in (as_is, on_gpu):
            x = put(host).detach().requires_grad_()
            y = getattr(WORLD, name)(x, **arguments(name))
            found += gradients([y], [x], weights(put))
        same(found[1], found[0])


@pytest.mark.parametrize("op", REDUCTIONS, ids=repr)
def test_every_reduction(op):
    for dtype in (torch.float64, torch.bfloat16, torch.int64, torch.bool):
        if kind_of(dtype) in REDUCTIONS[op].kinds:
            host = values((TOTAL, 2), dtype)
            for name in ("Allreduce", "Reduce", "Reduce_scatter"):
                call, given = getattr(WORLD, name), arguments(name, op)
                same(call(on_gpu(host), **given), call(host, **given))


@pytest.mark.parametrize("name", ["Bcast_", "Reduce_"])
def test_in_place_results_land_in_the_callers_tensor(name):
    for layout in WRITABLE:
        host = LAYOUTS[layout](values((TOTAL, 3), torch.float32))
        mine = on_gpu(host)
        pointer = mine.data_ptr()
        expected = getattr(WORLD, name)(host, **arguments(name[:-1]))
        result = getattr(WORLD, name)(mine, **arguments(name[:-1]))
        same(result, expected)
        same(mine, expected)
        assert result.data_ptr() == mine.data_ptr() == pointer


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex128], ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_and_their_gradients(name, dtype):
    cases = []
    for put in (as_is, on_gpu):
        inputs, results = FUNCTIONS[name](put, wanting(put), dtype)
        kept = [y.detach().clone() for y in results]
        cases.append((kept, gradients(results, inputs, weights(put))))
    for host, mine in zip(cases[0][0] + cases[0][1], cases[1][0] + cases[1][1], strict=True):
        same(mine, host)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", MESSAGES)
def test_messages(name, dtype):
    for layout in WRITABLE:
        found = []
        for put in (as_is, on_gpu):
            x = put(LAYOUTS[layout](values((3, 4), dtype)))
            into = put(LAYOUTS[layout](torch.zeros(3, 4, dtype=dtype)))
            with torch.no_grad():
                found += [MESSAGES[name](x, into), into]
        same(found[2], found[0])
        same(found[3], found[1])


@pytest.mark.parametrize("name", MESSAGES)
def test_gradients_of_messages(name):
    found = []
    for put in (as_is, on_gpu):
        x = put(values((3, 4), torch.float64)).requires_grad_()
        y = MESSAGES[name](x * 2, put(torch.zeros(3, 4, dtype=torch.float64)))
        found.append(gradients([y], [x], weights(put))[0])
    assert (found[0] is None) == (found[1] is None)
    if found[0] is not None:
        same(found[1], found[0])


# ---------------------------------------------------------------- long tensors, in chunks


@pytest.mark.parametrize("name", OPERATIONS)
def test_many_chunks(name, limits):
    given = arguments(name)
    if "numelem" in given:
        given["numelem"] *= 3001
    host, found = values((3001 * TOTAL, 4 * columns(name)), torch.float64), []
    for put in (as_is, on_gpu):
        if found:
            limits(chunk_bytes=1 << 16)
        x = put(host).requires_grad_()
        y = getattr(WORLD, name)(x, **given)
        found.append((y.detach(), *gradients([y], [x], weights(put))))
    same(found[1][0], found[0][0])
    same(found[1][1], found[0][1])


@pytest.mark.parametrize("name", FUNCTIONS)
def test_many_chunks_of_lists(name, limits):
    cases = []
    for put in (as_is, on_gpu):
        if cases:
            limits(chunk_bytes=1 << 16)
        inputs, results = FUNCTIONS[name](put, wanting(put), torch.float64, k=3001)
        kept = [y.detach().clone() for y in results]
        cases.append((kept, gradients(results, inputs, weights(put))))
    for host, mine in zip(cases[0][0] + cases[0][1], cases[1][0] + cases[1][1], strict=True):
        same(mine, host)


# ---------------------------------------------------------------- H1: the current device


def test_the_current_device_stays():
    """A tensor on the last device, while the first is current."""
    if COUNT < 2:
        pytest.skip(f"{COUNT} CUDA device: an index above 0 needs two")
    last = torch.device("cuda", COUNT - 1)
    torch.cuda.set_device(0)
    x = torch.full((1000,), RANK + 1.0, device=last).requires_grad_()
    y = WORLD.Allreduce(x, mpicoll.MPI_SUM)
    into = WORLD.Sendrecv(x.detach(), AHEAD, torch.zeros(1000, device=last), BEHIND)
    gathered = F.all_gather(x)
    (y.sum() + sum(g.sum() for g in gathered)).backward()
    assert {t.device for t in (y, into, x.grad, *gathered)} == {last}
    assert torch.cuda.current_device() == 0
    assert set(y.tolist()) == {float(TOTAL)}
    assert set(into.tolist()) == {BEHIND + 1.0}
    assert set(x.grad.tolist()) == {2.0 * SIZE}


# ---------------------------------------------------------------- H2: streams

ROUNDS = 100
LENGTH = 12 * (1 << 14)  # any number of ranks up to 4 divides it
PAUSE = 1_000_000  # clock ticks: about half a millisecond, far longer than a launch


def _late(k: float) -> torch.Tensor:
    """Make a tensor that the current stream fills after a pause; until then it holds -1."""
    made = torch.full((LENGTH,), -1.0, device=DEVICE)
    torch.cuda._sleep(PAUSE)
    return made.fill_(k)


@pytest.mark.parametrize("name", ["Allreduce", "Allgather", "all_to_all", "Sendrecv"])
def test_what_a_side_stream_has_yet_to_write_is_never_sent_stale(name):
    stream = torch.cuda.Stream(DEVICE)
    for k in range(ROUNDS):
        with torch.cuda.stream(stream):
            x = _late(float(k + RANK))
            if name == "Allreduce":
                y, expected = WORLD.Allreduce(x, mpicoll.MPI_SUM), [SIZE * k + TOTAL - SIZE]
            elif name == "Allgather":
                y, expected = WORLD.Allgather(x, 0), [k + r for r in range(SIZE)]
            elif name == "all_to_all":
                outputs = [torch.empty_like(x) for _ in range(SIZE)]
                y = torch.cat(F.all_to_all(outputs, [x] * SIZE))
                expected = [k + r for r in range(SIZE)]
            else:
                y = WORLD.Sendrecv(x, AHEAD, torch.zeros_like(x), BEHIND)
                expected = [k + BEHIND]
            # At once, on the same stream: the result is there in stream order.
            rows = y.view(len(expected), -1)
            wrong = sum(row.ne(value).sum() for row, value in zip(rows, expected, strict=True))
        assert wrong.item() == 0, f"round {k}"


class _LateGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, k):
        ctx.k = k
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return _late(ctx.k), None


@pytest.mark.parametrize("name", ["Allreduce", "Allgather", "Sendrecv"])
def test_a_late_gradient_is_never_sent_stale(name):
    stream = torch.cuda.Stream(DEVICE)
    for k in range(ROUNDS):
        with torch.cuda.stream(stream):
            n = LENGTH // SIZE if name == "Allgather" else LENGTH
            x = torch.zeros(n, device=DEVICE).requires_grad_()
            if name == "Allreduce":
                y, expected = WORLD.Allreduce(x, mpicoll.MPI_SUM), SIZE * k + TOTAL - SIZE
            elif name == "Allgather":
                y, expected = WORLD.Allgather(x, 0), SIZE * k + TOTAL - SIZE
            else:
                y = WORLD.Sendrecv(x, AHEAD, torch.zeros_like(x), BEHIND)
                expected = k + AHEAD
            _LateGradient.apply(y, float(k + RANK)).sum().backward()
            wrong = x.grad.ne(expected).sum()
        assert wrong.item() == 0, f"round {k}"


def test_a_result_may_be_used_on_another_stream_after_the_usual_wait():
    side = torch.cuda.Stream(DEVICE)
    for k in range(ROUNDS):
        y = WORLD.Allreduce(_late(float(k)), mpicoll.MPI_SUM)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            wrong = y.ne(float(SIZE * k)).sum()
        y.record_stream(side)
        assert wrong.item() == 0, f"round {k}"


def test_what_is_sent_may_be_overwritten_after_the_call():
    """The copy out has read the tensor before work that is queued later can change it."""
    for k in range(ROUNDS):
        x = torch.full((LENGTH,), float(k + RANK), device=DEVICE)
        y = WORLD.Allreduce(x, mpicoll.MPI_SUM)
        x.fill_(-1)
        assert y.ne(float(SIZE * k + TOTAL - SIZE)).sum().item() == 0, f"round {k}"
