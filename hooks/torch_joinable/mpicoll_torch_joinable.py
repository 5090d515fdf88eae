"""Makes torch's own joinables, optimizers, and whatever has a ``step()`` joinable for mpicoll.

* ``DistributedDataParallel`` keeps its own protocol on its own process group; mpicoll only tells
  the ranks that have run out when there is something to answer. ``ZeroRedundancyOptimizer``
  likewise.
* An optimizer of ``torch.optim`` steps locally: a rank that has run out does nothing, and takes
  parameters and state of a rank that has not, in the end.
* Any other object with a ``step()`` is stepped in every iteration that another rank does, because
  its step may communicate.
"""

from __future__ import annotations

import abc
import functools
import io
from collections.abc import Callable, Mapping
from importlib.metadata import version
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Joinable as TorchJoinable
from torch.distributed.algorithms.join import JoinHook as TorchJoinHook
from torch.distributed.algorithms.join import _JoinConfig
from torch.nn.parallel import DistributedDataParallel

import mpicoll
from mpicoll.algorithms import Join, Joinable, JoinHook

__all__ = ["Adapter", "LocalOptimizer", "Stepper", "TorchAdapter"]

mpicoll_hook_api = 1


class Adapter(Joinable):
    """Stands for an object of torch in a Join.

    Parameters
    ----------
    obj
        The object.
    comm
        The communicator of the Join; None: the world.
    """

    def __init__(self, obj: Any, comm: mpicoll.Communicator | None) -> None:
        super().__init__()
        self.obj = obj
        self.comm = mpicoll.COMM_WORLD if comm is None else comm
        self._undo: list[Callable[[], object]] = []

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """Change the object for the time of the context, and give the hook."""
        self._undo.append(_before_iteration(self.obj, self._announce))
        return self.hook(**kwargs)

    @abc.abstractmethod
    def hook(self, **kwargs: Any) -> JoinHook:
        """What a rank that has run out does for the object."""

    def leave(self) -> None:
        """Take back what :meth:`join_hook` has changed."""
        while self._undo:
            self._undo.pop()()

    def _announce(self, *_: Any) -> None:
        Join.notify_join_context(self)

    @property
    def join_device(self) -> torch.device:
        """The device of the first parameter; the host for an object without."""
        return next((p.device for p in _parameters(self.obj)), torch.device("cpu"))

    @property
    def join_process_group(self) -> mpicoll.Communicator:
        """The communicator of the Join."""
        return self.comm


class TorchAdapter(Adapter):
    """A joinable of torch: its own hooks do the work, on its own process group."""

    def hook(self, **kwargs: Any) -> JoinHook:
        """The hook of the object, called by mpicoll."""
        counts = isinstance(self.obj, DistributedDataParallel)
        before = self.obj._join_config
        self._undo.append(lambda: setattr(self.obj, "_join_config", before))
        # "First" makes DistributedDataParallel count the active ranks for its divisor, in forward.
        self.obj._join_config = _JoinConfig(
            enable=True, throw_on_early_termination=False, is_first_joinable=counts
        )
        return _TorchHook(self.obj, self.obj.join_hook(**kwargs), counts=counts)

    @property
    def join_device(self) -> torch.device:
        """What the object says."""
        return self.obj.join_device


class _TorchHook(JoinHook):
    def __init__(self, obj: TorchJoinable, hook: TorchJoinHook, counts: bool) -> None:
        self.obj, self.hook, self.counts = obj, hook, counts

    def main_hook(self) -> None:
        if self.counts:
            gone = torch.zeros(1, device=self.obj.join_device)
            dist.all_reduce(gone, group=self.obj.join_process_group)
        self.hook.main_hook()

    def post_hook(self, is_last_joiner: bool) -> None:
        self.hook.post_hook(is_last_joiner)


class LocalOptimizer(Adapter):
    """An optimizer whose step does not communicate."""

    def hook(self, **kwargs: Any) -> JoinHook:
        """Nothing while others go on; their parameters and state in the end."""
        return _LocalHook(self)


