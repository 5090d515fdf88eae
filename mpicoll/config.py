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
    shared_bytes
        ``MPICOLL_SHARED_BYTES``: the longest message, in bytes, that travels through memory which
        the ranks of a node share, not through MPI (0: none does). The smallest of all ranks counts.
    abort_on_error
        ``MPICOLL_ABORT_ON_ERROR``: whether a failure that nobody caught on one rank ends the job
        (1, the default) or only this rank (0).
    disabled_plugins
        ``MPICOLL_DISABLE_PLUGINS``: entry-point or distribution names, separated by commas, of
        plugins that are not imported; ``all`` for every installed one.
    allowed_plugins
        ``MPICOLL_PLUGINS``: the only plugins that are imported, by the same names; None (not set):
        all that are installed.
    plugin_errors
        ``MPICOLL_PLUGIN_ERRORS``: ``"raise"`` (the default) or ``"warn"`` when a plugin cannot be
        loaded.
    """

    cuda_aware: bool | None = None
    chunk_bytes: int | None = None
    pool_bytes: int | None = None
    shared_bytes: int = 4096
    abort_on_error: bool = True
    disabled_plugins: tuple[str, ...] = ()
    allowed_plugins: tuple[str, ...] | None = None
    plugin_errors: str = "raise"


def read(environ: os._Environ[str] | dict[str, str] = os.environ) -> Settings:
    """Read the settings from `environ`.

    Raises
    ------
    ValueError
        A variable has a value that means nothing; the message names both.
    """
    aware = _switch("MPICOLL_CUDA_AWARE", environ)
    aborts = _switch("MPICOLL_ABORT_ON_ERROR", environ)
    chunk = environ.get("MPICOLL_CHUNK_BYTES")
    if chunk and not (chunk.isdigit() and int(chunk) >= 1024):
        raise ValueError(
            f"MPICOLL_CHUNK_BYTES is {chunk!r}; it must be a whole number of bytes, at least 1024"
        )
    pool = _whole("MPICOLL_POOL_BYTES", environ)
    shared = _whole("MPICOLL_SHARED_BYTES", environ)
    errors = environ.get("MPICOLL_PLUGIN_ERRORS") or "raise"
    if errors not in ("raise", "warn"):
        raise ValueError(f"MPICOLL_PLUGIN_ERRORS is {errors!r}; it must be raise or warn")
    allowed = environ.get("MPICOLL_PLUGINS")
    return Settings(
        cuda_aware=aware,
        chunk_bytes=int(chunk) if chunk else None,
        pool_bytes=pool,
        shared_bytes=Settings.shared_bytes if shared is None else shared,
        abort_on_error=Settings.abort_on_error if aborts is None else aborts,
        disabled_plugins=_names(environ.get("MPICOLL_DISABLE_PLUGINS", "")),
        allowed_plugins=None if allowed is None else _names(allowed),
        plugin_errors=errors,
    )


def _switch(name: str, environ: os._Environ[str] | dict[str, str]) -> bool | None:
    text = environ.get(name)
    if text not in (None, "", "0", "1"):
        raise ValueError(f"{name} is {text!r}; it must be 0 or 1")
    return text == "1" if text else None


def _whole(name: str, environ: os._Environ[str] | dict[str, str]) -> int | None:
    text = environ.get(name)
    if text and not text.isdigit():
        raise ValueError(f"{name} is {text!r}; it must be a whole number of bytes")
    return int(text) if text else None


def _names(text: str) -> tuple[str, ...]:
    return tuple(name for name in (part.strip() for part in text.split(",")) if name)
