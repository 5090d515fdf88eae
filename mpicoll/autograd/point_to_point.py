"""Messages between two ranks, whose gradients travel the other way.

A message is two nodes of the graph: one where it is started, one where it is completed. In
backward they swap roles: completing starts the gradient message, starting completes it (where it
is received; where it is sent nobody waits), so that what lies between them overlaps with it.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch

from .. import watch
from .._core import mpi, point_to_point
from ..errors import MPIError
from ..staging import Pipeline, contiguous, is_plain, on_device, plan_for
from . import lockstep
from .dummies import JoinDummies, join
from .functions import anchor, claim, needs_graph
from .nodes import dense, node

__all__ = [
    "JoinDummiesHandle",
    "Message",
    "WaitHandle",
    "complete",
    "irecv",
    "isend",
    "sendrecv",
]


_LEFT = "the other rank may have left; call backward() before the context, or after it"
#: Requests whose message nobody holds any more; they complete while others start.
_abandoned: list[point_to_point.Request] = []


def _reap() -> None:
    """Let go of what was abandoned and has completed since."""
    waiting = []
    while _abandoned:
        request = _abandoned.pop()
        if not request.comm.freed and not request.test():
            waiting.append(request)
    _abandoned.extend(waiting)


class Message:
    """One message in one direction, with the buffer that MPI uses.

    Parameters
    ----------
    comm
        The core communicator.
    peer
        The other rank; None for MPI_PROC_NULL.
    tag
        The user's tag; None for a gradient message.
    answers
        For a gradient message: the number of the message that it answers.
    """

    __slots__ = (
        "__weakref__", "answers", "buffer", "comm", "consumed", "peer", "request", "reverse",
        "sends", "tag", "tensor", "wants",
    )  # fmt: skip

    def __init__(
        self, comm: mpi.Comm, peer: int | None, tag: int | None = None, answers: int = 0
    ) -> None:
        self.comm = comm
        self.peer = peer
        self.tag = tag
        self.answers = answers
        self.request: point_to_point.Request | None = None
        self.consumed = False
        self.reverse: WaitHandle | None = None
        self.wants = False

    def send(self, tensor: torch.Tensor, wants: bool) -> None:
        """Start to send `tensor`."""
        if _abandoned:
            _reap()
        self.sends = True
        self.wants = wants and self.peer is not None
        self.tensor = tensor.detach()
        if self.peer is None:
            return
        source = contiguous(self.tensor)
        direct = plan_for(source.device).direct
        if direct:
            self.buffer = source
        else:
            pipeline = Pipeline(source.device)
            self.buffer = pipeline.buffer(source.numel(), source.dtype)
            pipeline.ready(pipeline.out(self.buffer, source.view(-1)))
            pipeline.drained()
        with on_device(self.buffer.device):
            if self.tag is None:
                self.request = point_to_point.isend_gradient(
                    self.comm, self.buffer, self.peer, self.answers, self.wants
                )
            else:
                self.request = point_to_point.isend(
                    self.comm, self.buffer, self.peer, self.tag, self.wants
                )

    def receive(self, tensor: torch.Tensor) -> None:
        """Start to receive into `tensor`."""
        if _abandoned:
            _reap()
        self.sends = False
        self.tensor = tensor.detach()
        if self.peer is None:
            return
        if plan_for(tensor.device).direct and is_plain(self.tensor):
            self.buffer = self.tensor
        elif plan_for(tensor.device).direct:
            self.buffer = contiguous(self.tensor).clone()
        else:
            self.buffer = Pipeline(tensor.device).buffer(tensor.numel(), tensor.dtype)
        with on_device(self.buffer.device):
            if self.tag is None:
                self.request = point_to_point.irecv_gradient(
                    self.comm, self.buffer, self.peer, self.answers
                )
            else:
                self.request = point_to_point.irecv(self.comm, self.buffer, self.peer, self.tag)

    def finish(self) -> None:
        """Wait until it is there, and bring what was received to the caller's tensor."""
        self.consumed = True
        request = self.request
        if request is None:
            return
        try:
            request.wait()
        except MPIError as error:
            self._explain(error)
            raise
        if self.sends:
            return
        if not request.agrees:
            raise TypeError(
                f"receive on rank {self.comm.rank} from rank {self.peer}, tag {self.tag}: the "
                f"sender's dtype is not {self.tensor.dtype} ({request.nbytes} bytes were sent)"
            )
        self.wants = request.wants
        if self.buffer.data_ptr() != self.tensor.data_ptr() or not is_plain(self.tensor):
            if plan_for(self.tensor.device).direct:
                self.tensor.copy_(self.buffer.view(self.tensor.shape))
            elif request.nbytes:
                # A shorter message leaves the tail as it was.
                plain = self.tensor if is_plain(self.tensor) else contiguous(self.tensor)
                n = self.sent_elements()
                pipeline = Pipeline(self.tensor.device)
                pipeline.back(plain.view(-1)[:n], self.buffer[:n])
                pipeline.drained()
                if plain is not self.tensor:
                    self.tensor.copy_(plain)
        else:
            torch.autograd.graph.increment_version(self.tensor)

    def _explain(self, error: MPIError) -> None:
        request = self.request
        assert request is not None
        room = self.buffer.numel() * self.buffer.element_size()
        if not self.sends and request.nbytes > room:
            raise MPIError(
                "MPI_Recv",
                error.code,
                error.error_class,
                f"rank {self.peer} sent {request.nbytes} bytes (tag {self.tag}), rank "
                f"{self.comm.rank}'s tensor has room for {room}; {error.text}",
            ) from error

    def let_go(self) -> None:
        """Complete a send when it may be, without waiting for it."""
        self.consumed = True
        if self.request is not None and not self.request.test():
            _abandoned.append(self.request)

    def sent_elements(self) -> int:
        """How many elements the sender of a received message sent."""
        assert self.request is not None
        return self.request.nbytes // self.tensor.element_size()

    def __del__(self) -> None:
        request = getattr(self, "request", None)
        if request is not None and not self.consumed:
            _abandoned.append(request)
            warnings.warn(
                f"mpicoll: {'Isend' if self.sends else 'Irecv'} with rank {self.peer} (tag "
                f"{self.tag}) was never waited for; its buffer is kept until it completes",
                ResourceWarning,
                stacklevel=2,
            )


