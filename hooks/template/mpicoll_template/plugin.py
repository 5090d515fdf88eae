"""The plugin: an adapter, a hook for every joinable, and two observers."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch

import mpicoll
from mpicoll.algorithms import Join, Joinable, JoinHook

from . import RunningMean

__all__: list[str] = []

#: The version of the hooks that this is written for.
mpicoll_hook_api = 1

logger = logging.getLogger("mpicoll_template")


# [adapter]
class JoinableMean(Joinable):
    """Stands for a RunningMean in a Join."""

    def __init__(self, mean: RunningMean) -> None:
        super().__init__()
        self.mean = mean

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """Called on entry: from now on, every update tells the other ranks."""
        self.mean.before_update.append(self.announce)
        return MeanHook(self.mean)

    def announce(self) -> None:
        """Say that this rank is about to communicate once more."""
        Join.notify_join_context(self)

    def leave(self) -> None:
        """Take back what :meth:`join_hook` has set."""
        if self.announce in self.mean.before_update:
            self.mean.before_update.remove(self.announce)

    @property
    def join_device(self) -> torch.device:
        """Where it communicates from."""
        return torch.device("cpu")

    @property
    def join_process_group(self) -> mpicoll.Communicator:
        """Where it communicates."""
        return self.mean.comm


class MeanHook(JoinHook):
    """What a rank does that has run out of inputs."""

    def __init__(self, mean: RunningMean) -> None:
        self.mean = mean

    def main_hook(self) -> None:
        """Answer the update of the other ranks with no numbers."""
        self.mean.update(torch.empty(0))


@mpicoll.hookimpl
def mpicoll_adapt_joinable(obj: Any) -> Joinable | None:
    """Take what we know; None leaves the rest to other plugins."""
    return JoinableMean(obj) if isinstance(obj, RunningMean) else None


# [end of adapter]


# [hooks]
class Countdown(JoinHook):
    """Says how long this rank waited."""

    def __init__(self, name: str) -> None:
        self.name, self.rounds = name, 0

    def main_hook(self) -> None:
        """Count; runs after the joinable's own main hook."""
        self.rounds += 1

    def post_hook(self, is_last_joiner: bool) -> None:
        """Report once all ranks are through."""
        logger.info("%s: answered %d updates", self.name, self.rounds)


@mpicoll.hookimpl
def mpicoll_join_hooks(joinable: Joinable, options: Mapping[str, Any]) -> JoinHook | None:
    """``Join(..., report="loss")`` adds a hook to every RunningMean."""
    if isinstance(joinable, JoinableMean) and "report" in options:
        return Countdown(options["report"])
    return None


# [end of hooks]


# [observers]
@mpicoll.hookimpl
def mpicoll_join_finished(context: Join, is_last_joiner: bool, shadowed: int) -> None:
    """Take back what the context has set, and say how uneven the inputs were."""
    leave(context)
    share = shadowed / max(context.iterations + shadowed, 1)
    logger.info("waited for others in %.0f %% of the iterations", 100 * share)


@mpicoll.hookimpl
def mpicoll_join_failed(context: Join) -> None:
    """Also after an error; an observer takes those arguments that it needs."""
    leave(context)


def leave(context: Join) -> None:
    """Let go of all that is ours."""
    for joinable in context.joinables:
        if isinstance(joinable, JoinableMean):
            joinable.leave()


# [end of observers]
