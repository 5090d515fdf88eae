"""The settings: the only reader of ``MPICOLL_*`` environment variables."""

from __future__ import annotations

import os
from dataclasses import dataclass

__all__ = ["Settings", "read"]


@dataclass(frozen=True)
class Settings:
    """What the environment says.

    Attributes
    ----------
    cuda_aware
        ``MPICOLL_CUDA_AWARE``: True or False overrides what the MPI library says of itself.
    chunk_bytes
        ``MPICOLL_CHUNK_BYTES``: the longest piece, in bytes, that is reduced or staged through
        host memory at once. The same on every rank.
    pool_bytes
        ``MPICOLL_POOL_BYTES``: how many bytes of the memory of dead results are kept for new ones
        (512 MiB by default; 0: none).
    """

    cuda_aware: bool | None = None
    chunk_bytes: int | None = None
    pool_bytes: int | None = None


def read(environ: os._Environ[str] | dict[str, str] = os.environ) -> Settings:
    """Read the settings from `environ`.

    Raises
    ------
    ValueError
        A variable has a value that means nothing; the message names both.
    """
    aware = environ.get("MPICOLL_CUDA_AWARE")
    if aware not in (None, "", "0", "1"):
        raise ValueError(f"MPICOLL_CUDA_AWARE is {aware!r}; it must be 0 or 1")
    chunk = environ.get("MPICOLL_CHUNK_BYTES")
    if chunk and not (chunk.isdigit() and int(chunk) >= 1024):
        raise ValueError(
            f"MPICOLL_CHUNK_BYTES is {chunk!r}; it must be a whole number of bytes, at least 1024"
        )
    pool = environ.get("MPICOLL_POOL_BYTES")
    if pool and not pool.isdigit():
        raise ValueError(f"MPICOLL_POOL_BYTES is {pool!r}; it must be a whole number of bytes")
    return Settings(
        cuda_aware=None if not aware else aware == "1",
        chunk_bytes=int(chunk) if chunk else None,
        pool_bytes=int(pool) if pool else None,
    )