class WaitHandle:
    """What a non-blocking call returns.

    Attributes
    ----------
    dummy
        A graph handle: pass it to :func:`JoinDummies` to make another tensor depend on the start
        of the call.
    """

    __slots__ = ("_message", "dummy")

    def __init__(self, message: Message, dummy: torch.Tensor) -> None:
        self._message = message
        self.dummy = dummy

    def wait(self) -> torch.Tensor:
        """Complete the call; what ``Communicator.Wait`` returns for this handle.

        Raises
        ------
        RuntimeError
            The handle, or one derived from the same call, has been waited for already.
        """
        return complete(self)

    def test(self) -> bool:
        """Whether :meth:`wait` would return at once."""
        request = self._message.request
        return request is None or request.test()

    def __repr__(self) -> str:
        message = self._message
        state = "consumed" if message.consumed else "started"
        what = "Isend to" if message.sends else "Irecv from"
        return f"<WaitHandle: {what} rank {message.peer}, tag {message.tag}, {state}>"


class _Start(torch.autograd.Function):
    """``forward(message, tensor, anchor?) -> dummy``."""

    @staticmethod
    def forward(message: Message, sends: bool, wants: bool, tensor, *anchors):
        if sends:
            message.send(tensor, wants)
        else:
            message.receive(tensor)
        return torch.empty(0, device="cpu")

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        message, _, _, tensor, *anchors = inputs
        ctx.message = message
        ctx.meta = (tensor.shape, tensor.dtype, tensor.device)
        ctx.wanted = tensor.requires_grad
        ctx.anchors = len(anchors)

    @staticmethod
    def backward(ctx, gradient):
        message = ctx.message
        shape, dtype, device = ctx.meta
        result = None
        if message.sends:
            handle, message.reverse = message.reverse, None
            if handle is None and message.wants:
                handle = _start_reverse(message, gradient)  # nobody waited: its gradient comes
            if handle is not None:
                result = complete(WaitHandle(handle._message, join(handle.dummy, [gradient])))
        if result is None and ctx.wanted:
            result = join(torch.zeros(shape, dtype=dtype, device=device), [gradient])
        return None, None, None, result, *[torch.zeros(0, device="cpu")] * ctx.anchors


