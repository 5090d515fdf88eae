from collections.abc import Sequence

import torch

from .mpi import Comm

def in_flight() -> list[CollectiveRequest]: ...
def reap() -> None: ...
def iallreduce(
    c: Comm,
    channel: int,
    second: int,
    x: torch.Tensor,
    y: torch.Tensor,
    op: int,
    present: Sequence[int] | None = None,
) -> CollectiveRequest: ...

class CollectiveRequest:
    @property
    def comm(self) -> Comm: ...
    @property
    def done(self) -> bool: ...
    def wait(self) -> None: ...
    def test(self) -> bool: ...
