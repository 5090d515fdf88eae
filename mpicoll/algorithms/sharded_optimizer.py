"""The optimizer whose state is shared out over the ranks."""

from __future__ import annotations

import inspect
import io
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..arguments import as_root
from ..communicator import Communicator, as_communicator
from ..dispatch import CONTROL
from ..helpers import broadcast_tensors
from ..negotiate import agree_lists
from ..staging import Bucket, check_tensor, code_of, name_of, partition
from .join import Join
from .joinable import Joinable
from .member import MemberHook

__all__ = ["ZeroRedundancyOptimizer"]

_BUCKET_BYTES = 25 << 20
_STEP, _FAILED = "step", "step, in which another rank failed,"  # what the others hear
_DESCRIBED = 46  # numbers of the description of a group that travel with the first message


class ZeroRedundancyOptimizer(torch.optim.Optimizer, Joinable):
    """Share the state of an optimizer out over the ranks.

    Parameters
    ----------
    params
        Parameters, or groups of them, as for any optimizer; the same on every rank, on one device.
    optimizer_class
        The optimizer, which keeps the state of this rank's share and updates it. It must treat
        every element of a parameter group, or every parameter, by itself.
    comm
        The communicator; None: the world. Messages travel on a duplicate of it.
    **defaults
        What else `optimizer_class` takes; the same on every rank.

    Attributes
    ----------
    optim
        The optimizer of this rank's share.
    param_groups
        The groups with all parameters. What is changed here (by a scheduler, say) counts for the
        next step.

    Raises
    ------
    TypeError
        `optimizer_class` is no optimizer, or needs a closure.
    ValueError
        `params` is empty, or on several devices. The ranks' parameters differ: on all ranks.

    Notes
    -----
    Every parameter belongs to one rank: the largest first, always to the rank that has the least.
    :meth:`step` lets each rank update its own and then distributes them, so that all ranks have
    equal parameters. All ranks must have the same gradients, as with :class:`DataParallel`.

    Making the object, :meth:`step`, :meth:`add_param_group` and :meth:`consolidate_state_dict` are
    collective. If the step of a share fails on one rank, the others raise ``RuntimeError``.

    Within :class:`Join`, as a joinable, ranks that have run out of inputs go on to update their
    share. They get the gradients of it, and the options of the groups, from a rank that has not.

    **Cost** of a step: one all-gather of all parameters of a dtype, and two small messages.

    References
    ----------
    S. Rajbhandari et al., "ZeRO: Memory optimizations toward training trillion parameter models",
    2020. The interface and its meaning follow ``torch.distributed.optim.ZeroRedundancyOptimizer``.

    Examples
    --------
    >>> model = DataParallel(torch.nn.Linear(3, 1))
    >>> optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.01)
    >>> with Join([model, optimizer]):
    ...     for x, y in batches:  # more on one rank than on another
    ...         optimizer.zero_grad()
    ...         loss(model(x), y).backward()
    ...         optimizer.step()
    """

    def __init__(
        self,
        params: Any,
        optimizer_class: type[torch.optim.Optimizer],
        comm: Any = None,
        **defaults: Any,
    ) -> None:
        self._communicator = as_communicator("ZeroRedundancyOptimizer", comm)
        _check_class(optimizer_class)
        self._ready = False
        torch.optim.Optimizer.__init__(self, params, defaults)
        Joinable.__init__(self)
        everything = self._all()
        _check(everything)
        self._own = self._communicator._private("ZeroRedundancyOptimizer")
        self._load = [0] * self._own.size
        self._owner: dict[torch.Tensor, int] = {}
        self._consolidated: dict[str, Any] | None = None
        self._compare(self.param_groups)
        shares = [self._share(group) for group in self.param_groups]
        self.optim = optimizer_class(shares, **defaults)
        _copy_options(self.optim.param_groups, self.param_groups)  # what the class adds
        self._ready = True

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(
            "ZeroRedundancyOptimizer: the state is shared out over the ranks, so that one of them "
            "cannot copy or pickle it; use consolidate_state_dict() and state_dict()"
        )

    def _all(self) -> list[torch.Tensor]:
        return [p for group in self.param_groups for p in group["params"]]

    def _compare(self, groups: Sequence[dict[str, Any]]) -> None:
        """Raise on all ranks where their parameters differ."""
        numbers: list[int] = []
        for group in groups:
            numbers.append(len(group["params"]))
            for p in group["params"]:
                numbers += (code_of(p.dtype), p.dim(), *p.shape)
        own = self._own
        rows = agree_lists(own._comm, CONTROL, (len(groups),), numbers, _DESCRIBED)
        for r, row in enumerate(rows):
            if row != rows[0]:
                raise ValueError(
                    f"ZeroRedundancyOptimizer on rank {own.rank} of {own.size}: the ranks' "
                    f"parameters differ: rank 0 has {_words(*rows[0])}, rank {r} {_words(*row)}"
                )

    def _share(self, group: dict[str, Any]) -> dict[str, Any]:
        """Find an owner for every parameter of a group; the group with this rank's."""
        for p in sorted(group["params"], key=lambda p: -p.numel()):  # stable
            rank = min(range(self._own.size), key=self._load.__getitem__)
            self._owner[p] = rank
            self._load[rank] += p.numel() * p.element_size()
        mine = [p for p in group["params"] if self._owner[p] == self._own.rank]
        return {**group, "params": mine}

    # ------------------------------------------------------------ the interface of an optimizer

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters. Collective.

        Parameters
        ----------
        param_group
            As for any optimizer; the same on every rank.

        Raises
        ------
        ValueError
            The ranks' parameters differ: on all ranks.
        """
        super().add_param_group(param_group)
        if not self._ready:
            return  # Optimizer.__init__ calls this
        try:
            _check(self._all())
            self._compare(self.param_groups[-1:])
        except BaseException:
            del self.param_groups[-1]
            raise
        _copy_options(self.param_groups[:-1], self.optim.param_groups)
        self.optim.add_param_group(self._share(self.param_groups[-1]))
        _copy_options(self.optim.param_groups, self.param_groups)
        self._consolidated = None

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters. Collective.

        Parameters
        ----------
        closure
            Computes the loss again, on all ranks or none. It is called once, before the update.

        Returns
        -------
        object
            What `closure` returned; None without.

        Raises
        ------
        RuntimeError
            The step of another rank's share has failed. Or it is called within a :class:`Join`
            context on the same communicator that does not have this object among its joinables.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        Join._require_listed(self)
        Join.notify_join_context(self)
        told = Join._announce(self, _STEP)
        failed = self._update(None if told is None else told.present)
        if failed is not None:
            Join._announce(self, _FAILED)  # hears why, and raises
            raise RuntimeError(
                f"ZeroRedundancyOptimizer on rank {self._own.rank} of {self._own.size}: the step "
                f"of the share of rank {failed} failed; its parameters may have kept their values"
            )
        return loss

    @torch.no_grad()
    def _update(self, present: tuple[int, ...] | None) -> int | None:
        """Update this rank's share and exchange the results; `present`: see :class:`MemberHook`.

        Raises where this rank has failed, and returns the first other rank that has.
        """
        if present is not None and len(present) < self._own.size:
            self._inform(present)
        self._consolidated = None
        failure: Exception | None = None
        _copy_options(self.param_groups, self.optim.param_groups)
        try:
            if any(group["params"] for group in self.optim.param_groups):
                self.optim.step()
        except Exception as error:  # the others wait for this rank
            failure = error
        _copy_options(self.optim.param_groups, self.param_groups)
        own = self._own
        said = agree_lists(own._comm, CONTROL, (int(failure is not None),), (), 0)
        self._exchange()
        if failure is not None:
            raise failure
        return next((r for r, ((wrong,), _) in enumerate(said) if wrong), None)

    def _exchange(self) -> None:
        """Give all ranks the parameters as their owners have them."""
        own = self._own
        ordered = sorted(self._all(), key=self._owner.__getitem__)  # in blocks of the ranks; stable
        for members in partition(ordered, sum(self._load) + 1):
            some = [ordered[i] for i in members]
            mine = [p for p in some if self._owner[p] == own.rank]
            flat = Bucket(mine).gather(mine) if mine else some[0].detach().new_empty(0)
            pieces = own.Allgather(flat, 0).split([p.numel() for p in some])
            for p, piece in zip(some, pieces, strict=True):
                if self._owner[p] != own.rank:
                    p.copy_(piece.view(p.shape))

    def consolidate_state_dict(self, to: int = 0) -> None:
        """Collect the state of all shares on one rank. Collective.

        Parameters
        ----------
        to
            The rank on which :meth:`state_dict` then works, until the next step.

        Raises
        ------
        TypeError, ValueError
            `to` is no rank of the communicator.
        """
        own = self._own
        root = as_root("consolidate_state_dict", "to", to, own.size)
        _copy_options(self.param_groups, self.optim.param_groups)
        states = [
            (i, _on_host(self.optim.state[p]))
            for i, p in enumerate(self._all())
            if self._owner[p] == own.rank and p in self.optim.state
        ]
        mine = _to_bytes(states)
        sizes = agree_lists(own._comm, CONTROL, (len(mine),), (), 0)
        gathered = own.Gather(mine, 0, root)
        self._consolidated = None
        if own.rank != root:
            return
        state: dict[int, Any] = {}
        for part in gathered.split([n for (n,), _ in sizes]):
            state.update(_from_bytes(part))
        self._consolidated = {
            "state": dict(sorted(state.items())),
            "param_groups": self._packed_groups(),
        }

    def _packed_groups(self) -> list[dict[str, Any]]:
        packed, at = [], 0
        for group in self.param_groups:
            n = len(group["params"])
            packed.append({**group, "params": list(range(at, at + n))})
            at += n
        return packed

    def state_dict(self) -> dict[str, Any]:
        """The state of all shares, as `optimizer_class` alone would give it.

        Returns
        -------
        dict
            Its tensors are on the CPU.

        Raises
        ------
        RuntimeError
            :meth:`consolidate_state_dict` has not been called for this rank since the last step.
        """
        if self._consolidated is None:
            raise RuntimeError(
                f"ZeroRedundancyOptimizer on rank {self._own.rank} of {self._own.size}: the state "
                "is shared out over the ranks; call consolidate_state_dict(to=rank) on all of them "
                "first, and state_dict() on that rank, before the next step"
            )
        return self._consolidated

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load this rank's share of a whole state.

        Parameters
        ----------
        state_dict
            As :meth:`state_dict` gives it, here or of `optimizer_class` alone; the same on every
            rank.

        Raises
        ------
        ValueError
            Its groups or their sizes are others.
        """
        groups = state_dict["param_groups"]
        theirs = [len(group["params"]) for group in groups]
        ours = [len(group["params"]) for group in self.param_groups]
        if theirs != ours:
            raise ValueError(
                f"ZeroRedundancyOptimizer: the state is that of groups of {theirs} parameters, "
                f"here are groups of {ours}"
            )
        rank, state, shares, at = self._own.rank, {}, [], 0
        for group, loaded in zip(self.param_groups, groups, strict=True):
            mine: list[int] = []
            for p, key in zip(group["params"], loaded["params"], strict=True):
                if self._owner[p] == rank:
                    if key in state_dict["state"]:
                        state[at] = state_dict["state"][key]
                    mine.append(at)
                    at += 1
            shares.append({**loaded, "params": mine})
        self.optim.load_state_dict({"state": state, "param_groups": shares})
        _copy_options(self.optim.param_groups, self.param_groups)
        self._consolidated = None

    # ------------------------------------------------------------ within Join

    def join_hook(self, **kwargs: Any) -> MemberHook:
        """The hook that takes part in the steps of the others; see :class:`Joinable`.

        Parameters
        ----------
        **kwargs
            Ignored.

        Returns
        -------
        JoinHook
            Updates this rank's share.
        """
        return _Hook(self)

    @property
    def join_device(self) -> torch.device:
        """The device of the parameters."""
        return self._all()[0].device

    @property
    def join_process_group(self) -> Communicator:
        """The communicator that was given."""
        return self._communicator

    def _inform(self, present: tuple[int, ...]) -> None:
        """Give the ranks that have run out of inputs what the first of the others knows.

        Their own gradients are old (or not clipped, as those of the others may have been), and
        nobody has changed their learning rates.
        """
        own, root = self._own, present[0]
        absent = [p for p in self._all() if self._owner[p] not in present]
        told = None
        if own.rank == root:
            options = [_options(group) for group in self.param_groups]
            told = options, [p.grad is not None for p in absent]
        options, has = _share_object(own, told, root)
        grads = []
        for p, there in zip(absent, has, strict=True):
            if own.rank not in present:
                p.grad = torch.empty_like(p) if there else None
            if there:
                grads.append(p.grad if own.rank == root or own.rank not in present else None)
        with_grad = [p for p, there in zip(absent, has, strict=True) if there]
        # Ranks that have the gradient already receive it into nothing of theirs.
        received = [
            torch.empty_like(p) if grad is None else grad
            for p, grad in zip(with_grad, grads, strict=True)
        ]
        broadcast_tensors(own, received, root, _BUCKET_BYTES)
        if own.rank not in present:
            for group, values in zip(self.param_groups, options, strict=True):
                group.update(values)


