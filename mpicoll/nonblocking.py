"""Collectives that go on while the program computes: stage in, start; test or wait, stage out.

A :class:`Pending` holds the tensor and host memory until MPI is done with them.
"""

from __future__ import annotations

import torch

from . import watch
from ._core import nonblocking
from .dispatch import Call
from .staging import Pipeline, contiguous

__all__ = ["Pending"]


class Pending:
    """An all-reduce in flight, in place.

    It has started once :meth:`launch` has returned True; :meth:`wait` starts it, too. Those of one
    communicator are to be started in the same order on every rank.

    Parameters
    ----------
    call
        The operation: an Allreduce on a communicator on which no other collective uses the channel
        `second`. ``present`` are the ranks whose tensors count (the others give the neutral
        element): AVG divides by their number.
    tensor
        Same shape and dtype on every rank; overwritten with the result when :meth:`wait` returns.
        On a device it is staged through the host.
    second
        The channel of the second message where there is one; see the core.
    """

    def __init__(self, call: Call, tensor: torch.Tensor, second: int) -> None:
        self.call = call
        self.second = second
        self.target = tensor.detach()
        self.request: nonblocking.CollectiveRequest | None = None
        self.done = False
        self._told: tuple[watch.Event, tuple[watch.Observer, ...]] | None = None
        self._pipeline: Pipeline | None = None
        self._arriving: torch.cuda.Event | None = None
        if tensor.device.type == "cpu":  # the core adds and divides in host memory
            self.buffer = contiguous(self.target)
            return
        source = contiguous(self.target)
        self._pipeline = Pipeline(tensor.device)
        self.buffer = self._pipeline.buffer(source.numel(), source.dtype)
        self._arriving = self._pipeline.out(self.buffer, source.view(-1))

    def launch(self, block: bool = False) -> bool:
        """Start, unless the copy to the host is still on its way and `block` is False."""
        if self.request is not None:
            return True
        if self._arriving is not None:
            if not block and not self._arriving.query():
                return False
            assert self._pipeline is not None
            self._pipeline.ready(self._arriving)
        call = self.call
        assert call.op is not None
        if watch.on:
            watch.require_unobserved()
            way = "backward" if call.channel else "forward"
            name = call.operation.name
            self._told = watch.begin(name, way, call.comm, [self.target], None, call.op.name)
        try:
            self.request = nonblocking.iallreduce(
                call.comm, call.channel, self.second, self.buffer, self.buffer, int(call.op),
                call.present,
            )  # fmt: skip
        except BaseException as error:
            self._tell(error)
            raise
        return True

    def test(self) -> bool:
        """Whether the result has arrived; lets MPI make progress."""
        return self.done or (self.launch() and self.request is not None and self.request.test())

    def wait(self) -> torch.Tensor:
        """The tensor, with the result in it."""
        if self.done:
            return self.target
        self.launch(block=True)
        assert self.request is not None
        try:
            self.request.wait()
        except BaseException as error:
            self._tell(error)
            raise
        self.done = True
        self._tell(None)
        if self._pipeline is not None:
            result = self.buffer.view(self.target.shape)
            self._pipeline.follow()
            self._pipeline.back(self.target, result)
            self._pipeline.drained()
        elif self.buffer is not self.target:
            self.target.copy_(self.buffer)
        return self.target

    def _tell(self, error: BaseException | None) -> None:
        if self._told is not None:
            watch.end(self._told, error)
            self._told = None
