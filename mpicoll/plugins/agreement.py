"""Whether all ranks have the same plugins: a row of fixed size first, the details if they differ.

Goes straight to the core, so that no observer sees it and no Join takes it over.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

import torch

from .._core import collectives, mpi
from ..dispatch import CONTROL
from ..errors import PluginError, PluginMismatchError

__all__ = ["compare"]


def compare(
    comm: mpi.Comm,
    plugins: Sequence[str] | None,
    chosen: Sequence[str],
    failure: BaseException | None = None,
) -> None:
    """Raise on all ranks unless all have the same `plugins` and `chosen`, and none a failure.

    `plugins` is None on a rank that could not load them.
    """
    told = "" if failure is None else f"{type(failure).__name__}: {failure}"
    details = json.dumps([plugins, list(chosen), told[:2000]]).encode()
    row = (len(details), int(failure is not None), *_digest(plugins), *_digest(chosen))
    rows = collectives.agree(comm, CONTROL, row)
    if not any(row[1] for row in rows) and len({row[2:] for row in rows}) == 1:
        return
    ranks = _exchange(comm, details, [row[0] for row in rows])
    message = _difference(comm, [r[0] for r in ranks], "their plugins", "none")
    if not message and not any(row[1] for row in rows):
        message = _difference(comm, [r[1] for r in ranks], "which plugins they use", "none")
    if message:
        raise PluginMismatchError(message) from failure
    if failure is not None:
        raise failure
    failures = [(r, text) for r, (_, _, text) in enumerate(ranks) if text]
    words = "; ".join(f"rank {r}: {text}" for r, text in failures)
    error = PluginError(
        f"Join on rank {comm.rank} of {comm.size}: another rank cannot start ({words})"
    )
    error.failures = failures
    raise error


def _digest(names: Sequence[str] | None) -> tuple[int, int]:
    """Two integers that differ where the names do, for all that can happen."""
    digest = hashlib.sha256(json.dumps(names and list(names)).encode()).digest()
    return (
        int.from_bytes(digest[:8], "little", signed=True),
        int.from_bytes(digest[8:16], "little", signed=True),
    )


def _exchange(comm: mpi.Comm, mine: bytes, sizes: Sequence[int]) -> list[list[Any]]:
    sent = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
    received = torch.empty(sum(sizes), dtype=torch.uint8)
    collectives.allgatherv(comm, CONTROL, sent, received, sizes)
    return [json.loads(bytes(part.tolist())) for part in received.split(list(sizes))]


def _difference(comm: mpi.Comm, ranks: Sequence[Sequence[str] | None], what: str, none: str) -> str:
    """What to say if the ranks' lists differ, as far as they are known; empty if they do not."""
    groups: dict[tuple[str, ...], list[int]] = {}
    for rank, names in enumerate(ranks):
        if names is not None:
            groups.setdefault(tuple(names), []).append(rank)
    if len(groups) <= 1:
        return ""
    parts = [
        f"{'rank' if len(who) == 1 else 'ranks'} {', '.join(map(str, who))}: "
        f"{', '.join(names) or none}"
        for names, who in groups.items()
    ]
    return (
        f"Join on rank {comm.rank} of {comm.size}: the ranks differ in {what} "
        f"({'; '.join(parts)}); install the same plugins for every rank, or set "
        "MPICOLL_DISABLE_PLUGINS or MPICOLL_PLUGINS on all of them alike"
    )
