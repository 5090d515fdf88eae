"""Many tensors as few: flat memory for tensors of one dtype and device, and who goes together."""

from __future__ import annotations

from collections.abc import Sequence

import torch

__all__ = ["Bucket", "partition"]


def partition(tensors: Sequence[torch.Tensor], limit: int) -> list[list[int]]:
    """Which of `tensors` go into one bucket: indices, in their order, of one dtype and device.

    A bucket holds at most `limit` bytes, or one tensor. The buckets are in the order in which
    their last tensors stand.
    """
    full: list[list[int]] = []
    filling: dict[tuple[torch.dtype, torch.device], tuple[list[int], int]] = {}
    for i, tensor in enumerate(tensors):
        kind = tensor.dtype, tensor.device
        nbytes = tensor.numel() * tensor.element_size()
        members, held = filling.get(kind, ([], 0))
        if members and held + nbytes > limit:
            full.append(members)
            members, held = [], 0
        filling[kind] = [*members, i], held + nbytes
    full += [members for members, _ in filling.values()]
    return sorted(full, key=lambda members: members[-1])


class Bucket:
    """Flat memory with a place for each of several tensors, and some more elements behind them.

    Parameters
    ----------
    tensors
        Of one dtype and device.
    more
        Elements behind their places.

    Attributes
    ----------
    flat
        All of it; the memory is not initialised.
    places
        A contiguous view of the shape of each tensor.
    rest
        The elements behind them.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], more: int = 0) -> None:
        sizes = [t.numel() for t in tensors]
        first = tensors[0]
        total = sum(sizes)
        self.flat = torch.empty(total + more, dtype=first.dtype, device=first.device)
        pieces = self.flat.split([*sizes, more])
        self.places = [piece.view(t.shape) for piece, t in zip(pieces, tensors, strict=False)]
        self.rest = pieces[-1]

    def gather(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Copy every tensor to its place; the flat memory."""
        for place, tensor in zip(self.places, tensors, strict=True):
            place.copy_(tensor)
        return self.flat

    def scatter(self, tensors: Sequence[torch.Tensor], before: torch.Tensor | None = None) -> None:
        """Copy to every tensor what is in its place.

        With `before`, the flat memory as it was, only where that has changed, bit for bit: a tensor
        that stays as it is keeps its version, and graphs that have saved it stay valid.
        """
        old = new = torch.empty(0)
        if before is not None:
            old, new = before.view(torch.uint8).cpu(), self.flat.view(torch.uint8).cpu()
        at = 0
        for place, tensor in zip(self.places, tensors, strict=True):
            nbytes = place.numel() * place.element_size()
            if before is None or not torch.equal(old[at : at + nbytes], new[at : at + nbytes]):
                tensor.copy_(place)
            at += nbytes
