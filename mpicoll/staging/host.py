"""Host memory that stands in for device memory, two chunks at a time."""

from __future__ import annotations

import torch

from .._core import mpi

__all__ = ["Pipeline", "piece_elements"]


def piece_elements(itemsize: int) -> int:
    """Elements in a piece; even, because (value, index) pairs are never cut apart."""
    chunk_bytes, count_limit = mpi.limits()
    return max(2, min(chunk_bytes // itemsize, count_limit) // 2 * 2)


class Pipeline:
    """Copies between one device and host buffers, in order, beside the computation.

    On CUDA the buffers are pinned and the copies run on a stream of their own: while MPI works on
    one chunk, the next is on its way. Elsewhere the copies are synchronous.

    Parameters
    ----------
    device
        The device of the tensors.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = None
        if device.type == "cuda":
            self.stream = torch.cuda.Stream(device)
            self.follow()

    def follow(self) -> None:
        """Let copies that start from now on come after the work queued so far."""
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream(self.device))

    def buffer(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """A host buffer, pinned where that speeds copies (torch recycles pinned memory)."""
        return torch.empty(count, dtype=dtype, device="cpu", pin_memory=self.stream is not None)

    def out(self, host: torch.Tensor, source: torch.Tensor) -> torch.cuda.Event | None:
        """Start to copy `source` to the host; give what it returns to :meth:`ready`."""
        if self.stream is None:
            host.copy_(source)
            return None
        with torch.cuda.stream(self.stream):
            host.copy_(source, non_blocking=True)
            source.record_stream(self.stream)
            return self.stream.record_event()

    def ready(self, event: torch.cuda.Event | None) -> None:
        """Wait until a copy to the host has arrived."""
        if event is not None:
            event.synchronize()

    def back(self, target: torch.Tensor, host: torch.Tensor) -> None:
        """Start to copy `host` to the device."""
        if self.stream is None:
            target.copy_(host)
            return
        with torch.cuda.stream(self.stream):
            target.copy_(host, non_blocking=True)
            target.record_stream(self.stream)

    def settle(self) -> None:
        """Wait until no copy uses a host buffer any more."""
        if self.stream is not None:
            self.stream.synchronize()

    def drained(self) -> None:
        """Let work that is queued from now on see the copies; let host buffers go."""
        if self.stream is not None:
            torch.cuda.current_stream(self.device).wait_stream(self.stream)
            self.stream.synchronize()