class _Complete(torch.autograd.Function):
    """``forward(message, dummy, tensor?) -> the message's tensor``."""

    @staticmethod
    def forward(message: Message, dummy, *sent):
        message.finish()
        return message.tensor.detach()

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        ctx.message = inputs[0]
        ctx.sent = len(inputs) == 3

    @staticmethod
    def backward(ctx, gradient):
        message = ctx.message
        gradient = dense(gradient)
        dummy = torch.zeros(0, device="cpu")
        if message.wants:
            reverse = _start_reverse(message, gradient)
            dummy = reverse.dummy
            if message.sends:
                message.reverse = reverse
            else:  # nothing waits for a gradient to be sent: it could only wait for each other
                reverse._message.let_go()
        return (None, dummy, gradient) if ctx.sent else (None, dummy)


_start = node(_Start)
_complete = node(_Complete)


def _chain(
    message: Message, tensor: torch.Tensor, differentiates: bool = True
) -> lockstep.Chain | None:
    if not watch.ordered:
        return None
    return lockstep.chain_of(message.comm, tensor.dtype, differentiates)


def _start_reverse(message: Message, gradient: torch.Tensor) -> WaitHandle:
    """Start the gradient message that answers `message`, after what `gradient` depends on."""
    assert message.request is not None
    if watch.on:
        watch.refuse(message.comm, "the gradient of a message", _LEFT)
    back = Message(message.comm, message.peer, answers=message.request.sequence)
    if message.sends:
        buffer = torch.empty_like(message.tensor, memory_format=torch.contiguous_format)
        return _irecv(back, join(buffer, [gradient]))
    return _isend(back, gradient.reshape(-1)[: message.sent_elements()])


def _isend(message: Message, tensor: torch.Tensor) -> WaitHandle:
    # What the receiver is told: without a gradient to come back the send has no backward.
    chain = _chain(message, tensor, tensor.requires_grad)
    if needs_graph(tensor):
        anchors = [] if chain is None else [chain.tip]
        dummy = _start(message, True, tensor.requires_grad, tensor, *anchors)
        if chain is not None:
            chain.tip = dummy
    else:
        message.send(tensor, False)
        dummy = torch.empty(0, device="cpu")
    handle = WaitHandle(message, dummy)
    if tensor.requires_grad and torch.is_grad_enabled():
        message.tensor = tensor  # Wait passes it on, with its history
    return handle


def _irecv(message: Message, tensor: torch.Tensor) -> WaitHandle:
    carries = tensor.is_floating_point() or tensor.is_complex()
    if message.peer is None:  # nothing comes: the tensor stays what it is, with its history
        message.receive(tensor)
        message.tensor = tensor
        return WaitHandle(message, torch.empty(0, device="cpu"))
    if needs_graph(tensor) or (carries and torch.is_grad_enabled()):
        source = claim(tensor, "Irecv")
        chain = _chain(message, tensor)
        if chain is not None:
            dummy = chain.tip = _start(message, False, False, source, chain.tip)
        else:
            anchors = [] if tensor.requires_grad else [anchor(message.tag is None)]
            dummy = _start(message, False, False, source, *anchors)
    else:
        message.receive(tensor)
        dummy = torch.empty(0, device="cpu")
    return WaitHandle(message, dummy)


def isend(comm: mpi.Comm, tensor: torch.Tensor, dest: int | None, tag: int) -> WaitHandle:
    """Start to send `tensor` to rank `dest`."""
    return _isend(Message(comm, dest, tag), tensor)


def irecv(comm: mpi.Comm, tensor: torch.Tensor, source: int | None, tag: int) -> WaitHandle:
    """Start to receive into `tensor` from rank `source`."""
    return _irecv(Message(comm, source, tag), tensor)


def complete(handle: WaitHandle) -> torch.Tensor:
    """Complete a message: the tensor that was sent, or the one that was filled."""
    message = handle._message
    if message.consumed:
        raise RuntimeError(
            f"Wait: this handle has been waited for already ({handle!r}); a message completes once"
        )
    sent = message.tensor if message.sends or message.peer is None else None
    tracked = sent is not None and sent.requires_grad
    if torch.is_grad_enabled() and (handle.dummy.requires_grad or tracked):
        chain = _chain(message, message.tensor)
        dummy = handle.dummy if chain is None else join(handle.dummy, [chain.tip])
        result = _complete(message, dummy, sent) if tracked else _complete(message, dummy)
        if sent is not None:
            message.tensor = sent.detach()
        if chain is not None:
            chain.advance(result)
        return result
    message.finish()
    return message.tensor.detach()


