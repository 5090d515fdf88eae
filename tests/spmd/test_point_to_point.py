"""Messages between two ranks, and their gradients the other way."""

from __future__ import annotations

import gc
import warnings
import weakref

import pytest
import torch
from groups import every, ranks
from mpi4py import MPI

import mpicoll
from mpicoll import JoinDummies, JoinDummiesHandle, WaitHandle
from mpicoll._core import point_to_point as core
from mpicoll.staging.dtypes import DTYPES

f64 = torch.float64


def around(comm) -> tuple[int, int]:
    """The right and the left neighbour on the ring."""
    return (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size


def same(got: torch.Tensor, expected) -> None:
    if not isinstance(expected, torch.Tensor):
        expected = torch.tensor(expected, dtype=got.dtype)
    torch.testing.assert_close(got.detach(), expected.detach(), rtol=0, atol=0, equal_nan=True)


def bits_of(comm, source: int, dtype: torch.dtype) -> torch.Tensor:
    """12 elements that only `source` has, whatever the dtype, of shape (3, 4)."""
    raw = (torch.arange(12 * dtype.itemsize) * 7 + 31 * source) % 251
    if dtype == torch.bool:
        raw = (raw + source) % 2
    return raw.to(torch.uint8).view(dtype).view(3, 4)


SEND_LAYOUTS = {
    "plain": lambda t: t.clone(),
    "transposed": lambda t: t.t().contiguous().t(),
    "sliced": lambda t: torch.stack([t, t], -1)[..., 0],
    "offset": lambda t: torch.cat([t[:1], t])[1:],
}
RECV_LAYOUTS = {
    "plain": lambda t: t,
    "transposed": lambda t: t.t().clone(memory_format=torch.contiguous_format).t(),
    "sliced": lambda t: torch.stack([t, t], -1)[..., 1],
}


def exchanged(comm, form: str, x: torch.Tensor, buffer: torch.Tensor) -> torch.Tensor:
    """`x` to the right, the left one's into `buffer`; with every dependency that a graph needs."""
    right, left = around(comm)
    if form == "Sendrecv":
        return comm.Sendrecv(x, right, buffer, left, 5, 5)
    if form == "Isend, Recv":
        handle = comm.Isend(x, right, 5)
        got = comm.Recv(buffer, left, 5)
        return JoinDummies(got, [comm.Wait(handle)])
    if form == "Irecv, Send":
        handle = comm.Irecv(buffer, left, 5)
        sent = comm.Send(x, right, 5)
        return JoinDummies(comm.Wait(handle), [sent])
    started = comm.Irecv(buffer, left, 5), comm.Isend(x, right, 5)
    sent = started[1].wait()
    return JoinDummies(started[0].wait(), [sent])


FORMS = ["Sendrecv", "Isend, Recv", "Irecv, Send", "Irecv, Isend"]


def chained(comm, form: str, x: torch.Tensor, buffer: torch.Tensor) -> torch.Tensor:
    """As :func:`exchanged`, every call on one path of the graph, as higher derivatives need it."""
    right, left = around(comm)
    if form == "Sendrecv":
        return comm.Sendrecv(x, right, buffer, left, 5, 5)
    if form == "Isend, Recv":
        handle = comm.Isend(x, right, 5)
        got = comm.Recv(JoinDummies(buffer, [handle.dummy]), left, 5)
        return JoinDummies(got, [comm.Wait(JoinDummiesHandle(handle, [got]))])
    receive = comm.Irecv(buffer, left, 5)
    x = JoinDummies(x, [receive.dummy])
    sent = comm.Wait(comm.Isend(x, right, 5)) if "Isend" in form else comm.Send(x, right, 5)
    return comm.Wait(JoinDummiesHandle(receive, [sent]))


# ---------------------------------------------------------------- values


@every
@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_and_layout(comm, dtype):
    _, left = around(comm)
    bits = torch.uint8
    for form in FORMS:
        for out in SEND_LAYOUTS.values():
            for into in RECV_LAYOUTS.values():
                x = out(bits_of(comm, comm.rank, dtype))
                buffer = into(torch.zeros(3, 4, dtype=dtype))
                with torch.no_grad():
                    got = exchanged(comm, form, x, buffer)
                wanted = bits_of(comm, left, dtype)
                assert got.dtype == dtype
                assert got.shape == (3, 4)
                for tensor in (got, buffer):
                    plain = tensor.contiguous().view(bits)
                    assert torch.equal(plain, wanted.view(bits)), (form, tensor.stride())
                assert got.data_ptr() == buffer.data_ptr()


@every
def test_expanded_conjugated_negated_and_0d(comm):
    right, left = around(comm)
    x = torch.tensor([comm.rank + 1.0], dtype=f64).expand(2, 3)
    same(
        comm.Sendrecv(x, right, torch.zeros(2, 3, dtype=f64), left),
        torch.full((2, 3), left + 1.0, dtype=f64),
    )
    z = torch.tensor([comm.rank + 2j, 1j]).conj()
    assert z.is_conj()
    handle = comm.Isend(z, right, 0)
    same(comm.Recv(torch.zeros(2, dtype=z.dtype), left, 0), torch.tensor([left - 2j, -1j]))
    comm.Wait(handle)
    handle = comm.Isend(z.imag, right, 0)
    assert z.imag.is_neg()
    same(comm.Recv(torch.zeros(2), left, 0), [-2.0, -1.0])
    comm.Wait(handle)
    target = torch.zeros(2, dtype=z.dtype)
    comm.Sendrecv(z, right, target.conj(), left)  # the view's value is what was sent
    same(target, torch.tensor([left + 2j, 1j]))
    same(
        comm.Sendrecv(torch.tensor(float(comm.rank)), right, torch.tensor(-1.0), left), float(left)
    )


@every
def test_results_share_storage(comm):
    right, left = around(comm)
    x, buffer = torch.ones(3), torch.zeros(3)
    version = buffer._version
    handle = comm.Isend(x, right, 0)
    got = comm.Recv(buffer, left, 0)
    sent = comm.Wait(handle)
    assert sent.data_ptr() == x.data_ptr()
    assert got.data_ptr() == buffer.data_ptr()
    assert buffer._version > version
    same(buffer, [1.0, 1.0, 1.0])


@every
def test_strides_of_what_was_sent_survive(comm):
    right, left = around(comm)
    x = torch.arange(6.0).view(2, 3).t()
    handle = comm.Isend(x, right, 0)
    comm.Recv(torch.zeros(3, 2), left, 0)
    sent = comm.Wait(handle)
    assert sent.stride() == x.stride()
    assert sent.data_ptr() == x.data_ptr()


@every
def test_shorter_message_leaves_the_tail(comm):
    right, left = around(comm)
    for into in (lambda t: t, lambda t: torch.stack([t, t], -1)[..., 0]):
        for form in FORMS:
            buffer = into(torch.arange(6, dtype=f64) + 50)
            x = torch.tensor([comm.rank + 1.0, 2.0], dtype=f64, requires_grad=True)
            y = exchanged(comm, form, x, buffer)
            same(y, [left + 1.0, 2.0, 52, 53, 54, 55])
            same(buffer.clone(), [left + 1.0, 2.0, 52, 53, 54, 55])
            (y * torch.arange(6)).sum().backward()
            same(x.grad, [0.0, 1.0])
    y = comm.Sendrecv(torch.empty(0), right, torch.ones(2), left)
    same(y, [1.0, 1.0])


@every
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.filterwarnings("error")
def test_longer_message(comm, form, works):
    x, buffer = torch.arange(3, dtype=f64), torch.zeros(2, dtype=f64)
    right, left = around(comm)
    sizes = rf"rank {left} sent 24 bytes .*room for 16"
    if form == "Sendrecv":
        with pytest.raises(mpicoll.MPIError, match=sizes):
            comm.Sendrecv(x, right, buffer, left)
    elif form == "Isend, Recv":
        handle = comm.Isend(x, right, 0)
        with pytest.raises(mpicoll.MPIError, match=sizes):
            comm.Recv(buffer, left, 0)
        comm.Wait(handle)
    else:
        handle = comm.Irecv(buffer, left, 0)
        comm.Isend(x, right, 0).wait()
        with pytest.raises(mpicoll.MPIError, match=sizes) as caught:
            handle.wait()
        assert caught.value.error_class == MPI.ERR_TRUNCATE
    works(comm)


@every
@pytest.mark.filterwarnings("error")
def test_other_dtype(comm, works):
    right, left = around(comm)
    for sent, expected in ((torch.float32, torch.int32), (torch.float32, torch.float64)):
        handle = comm.Isend(torch.ones(2, dtype=sent), right, 0)
        with pytest.raises(TypeError, match=rf"rank {left}, tag 0.*not {expected}"):
            comm.Recv(torch.zeros(2, dtype=expected), left, 0)
        comm.Wait(handle)
    with pytest.raises(TypeError, match="dtype"):
        comm.Sendrecv(torch.ones(2, dtype=torch.int64), right, torch.zeros(2, dtype=f64), left)
    handle = comm.Isend(torch.ones(2, dtype=f64), right, 0)
    with pytest.raises(mpicoll.MPIError, match="16 bytes"):  # too long to look at its dtype
        comm.Recv(torch.zeros(2), left, 0)
    comm.Wait(handle)
    works(comm)


@every
def test_tags_and_order(comm):
    right, left = around(comm)
    handles = [comm.Isend(torch.tensor([10.0 * i + comm.rank]), right, i % 2) for i in range(4)]
    for i in (1, 0, 3, 2):
        same(comm.Recv(torch.zeros(1), left, i % 2), [10.0 * i + left])
    for handle in handles:
        comm.Wait(handle)
    upper = MPI.COMM_WORLD.Get_attr(MPI.TAG_UB)
    same(comm.Sendrecv(torch.ones(1), right, torch.zeros(1), left, upper, upper), [1.0])
    same(comm.Sendrecv(torch.ones(1), right, torch.zeros(1), left), [1.0])


@every
def test_self_messages(comm):
    r = comm.rank
    x = torch.tensor([r + 1.0], dtype=f64, requires_grad=True)
    handle = comm.Isend(x, r, 0)
    got = comm.Recv(torch.zeros(1, dtype=f64), r, 0)
    y = JoinDummies(5 * got, [comm.Wait(handle)])
    same(y, [5 * (r + 1.0)])
    y.backward()
    same(x.grad, [5.0])
    x.grad = None
    (7 * comm.Sendrecv(x, r, torch.zeros(1, dtype=f64), r)).backward()
    same(x.grad, [7.0])


@every
def test_empty_messages(comm):
    for form in FORMS:
        x = torch.empty(2, 0, dtype=f64, requires_grad=True)
        y = exchanged(comm, form, x, torch.empty(2, 0, dtype=f64))
        assert y.shape == (2, 0)
        y.sum().backward()
        assert x.grad.shape == (2, 0)


@every
def test_no_peer(comm):
    """None is MPI_PROC_NULL: nothing is sent, and what should be filled stays as it was."""
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    buffer = torch.tensor([8.0, 9.0])
    same(comm.Send(x, None, 0), [1.0, 2.0])
    same(comm.Recv(buffer, None, 0), [8.0, 9.0])
    same(comm.Isend(x, None, 0).wait(), [1.0, 2.0])
    handle = comm.Irecv(buffer, None, 0)
    assert handle.test()
    same(handle.wait(), [8.0, 9.0])
    y = comm.Sendrecv(x, None, buffer, None)
    same(y, [8.0, 9.0])
    y.sum().backward()
    same(x.grad, [0.0, 0.0])
    x.grad = None
    (3 * comm.Send(x, None, 0)).sum().backward()
    same(x.grad, [3.0, 3.0])
    with pytest.raises(RuntimeError, match="waited for already"):
        handle.wait()


@ranks(2, 3, 4)
def test_open_chain(comm):
    """A shift without wrap-around: the ends talk to None, values and gradients."""
    r, W = comm.rank, comm.size
    right, left = (r + 1 if r + 1 < W else None), (r - 1 if r else None)
    x = torch.tensor([r + 1.0], dtype=f64, requires_grad=True)
    edge = torch.tensor([-4.0], dtype=f64, requires_grad=True)
    y = comm.Sendrecv(x, right, edge * 1, left)
    same(y, [float(r) if r else -4.0])
    ((r + 1) * y).sum().backward()
    same(x.grad, [float(r + 2) if right is not None else 0.0])
    same(edge.grad, [1.0 if r == 0 else 0.0])


# ---------------------------------------------------------------- handles


def settle(comm) -> None:
    """Give messages that nobody waits for the time to complete: others reap them."""
    right, left = around(comm)
    for _ in range(10):
        comm.Barrier()
        with torch.no_grad():
            comm.Sendrecv(torch.ones(1), right, torch.zeros(1), left)


@every
def test_test_says_when_wait_returns_at_once(comm, everyone):
    right, left = around(comm)
    handle = comm.Irecv(torch.zeros(3), left, 0)
    assert not handle.test()
    everyone("nobody has sent yet")
    sent = comm.Isend(torch.ones(3), right, 0)
    while not handle.test():
        pass
    same(handle.wait(), [1.0, 1.0, 1.0])
    while not sent.test():
        pass
    sent.wait()


@every
def test_waiting_twice_also_through_a_derived_handle(comm):
    right, left = around(comm)
    dummy = torch.ones(1, requires_grad=True)
    for first, second in ((0, 1), (1, 0), (1, 1), (0, 0)):
        receive = comm.Irecv(torch.zeros(1), left, 0)
        send = comm.Isend(torch.ones(1), right, 0)
        for handle in (send, receive):
            both = (handle, JoinDummiesHandle(handle, [dummy]))
            comm.Wait(both[first])
            with pytest.raises(RuntimeError, match="waited for already"):
                comm.Wait(both[second])
            with pytest.raises(RuntimeError, match="waited for already"):
                both[second].wait()


@every
def test_handle_shows_what_it_is(comm):
    right, left = around(comm)
    receive = comm.Irecv(torch.zeros(1), left, 6)
    send = comm.Isend(torch.ones(1), right, 6)
    assert isinstance(send, WaitHandle)
    assert f"Isend to rank {right}, tag 6, started" in repr(send)
    assert f"Irecv from rank {left}, tag 6, started" in repr(receive)
    comm.Wait(send)
    comm.Wait(receive)
    assert "consumed" in repr(send)


@every
def test_dropped_handles_are_reported_and_let_go(comm, everyone):
    right, left = around(comm)
    before = len(core.in_flight())
    x = torch.ones(70_000)
    gone = weakref.ref(x)
    handle = comm.Isend(x, right, 0)
    receive = comm.Irecv(torch.zeros(70_000), left, 1)
    with pytest.warns(
        ResourceWarning, match=rf"Isend with rank {right} \(tag 0\) was never waited"
    ):
        del handle, x
    with pytest.warns(ResourceWarning, match=rf"Irecv with rank {left} \(tag 1\) was never waited"):
        del receive
    same(comm.Recv(torch.zeros(70_000), left, 0)[-1], 1.0)
    comm.Send(torch.ones(70_000), right, 1)
    everyone("both messages have arrived")
    settle(comm)
    assert len(core.in_flight()) <= before
    assert gone() is None


@every
def test_waited_handles_leave_nothing_behind(comm):
    before = len(core.in_flight())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for form in FORMS:
            x = torch.ones(2, requires_grad=True)
            exchanged(comm, form, x, torch.zeros(2)).sum().backward()
            del x
        gc.collect()
    settle(comm)
    assert len(core.in_flight()) <= before


# ---------------------------------------------------------------- JoinDummies


def test_join_dummies_passes_itself():
    x = torch.ones(2, requires_grad=True)
    assert JoinDummies(x, []) is x
    assert JoinDummies(x, [torch.ones(1)]) is x
    assert JoinDummies(x, (torch.arange(3),)) is x
    with torch.no_grad():
        assert JoinDummies(x, [torch.ones(1, requires_grad=True)]) is x
    n = torch.arange(3)
    assert JoinDummies(n, [torch.ones(1)]) is n


def test_join_dummies_shares_storage_and_gives_zeros():
    x = torch.arange(4, dtype=f64)
    dummies = [
        torch.ones(3, requires_grad=True),
        torch.ones(2, 2, dtype=torch.complex64, requires_grad=True),
        torch.ones(5),
        torch.ones((), dtype=torch.bfloat16, requires_grad=True),
    ]
    y = JoinDummies(x.t(), dummies)
    assert y.requires_grad
    assert y is not x
    assert y.data_ptr() == x.data_ptr()
    same(y, [0, 1, 2, 3])
    (2 * y).sum().backward()
    for dummy in dummies:
        if dummy.requires_grad:
            same(dummy.grad, torch.zeros_like(dummy))
            assert dummy.grad.dtype == dummy.dtype
        else:
            assert dummy.grad is None
    leaf = torch.ones(4, dtype=f64, requires_grad=True)
    (3 * JoinDummies(leaf, dummies)).sum().backward()
    same(leaf.grad, [3.0] * 4)


def test_join_dummies_twice_differentiable():
    x = torch.tensor([2.0, 3.0], dtype=f64, requires_grad=True)
    d = torch.ones(1, dtype=f64, requires_grad=True)
    torch.autograd.gradcheck(lambda a, b: JoinDummies(a * a, [b * 2]), (x, d))
    torch.autograd.gradgradcheck(lambda a, b: JoinDummies(a**3, [b * 2]), (x, d))


def test_join_dummies_type_errors():
    d = torch.ones(1, requires_grad=True)
    for bad in (1.0, [torch.ones(1)], None):
        with pytest.raises(TypeError, match="JoinDummies: loopthrough must be"):
            JoinDummies(bad, [])
    with pytest.raises(TypeError, match="not one tensor"):
        JoinDummies(torch.ones(1), d)
    with pytest.raises(TypeError, match=r"dummies\[1\] must be a torch.Tensor, not int"):
        JoinDummies(torch.ones(1), [d, 3])
    with pytest.raises(TypeError, match=r"torch\.int64 cannot carry a graph"):
        JoinDummies(torch.arange(2), [d])
    with pytest.raises(TypeError):
        JoinDummies(torch.ones(1), 3)
    with pytest.raises(TypeError, match="JoinDummiesHandle: handle must be a WaitHandle"):
        JoinDummiesHandle(torch.ones(1), [d])


@every
def test_join_dummies_handle(comm):
    right, left = around(comm)
    x = torch.ones(2, dtype=f64, requires_grad=True)
    dummy = torch.ones(3, requires_grad=True)
    handle = comm.Isend(x, right, 0)
    assert handle.dummy.requires_grad
    derived = JoinDummiesHandle(handle, [dummy])
    assert isinstance(derived, WaitHandle)
    assert derived is not handle
    with pytest.raises(TypeError, match="dummies"):
        JoinDummiesHandle(handle, dummy)
    got = comm.Recv(torch.zeros(2, dtype=f64), left, 0)
    y = JoinDummies(2 * got, [comm.Wait(derived)])
    y.sum().backward()
    same(x.grad, [2.0, 2.0])
    same(dummy.grad, [0.0, 0.0, 0.0])
    with torch.no_grad():
        plain = comm.Isend(x, right, 0)
        assert not plain.dummy.requires_grad
        comm.Recv(torch.zeros(2, dtype=f64), left, 0)
        comm.Wait(plain)


# ---------------------------------------------------------------- derivatives


@every
@pytest.mark.parametrize("form", FORMS)
def test_first_and_second_derivatives(comm, form):
    """y_r = x_left³; L_r = (r+1) Σ y²: dx_r = (right+1) 6 x⁵, then of Σ dx: (right+1) 30 x⁴."""
    right, left = around(comm)
    x = torch.tensor([comm.rank + 1.0, -2.0], dtype=f64, requires_grad=True)
    y = chained(comm, form, x**3, torch.empty(2, dtype=f64))
    same(y, [(left + 1.0) ** 3, -8.0])
    (g,) = torch.autograd.grad(((comm.rank + 1) * y * y).sum(), x, create_graph=True)
    same(g, (right + 1) * 6 * x**5)
    (h,) = torch.autograd.grad(g.sum(), x, create_graph=True)
    same(h, (right + 1) * 30 * x**4)
    h.sum().backward()
    same(x.grad, (right + 1) * 120 * x**3)


@every
@pytest.mark.parametrize("form", FORMS)
def test_second_derivative_through_the_gradient(comm, form):
    """The incoming gradient depends on this rank's tensor: it must reach it by both ways.

    L_r = Σ c_r x_left x_r, with c_r = r+1: dx_r = c_r x_left + c_right x_right; then of Σ_r
    Σ dx_r: dx_r gets c_right (the right one's first term) and c_r (the left one's second).
    """
    right, left = around(comm)
    r = comm.rank
    x = torch.tensor([r + 2.0], dtype=f64, requires_grad=True)
    got = chained(comm, form, x, torch.empty(1, dtype=f64))
    (g,) = torch.autograd.grad(((r + 1) * got * x).sum(), x, create_graph=True)
    same(g, [(r + 1) * (left + 2.0) + (right + 1) * (right + 2.0)])
    g.sum().backward()
    same(x.grad, [(right + 1.0) + (r + 1.0)])


@every
@pytest.mark.parametrize("form", FORMS)
def test_backward_twice(comm, form):
    right, _ = around(comm)
    x = torch.ones(3, dtype=f64, requires_grad=True)
    loss = ((comm.rank + 1) * exchanged(comm, form, x, torch.empty(3, dtype=f64))).sum()
    loss.backward(retain_graph=True)
    loss.backward(retain_graph=True)
    loss.backward()
    same(x.grad, [3.0 * (right + 1)] * 3)


@every
@pytest.mark.parametrize("form", FORMS)
def test_leaf_buffers(comm, form):
    """A leaf that requires grad may be received into, and gets a zero gradient."""
    _, left = around(comm)
    x = torch.full((2,), comm.rank + 1.0, dtype=f64, requires_grad=True)
    buffer = torch.zeros(2, dtype=f64, requires_grad=True)
    y = exchanged(comm, form, x, buffer)
    same(buffer, [left + 1.0] * 2)
    (4 * y).sum().backward()
    same(buffer.grad, [0.0, 0.0])
    same(x.grad, [4.0, 4.0])


@every
@pytest.mark.parametrize("form", FORMS)
def test_used_again_after_receiving(comm, form):
    """What was received into must not be used again in the graph; its result must."""
    x = torch.ones(2, dtype=f64, requires_grad=True)
    buffer = torch.zeros(2, dtype=f64, requires_grad=True) * 1
    y = exchanged(comm, form, x, buffer)
    with pytest.raises(RuntimeError, match="used again"):
        (buffer * 2).sum().backward()
    y.sum().backward()
    same(x.grad, [1.0, 1.0])


@every
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("sender", ["wants", "does not"])
@pytest.mark.parametrize("receiver", ["graph", "no_grad", "buffer requires grad"])
def test_who_wants_a_gradient(comm, form, sender, receiver):
    """The sender's word travels with the message; what the buffer says does not count."""
    right, _ = around(comm)
    x = torch.ones(2, dtype=f64, requires_grad=sender == "wants")
    buffer = torch.zeros(2, dtype=f64, requires_grad=receiver == "buffer requires grad")
    if receiver == "no_grad":
        with torch.no_grad():
            y = exchanged(comm, form, x, buffer)
        assert not y.requires_grad
        return
    y = exchanged(comm, form, x, buffer)
    assert y.requires_grad  # a received tensor of floats is always in the graph
    ((comm.rank + 1) * y).sum().backward()
    if sender == "wants":
        same(x.grad, [right + 1.0] * 2)
    else:
        assert x.grad is None
    if receiver == "buffer requires grad":
        same(buffer.grad, [0.0, 0.0])


@ranks(2, 3, 4)
def test_only_some_ranks_want_a_gradient(comm):
    """Even ranks want one, odd ranks do not; all run backward."""
    right, left = around(comm)
    for form in FORMS:
        x = torch.full((2,), comm.rank + 1.0, dtype=f64, requires_grad=comm.rank % 2 == 0)
        y = exchanged(comm, form, x, torch.empty(2, dtype=f64))
        same(y, [left + 1.0] * 2)
        ((comm.rank + 1) * y).sum().backward()
        if comm.rank % 2 == 0:
            same(x.grad, [right + 1.0] * 2)
        else:
            assert x.grad is None


@every
def test_integers_carry_no_graph(comm):
    right, left = around(comm)
    for dtype in (torch.int64, torch.bool, torch.uint8):
        y = comm.Sendrecv(torch.ones(2, dtype=dtype), right, torch.zeros(2, dtype=dtype), left)
        assert not y.requires_grad
        handle = comm.Irecv(torch.zeros(2, dtype=dtype), left, 0)
        comm.Send(torch.ones(2, dtype=dtype), right, 0)
        assert not handle.wait().requires_grad


@ranks(2)
def test_one_way(comm):
    """Rank 0 sends, rank 1 receives: one uses the result, the other the dummy."""
    x = torch.tensor([3.0], dtype=f64, requires_grad=True)
    if comm.rank == 0:
        sent = comm.Send(x * x, 1, 0)
        (0 * sent).sum().backward()
        same(x.grad, [6.0 * 5])
    else:
        got = comm.Recv(torch.empty(1, dtype=f64), 0, 0)
        (5 * got).sum().backward()


@ranks(2)
def test_send_passes_its_own_gradient_on(comm):
    """What Send returns is the sent tensor: its gradient adds to what comes back."""
    x = torch.tensor([3.0], dtype=f64, requires_grad=True)
    if comm.rank == 0:
        (10 * comm.Send(x, 1, 0)).sum().backward()
        same(x.grad, [10.0 + 7.0])
    else:
        (7 * comm.Recv(torch.empty(1, dtype=f64), 0, 0)).sum().backward()


@ranks(2)
def test_backward_in_different_order_on_two_ranks(comm):
    """Three messages whose nodes run in opposite order: each gradient finds its message."""
    weights = [2.0, 3.0, 5.0]
    if comm.rank == 0:
        xs = [torch.tensor([1.0], dtype=f64, requires_grad=True) for _ in weights]
        sent = [comm.Send(x, 1, 0) for x in xs]
        for y in sent:
            (0 * y).sum().backward()
        for x, w in zip(xs, weights, strict=True):
            same(x.grad, [w])
    else:
        got = [comm.Recv(torch.empty(1, dtype=f64), 0, 0) for _ in weights]
        for y, w in reversed(list(zip(got, weights, strict=True))):
            (w * y).sum().backward()


@ranks(2)
def test_gradients_never_meet_user_messages(comm):
    """A gradient in flight is on a channel of its own, whatever tags the user has."""
    other = 1 - comm.rank
    x = torch.ones(1, dtype=f64, requires_grad=True)
    y = comm.Sendrecv(x, other, torch.empty(1, dtype=f64), other)
    handles = [comm.Isend(torch.full((1,), 100.0 + t, dtype=f64), other, t) for t in range(20)]
    (2 * y).sum().backward()
    same(x.grad, [2.0])
    for t, handle in enumerate(handles):
        same(comm.Recv(torch.empty(1, dtype=f64), other, t), [100.0 + t])
        comm.Wait(handle)


@ranks(2)
def test_gradient_that_nobody_received(comm, everyone):
    """The send's result was forgotten: reported when the communicator is freed, not dropped."""
    own = comm.Dup()
    x = torch.ones(1, dtype=f64, requires_grad=True)
    if own.rank == 0:
        own.Send(x, 1, 0)
    else:
        own.Recv(torch.empty(1, dtype=f64), 0, 0).sum().backward()
    own.Barrier()
    if own.rank == 0:
        with pytest.warns(RuntimeWarning, match="gradient message that no node received"):
            own.Free()
        assert x.grad is None
    else:
        own.Free()


@ranks(2)
def test_started_but_never_completed_in_the_graph(comm):
    """Only the start of the send is in the graph: its gradient still comes."""
    x = torch.ones(1, dtype=f64, requires_grad=True)
    if comm.rank == 0:
        handle = comm.Isend(x, 1, 0)
        y = JoinDummies(torch.zeros(1, dtype=f64), [handle.dummy])
        with torch.no_grad():
            handle.wait()
        y.sum().backward()
        same(x.grad, [4.0])
    else:
        (4 * comm.Recv(torch.empty(1, dtype=f64), 0, 0)).sum().backward()


@every
def test_strided_tensors_and_gradients(comm):
    """Layouts of tensor, buffer and gradient; the gradient has the values of the right place."""
    right, left = around(comm)
    for form in FORMS:
        for out in SEND_LAYOUTS.values():
            for into in RECV_LAYOUTS.values():
                x = (torch.arange(12, dtype=f64).view(3, 4) + comm.rank).requires_grad_()
                y = exchanged(comm, form, out(x), into(torch.zeros(3, 4, dtype=f64)))
                same(y.contiguous(), torch.arange(12, dtype=f64).view(3, 4) + left)
                w = torch.arange(12, dtype=f64).view(4, 3).t() * (comm.rank + 1)
                (y.t() * w.t()).sum().backward()
                same(x.grad, torch.arange(12, dtype=f64).view(4, 3).t().contiguous() * (right + 1))


@every
def test_complex_and_half_gradients(comm):
    right, left = around(comm)
    z = torch.tensor([comm.rank + 1j], requires_grad=True)
    y = comm.Sendrecv(z, right, torch.empty(1, dtype=z.dtype), left)
    (y * (2 - 1j)).real.sum().backward()
    same(z.grad, torch.tensor([2 + 1j]))
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        x = torch.ones(3, dtype=dtype, requires_grad=True)
        for form in FORMS:
            x.grad = None
            (3 * exchanged(comm, form, x, torch.empty(3, dtype=dtype))).sum().backward()
            same(x.grad, torch.full((3,), 3.0, dtype=dtype))


@every
def test_in_place_into_a_view_of_a_leaf(comm):
    right, left = around(comm)
    base = torch.zeros(4, dtype=f64, requires_grad=True)
    x = torch.ones(2, dtype=f64, requires_grad=True)
    y = comm.Sendrecv(x, right, base[1:3], left)
    same(base, [0.0, 1.0, 1.0, 0.0])
    (2 * y).sum().backward()
    same(x.grad, [2.0, 2.0])
    same(base.grad, [0.0] * 4)


@every
def test_shared_memory_is_refused(comm, works):
    right, left = around(comm)
    x = torch.arange(6.0)
    with pytest.raises(ValueError, match=r"share memory; pass sendtensor\.clone"):
        comm.Sendrecv(x[:4], right, x[2:], left)
    with pytest.raises(ValueError, match="share memory"):
        comm.Sendrecv(x, right, x, left)
    same(x, list(range(6)))
    works(comm)


@every
def test_sent_tensor_changed_before_wait_in_the_graph(comm):
    """What Wait returns after a send is the tensor itself, with its history."""
    right, left = around(comm)
    x = torch.ones(2, dtype=f64, requires_grad=True)
    handle = comm.Isend(2 * x, right, 0)
    got = comm.Recv(torch.empty(2, dtype=f64), left, 0)
    sent = comm.Wait(handle)
    assert sent.grad_fn is not None
    (10 * sent + got).sum().backward()
    same(x.grad, [2 * (10.0 + 1.0)] * 2)


@every
def test_interleaved_with_collectives(comm):
    """Messages and collectives in one graph: neither disturbs the other's order."""
    right, left = around(comm)
    x = torch.tensor([comm.rank + 1.0], dtype=f64, requires_grad=True)
    total = comm.Allreduce(x, mpicoll.MPI_SUM)
    got = comm.Sendrecv(total * x, right, torch.empty(1, dtype=f64), left)
    y = comm.Allreduce(got * x, mpicoll.MPI_SUM)
    y.sum().backward()
    # With the same on one process:
    xs = [torch.tensor([r + 1.0], dtype=f64, requires_grad=True) for r in range(comm.size)]
    sums = sum(xs)
    ys = sum(sums * xs[r - 1] * xs[r] for r in range(comm.size))
    (comm.size * ys).sum().backward()
    same(y, ys)
    same(x.grad, xs[comm.rank].grad)
