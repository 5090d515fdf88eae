"""The adapters that come with mpicoll, registered like those of any other plugin."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..communicator import Communicator, as_communicator
from .specs import hookimpl

__all__ = ["mpicoll_adapt_joinable"]


@hookimpl(trylast=True)
def mpicoll_adapt_joinable(
    obj: Any, comm: Communicator | None, options: Mapping[str, Any]
) -> Communicator | None:
    """Whatever stands for a communicator elsewhere does so in ``Join``."""
    if obj is None:
        return None  # elsewhere the world; in a list of joinables, a slip
    try:
        return as_communicator("Join", obj)
    except TypeError:
        return None