class _Hook(MemberHook):
    def __init__(self, optimizer: ZeroRedundancyOptimizer) -> None:
        self.optimizer = optimizer

    def answer(self, action: str, present: tuple[int, ...]) -> bool:
        """Take part in a step of the others."""
        self.optimizer._update(present)  # of a failure elsewhere it hears in the next round
        return True


def _check_class(optimizer_class: Any) -> None:
    if not (
        isinstance(optimizer_class, type) and issubclass(optimizer_class, torch.optim.Optimizer)
    ):
        raise TypeError(
            "ZeroRedundancyOptimizer: optimizer_class must be a subclass of torch.optim.Optimizer, "
            f"not {optimizer_class!r}"
        )
    closure = inspect.signature(optimizer_class.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise TypeError(
            f"ZeroRedundancyOptimizer: {optimizer_class.__name__} evaluates a closure within its "
            "step and looks at all parameters together; it cannot be shared out"
        )


def _check(parameters: Sequence[torch.Tensor]) -> None:
    for i, p in enumerate(parameters):
        check_tensor("ZeroRedundancyOptimizer", f"parameter {i}", p)
    devices = {p.device for p in parameters}
    if len(devices) > 1:
        where = ", ".join(sorted(map(str, devices)))
        raise ValueError(
            f"ZeroRedundancyOptimizer: all parameters must be on one device, not on {where}"
        )


def _words(head: tuple[int, ...], numbers: Sequence[int]) -> str:
    groups, at = [], 0
    for _ in range(head[0]):
        count, at = numbers[at], at + 1
        words = []
        for _ in range(count):
            dtype, ndim = numbers[at : at + 2]
            at += 2 + ndim
            words.append(f"{name_of(dtype)} {tuple(numbers[at - ndim : at])}")
        groups.append(f"[{', '.join(words)}]")
    return " and ".join(groups)


def _options(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}


def _copy_options(source: Sequence[dict[str, Any]], target: Sequence[dict[str, Any]]) -> None:
    for one, other in zip(source, target, strict=True):
        other.update(_options(one))


def _on_host(thing: Any) -> Any:
    if isinstance(thing, torch.Tensor):
        return thing.detach().cpu()
    if isinstance(thing, dict):
        return {key: _on_host(value) for key, value in thing.items()}
    if isinstance(thing, (list, tuple)):
        return type(thing)(map(_on_host, thing))
    return thing


def _to_bytes(thing: Any) -> torch.Tensor:
    file = io.BytesIO()
    torch.save(thing, file)
    return torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8)


def _from_bytes(data: torch.Tensor) -> Any:
    # From a rank of the same program.
    return torch.load(io.BytesIO(data.numpy().tobytes()), map_location="cpu", weights_only=False)


def _share_object(comm: Communicator, thing: Any, root: int) -> Any:
    """The root's `thing`."""
    data = _to_bytes(thing) if comm.rank == root else torch.empty(0, dtype=torch.uint8)
    ((size,), _) = agree_lists(comm._comm, CONTROL, (len(data),), (), 0)[root]
    if comm.rank != root:
        data = torch.empty(size, dtype=torch.uint8)
    return _from_bytes(comm.Bcast_(data, root))
