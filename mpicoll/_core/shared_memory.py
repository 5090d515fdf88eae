"""Memory that all ranks of a communicator map, where they are on one node."""

from __future__ import annotations

import contextlib
import os
import tempfile
from typing import TYPE_CHECKING

from .mpi import Segment, shared_ranks, shared_size

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["segment"]

#: Where files are memory, and those of this node only. (A file elsewhere may be on a disk that
#: other nodes mount.)
FOLDER = "/dev/shm"


def segment(comm: MPI.Comm, limit: int) -> tuple[Segment, int] | None:
    """Map one segment on every rank of `comm`. Collective.

    Parameters
    ----------
    comm
        Where the ranks agree on it.
    limit
        The longest message, in bytes, that this rank wants to travel through it; 0: none.

    Returns
    -------
    tuple or None
        The segment, all zeros, and the smallest `limit` of all ranks. None, on all ranks: one
        wants none or cannot have it, the ranks are not on one node, or they are too many.

    Notes
    -----
    A plain file, unlinked as soon as all have mapped it, leaves nothing behind when a job is
    killed. ``MPI_Win_allocate_shared`` would tie the memory to a window that Open MPI 5 takes a
    millisecond to make.
    """
    if not 1 < comm.size <= shared_ranks():
        return None
    limit = min(comm.allgather(limit if os.path.isdir(FOLDER) else 0))
    if limit <= 0:
        return None
    size = shared_size(comm.size, limit)
    memory = path = None
    try:
        if comm.rank == 0:
            with contextlib.suppress(OSError):  # full, or not ours to write: the others are told
                descriptor, path = tempfile.mkstemp(prefix="mpicoll-", dir=FOLDER)
                memory = _mapped(descriptor, size, new=True)
        told = comm.bcast(path if memory is not None else None)
        if comm.rank and told is not None:
            with contextlib.suppress(OSError):  # another node, or another container
                memory = _mapped(os.open(told, os.O_RDWR), size, new=False)
        everywhere = all(comm.allgather(memory is not None))
    finally:
        if path is not None:
            os.unlink(path)
    return (memory, limit) if everywhere and memory is not None else None


def _mapped(descriptor: int, size: int, *, new: bool) -> Segment:
    try:
        if new:
            os.posix_fallocate(descriptor, 0, size)  # where room is short it fails here, not later
        elif os.fstat(descriptor).st_size != size:
            raise OSError("another file of this name")
        return Segment(descriptor, size)
    finally:
        os.close(descriptor)