def JoinDummiesHandle(handle: WaitHandle, dummies: Sequence[torch.Tensor]) -> WaitHandle:
    """Make tensors dependencies of the completion of a non-blocking call.

    Parameters
    ----------
    handle
        What the non-blocking call returned.
    dummies
        As for :func:`JoinDummies`.

    Returns
    -------
    WaitHandle
        A handle of the same call: either may be waited for, once.

    Raises
    ------
    TypeError
        An argument is of another type.
    """
    if not isinstance(handle, WaitHandle):
        raise TypeError(
            f"JoinDummiesHandle: handle must be a WaitHandle, not {type(handle).__name__}"
        )
    return WaitHandle(handle._message, JoinDummies(handle.dummy, dummies))


class _Sendrecv(torch.autograd.Function):
    """``forward(out, into, sendtensor, recvtensor, anchor?) -> what was received``."""

    @staticmethod
    def forward(out: Message, into: Message, wants: bool, sendtensor, recvtensor, *anchors):
        # Receive first: where both are the caller's one tensor, the sent value is a copy.
        into.receive(recvtensor)
        out.send(sendtensor, wants)
        try:
            into.finish()
        finally:
            out.finish()
        return into.tensor.detach()

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        ctx.out, ctx.into, _, sendtensor, recvtensor, *anchors = inputs
        ctx.send_meta = (sendtensor.shape, sendtensor.dtype, sendtensor.device)
        ctx.recv_meta = (recvtensor.shape, recvtensor.dtype, recvtensor.device)
        ctx.wanted = (sendtensor.requires_grad, recvtensor.requires_grad)
        ctx.anchors = len(anchors)

    @staticmethod
    def backward(ctx, gradient):
        out, into = ctx.out, ctx.into
        if watch.on and (out.wants or into.wants):
            watch.refuse(out.comm, "the gradient of Sendrecv", _LEFT)
        gradient = dense(gradient)
        shape, dtype, device = ctx.send_meta
        landing = torch.zeros(shape, dtype=dtype, device=device)
        back_out = Message(into.comm, None, answers=0)
        flat = gradient.reshape(-1)
        if into.wants:
            assert into.request is not None
            back_out = Message(into.comm, into.peer, answers=into.request.sequence)
            flat = flat[: into.sent_elements()]
        back_into = Message(out.comm, None, answers=0)
        if out.wants:
            assert out.request is not None
            back_into = Message(out.comm, out.peer, answers=out.request.sequence)
        result = _run_sendrecv(back_out, back_into, flat, landing)
        passed = None
        if ctx.wanted[1]:
            s, d, v = ctx.recv_meta
            passed = torch.zeros(s, dtype=d, device=v)
            # Nothing was received: the tensor is as it was, and so is its gradient.
            passed = gradient if into.peer is None else join(passed, [result])
        mine = result if ctx.wanted[0] else None
        return None, None, None, mine, passed, *[torch.zeros(0, device="cpu")] * ctx.anchors


_sendrecv = node(_Sendrecv)


def _run_sendrecv(
    out: Message, into: Message, sendtensor: torch.Tensor, recvtensor: torch.Tensor
) -> torch.Tensor:
    wants = torch.is_grad_enabled() and sendtensor.requires_grad
    carries = recvtensor.is_floating_point() or recvtensor.is_complex()
    if wants and not carries:
        raise RuntimeError(
            f"Sendrecv: sendtensor requires grad, but what is received ({recvtensor.dtype}) cannot "
            "carry a graph, so that its gradient could not come back; use Isend and Irecv, or pass "
            "sendtensor.detach()"
        )
    if needs_graph(sendtensor, recvtensor) or (carries and torch.is_grad_enabled()):
        chain = _chain(out, recvtensor)
        if chain is not None:
            anchors = [chain.tip]
        else:
            anchors = [] if wants or recvtensor.requires_grad else [anchor(out.tag is None)]
        target = recvtensor if into.peer is None else claim(recvtensor, "Sendrecv")
        result = _sendrecv(out, into, wants, sendtensor, target, *anchors)
        if chain is not None:
            chain.advance(result)
        return result
    return _Sendrecv.forward(out, into, wants, sendtensor, recvtensor)


def sendrecv(
    comm: mpi.Comm,
    sendtensor: torch.Tensor,
    dest: int | None,
    recvtensor: torch.Tensor,
    source: int | None,
    sendtag: int,
    recvtag: int,
) -> torch.Tensor:
    """Send to one rank and receive from another at once."""
    return _run_sendrecv(
        Message(comm, dest, sendtag), Message(comm, source, recvtag), sendtensor, recvtensor
    )