class _LocalHook(JoinHook):
    def __init__(self, adapter: LocalOptimizer) -> None:
        self.adapter = adapter

    def post_hook(self, is_last_joiner: bool) -> None:
        comm, optimizer = self.adapter.comm, self.adapter.obj
        mine = torch.tensor(comm.rank if is_last_joiner else -1)
        root = int(comm.Allreduce(mine, mpicoll.MPI_MAX))
        with torch.no_grad():
            for parameter in _parameters(optimizer):
                comm.Bcast_(parameter, root)
        packed = io.BytesIO()
        if comm.rank == root:
            torch.save(optimizer.state_dict(), packed)
        sent = comm.to_mpi4py().bcast(packed.getvalue(), root)
        if comm.rank != root:
            # Written by a rank of this very job. Onto the host first: its devices are not ours.
            state = torch.load(io.BytesIO(sent), map_location="cpu", weights_only=False)
            optimizer.load_state_dict(state)


class Stepper(Adapter):
    """Something whose ``step()`` may communicate."""

    def hook(self, **kwargs: Any) -> JoinHook:
        """One step for every iteration of another rank."""
        return _StepHook(self.obj)


class _StepHook(JoinHook):
    def __init__(self, obj: Any) -> None:
        self.obj = obj

    def main_hook(self) -> None:
        self.obj.step()


def _parameters(obj: Any) -> list[torch.Tensor]:
    groups = getattr(obj, "param_groups", ())
    return [p for group in groups for p in group["params"]]


def _before_iteration(obj: Any, announce: Callable[..., None]) -> Callable[[], object]:
    """Call `announce` before the object communicates; returns what takes that back."""
    if isinstance(obj, torch.nn.Module):
        return obj.register_forward_pre_hook(announce).remove
    if isinstance(obj, torch.optim.Optimizer):
        return obj.register_step_pre_hook(announce).remove
    step = obj.step

    @functools.wraps(step)
    def announced(*arguments: Any, **keywords: Any) -> Any:
        announce()
        return step(*arguments, **keywords)

    own = "step" in vars(obj)
    obj.step = announced
    return (lambda: setattr(obj, "step", step)) if own else (lambda: delattr(obj, "step"))


# ---------------------------------------------------------------- the hooks


@mpicoll.hookimpl
def mpicoll_adapt_joinable(
    obj: Any, comm: mpicoll.Communicator | None, options: Mapping[str, Any]
) -> Adapter | None:
    """Adapt joinables of torch, optimizers, and objects with a ``step()``."""
    if isinstance(obj, TorchJoinable):
        if not isinstance(obj, (torch.nn.Module, torch.optim.Optimizer)):
            return None  # nothing tells when it starts an iteration
        return TorchAdapter(obj, _communicator_like(obj.join_process_group, comm))
    if isinstance(obj, type) or not callable(getattr(obj, "step", None)):
        return None
    if isinstance(obj, torch.optim.Optimizer) and type(obj).__module__.startswith("torch.optim."):
        return LocalOptimizer(obj, comm)
    return Stepper(obj, comm)


@mpicoll.hookimpl
def mpicoll_join_finished(context: Join) -> None:
    """Leave the objects as they were."""
    _leave(context)


@mpicoll.hookimpl
def mpicoll_join_failed(context: Join) -> None:
    """Leave the objects as they were."""
    _leave(context)


@mpicoll.hookimpl
def mpicoll_plugin_info() -> dict[str, Any]:
    """The release of torch, whose joinables have no public interface of their own."""
    return {"torch": version("torch")}


def _leave(context: Join) -> None:
    for joinable in context.joinables:
        if isinstance(joinable, Adapter):
            joinable.leave()


_made: dict[tuple[int, ...], mpicoll.Communicator] = {}


def _communicator_like(group: Any, comm: mpicoll.Communicator | None) -> mpicoll.Communicator:
    """The communicator with the ranks of a process group, in their order."""
    world = mpicoll.COMM_WORLD
    ranks = tuple(dist.get_process_group_ranks(group))
    if dist.get_rank() != world.rank:
        raise ValueError(
            f"rank {dist.get_rank()} of torch.distributed is rank {world.rank} of the MPI world; "
            "pass rank=mpicoll.COMM_WORLD.rank to init_process_group"
        )
    if comm is None:
        comm = world if ranks == tuple(range(world.size)) else _made.get(ranks)
    if comm is None:
        from mpi4py import MPI

        members = MPI.COMM_WORLD.Get_group().Incl(ranks)
        comm = _made[ranks] = mpicoll.comm_from_mpi4py(MPI.COMM_WORLD.Create_group(members))
    if (comm.rank, comm.size) != (dist.get_rank(group), len(ranks)):
        raise ValueError(
            f"the process group has rank {dist.get_rank(group)} of {len(ranks)} here, the "
            f"communicator of the other joinables rank {comm.rank} of {comm.size}; all must have "
            "the same ranks in the same order"
        )
    return comm
