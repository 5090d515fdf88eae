from collections.abc import Sequence

import torch

from .mpi import Comm

def open_express(value: bool) -> None: ...
def express(c: Comm, what: int, tensor: object, op: int, root: int) -> torch.Tensor | None: ...
def direct(
    c: Comm, channel: int, what: int, tensor: torch.Tensor, op: int, root: int, reverse: bool
) -> torch.Tensor | None: ...
def elementwise(
    c: Comm,
    channel: int,
    what: int,
    x: torch.Tensor,
    y: torch.Tensor,
    op: int,
    root: int,
    reverse: bool = False,
) -> torch.Tensor: ...
def barrier(c: Comm, channel: int = 0) -> None: ...
def allgatherv(
    c: Comm, channel: int, x: torch.Tensor, y: torch.Tensor, counts: Sequence[int]
) -> torch.Tensor: ...
def gatherv(
    c: Comm, channel: int, x: torch.Tensor, y: torch.Tensor, counts: Sequence[int], root: int
) -> torch.Tensor: ...
def scatterv(
    c: Comm, channel: int, x: torch.Tensor, y: torch.Tensor, counts: Sequence[int], root: int
) -> torch.Tensor: ...
def alltoallv(
    c: Comm,
    channel: int,
    x: torch.Tensor,
    sendcounts: Sequence[int],
    y: torch.Tensor,
    recvcounts: Sequence[int],
    large: bool,
) -> torch.Tensor: ...
def reduce_scatter(
    c: Comm, channel: int, x: torch.Tensor, y: torch.Tensor, counts: Sequence[int], op: int
) -> torch.Tensor: ...
def exchange(c: Comm, send: Sequence[torch.Tensor], receive: Sequence[torch.Tensor]) -> None: ...
def agree(c: Comm, channel: int, numbers: tuple[int, ...]) -> list[tuple[int, ...]]: ...
def swap(c: Comm, channel: int, counts: Sequence[int]) -> list[int]: ...
def broadcast(c: Comm, channel: int, numbers: tuple[int, ...], root: int) -> tuple[int, ...]: ...
