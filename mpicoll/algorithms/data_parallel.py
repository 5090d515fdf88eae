"""The module wrapper for data-parallel training."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import weakref
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from ..arguments import as_numelem, check_reducible
from ..communicator import Communicator, as_communicator
from ..dispatch import BACKWARD, CONTROL, Call
from ..helpers import broadcast_tensors
from ..negotiate import agree_lists
from ..nonblocking import Pending
from ..ops import OPERATIONS, ReduceOp
from ..staging import Bucket, check_tensor, code_of, name_of, partition
from .join import Join
from .joinable import Joinable
from .member import Announced, MemberHook

__all__ = ["DataParallel"]

_BUCKET_BYTES = 25 << 20
# What the ranks that have run out of inputs hear; see _Hook.answer.
_FORWARD, _UNSYNCHRONIZED = "forward", "forward within no_sync()"
_BACKWARD, _END, _FAILED = "backward", "end of backward", "backward, in which a rank has failed,"
_DESCRIBED = 46  # numbers of the description of a module that travel with the first message


class _Pass:
    """One backward pass in which gradients are averaged.

    Parameters
    ----------
    members
        The parameters of each bucket, by number.
    own
        True if the engine calls the pass's end at the end of the pass; False if that may be the end
        of a pass inside it.
    """

    def __init__(self, members: Sequence[Sequence[int]], own: bool) -> None:
        self.own = own
        self.begun = False
        self.told: Announced | None = None
        self.ready: set[int] = set()
        self.missing = [len(some) for some in members]
        self.started: list[Pending] = []
        self.launched = self.arrived = 0  # of those


class DataParallel(torch.nn.Module, Joinable):
    """Wrap a module so that backward averages the gradients over the ranks.

    Parameters
    ----------
    module
        The module; the same structure on every rank. Its parameters and buffers take the values of
        rank 0. Parameters of any floating or complex dtype, all trained ones on one device.
    comm
        The communicator; None: the world. Messages travel on a duplicate of it.
    bucket_bytes
        Gradients are averaged in buckets of at most so many bytes, or of one parameter. The same on
        every rank.
    broadcast_buffers
        True: the buffers (running means, say) take the values of rank 0 at the start of every
        forward after which gradients are averaged; within :class:`Join` those of the highest rank
        that has inputs. The same on every rank.
    find_unused_parameters
        True: look through the graph after every forward for parameters that the outputs do not
        depend on, so that buckets with such parameters need not wait for the end of backward. The
        results are the same.

    Attributes
    ----------
    module
        The wrapped module. The keys of ``state_dict()`` start with ``module.``.
    require_backward_grad_sync
        False within :meth:`no_sync`.

    Raises
    ------
    TypeError, ValueError
        An argument is not what it must be; no parameter requires a gradient; trained parameters lie
        on several devices; an embedding has sparse gradients. The ranks' modules or arguments
        differ: ``ValueError`` on all ranks. The last can also be raised in backward
        (``TypeError``), by a gradient that is sparse or has changed its dtype or device.

    Notes
    -----
    After ``backward()`` every ``grad`` holds the mean over all ranks of what their ``grad`` would
    have been. Making the object is collective, and so is every ``backward()`` that reaches
    parameters; each rank's must reach one. The ranks may use different parameters: one that a rank
    has not used counts as zero there, and the ``grad`` of one that no rank has used stays what it
    is. float16 and bfloat16 are added in float32, in rank order, and rounded once.

    Buckets are filled in the reverse order of the parameters and sent in a fixed order while
    backward goes on, each as soon as it and those before it are complete.

    Forward without gradients (``torch.no_grad``) communicates nothing, and neither does backward
    through a forward in :meth:`no_sync`; the next backward outside adds what has gathered. Backward
    once more through the same graph averages, too, where it comes to the outputs. Where backward
    ends with an exception on one rank, the other ranks wait for this rank's next forward (or its
    end of the :class:`Join` context) and then raise ``RuntimeError``.

    Within :class:`Join`, as a joinable, ranks that have run out of inputs contribute zeros, also
    for what has gathered there within :meth:`no_sync`. ``divide_by_initial_world_size=False`` lets
    the mean be one over the others only; with the default, gradients to which several averaged
    passes add (no ``zero_grad()`` between them) shrink as ranks run out. In the end all ranks have
    the parameters and buffers of the highest rank that ran out last. A backward through several
    models must come to them in one order on all ranks; otherwise all raise
    :class:`CollectiveMismatchError`.

    The means cannot be differentiated. Parameters that `module` gets after it was wrapped are not
    seen; those that begin to require a gradient raise ``RuntimeError``.

    The messages are non-blocking. Libraries without a progress thread of their own go on with them
    when backward comes to the next parameter, which then takes longer.

    **Cost**: one all-reduce of each bucket, with one element more for each parameter, and for all
    buffers of a dtype one broadcast per forward.

    References
    ----------
    The interface and its meaning follow ``torch.nn.parallel.DistributedDataParallel``.

    Examples
    --------
    >>> model = DataParallel(torch.nn.Linear(3, 1))
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> with Join([model]):
    ...     for x, y in batches:  # more on one rank than on another
    ...         optimizer.zero_grad()
    ...         loss(model(x), y).backward()
    ...         optimizer.step()
    """

    def __init__(
        self,
        module: torch.nn.Module,
        comm: Any = None,
        *,
        bucket_bytes: int = _BUCKET_BYTES,
        broadcast_buffers: bool = True,
        find_unused_parameters: bool = False,
    ) -> None:
        super().__init__()
        Joinable.__init__(self)
        self._comm = as_communicator("DataParallel", comm)
        _check(module, bucket_bytes)
        self.module = module
        self.require_backward_grad_sync = True
        self.broadcast_buffers = bool(broadcast_buffers)
        self.find_unused_parameters = bool(find_unused_parameters)
        self._bucket_bytes = bucket_bytes
        self._attach()
        self._compare()
        self._broadcast_state(0)

    # ------------------------------------------------------------ construction

    def _attach(self) -> None:
        """Hook on to the parameters."""
        named = [(n, p) for n, p in self.module.named_parameters() if p.requires_grad]
        self._frozen = [(n, p) for n, p in self.module.named_parameters() if not p.requires_grad]
        # Backward reaches the last parameters first.
        self._names, self._trained = map(list, zip(*reversed(named), strict=True))
        self._arrange()
        self._private: Communicator | None = None
        self._pass: _Pass | None = None
        self._armed = False  # a forward has been made whose backward has not
        self._blind = False  # the outputs of the last forward could not be seen
        self._unused: set[int] | None = None
        me = weakref.ref(self)  # a parameter does not keep its wrapper
        for i, parameter in enumerate(self._trained):
            parameter.register_post_accumulate_grad_hook(functools.partial(_on_parameter, me, i))

    def _arrange(self) -> None:
        """Share the parameters out over buckets, which are made when they are first needed."""
        self._kinds = [(p.dtype, p.device) for p in self._trained]
        self._members = partition(self._trained, self._bucket_bytes)
        self._bucket_of = {i: k for k, some in enumerate(self._members) for i in some}
        self._buckets: list[Bucket] = []

    def __getstate__(self) -> dict[str, Any]:
        made = (
            "_frozen", "_names", "_trained", "_members", "_bucket_of", "_buckets", "_pass",
            "_armed", "_blind", "_unused", "_kinds", "_private",
        )  # fmt: skip
        return {name: value for name, value in self.__dict__.items() if name not in made}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._attach()

    @property
    def _own(self) -> Communicator:
        """The duplicate on which messages travel; a copy makes its own when it first needs it."""
        if self._private is None:
            self._private = self._comm._private("DataParallel")
        return self._private

    def _compare(self) -> None:
        """Raise on all ranks where their modules or arguments differ."""
        tensors = list(_named_state(self.module))
        numbers: list[int] = []
        for name, tensor in tensors:
            shape = tuple(tensor.shape)
            kind = code_of(tensor.dtype), int(tensor.requires_grad)
            numbers += (zlib.crc32(name.encode()), *kind, len(shape), *shape)
        options = (
            self._bucket_bytes, int(self.broadcast_buffers), int(self.find_unused_parameters),
        )  # fmt: skip
        head = (len(tensors), *options)
        rows = agree_lists(self._own._comm, CONTROL, head, numbers, _DESCRIBED)
        where = f"DataParallel on rank {self._own.rank} of {self._own.size}"
        words = ("bucket_bytes", "broadcast_buffers", "find_unused_parameters")
        for i, word in enumerate(words, 1):
            if len({told[i] for told, _ in rows}) > 1:
                values = ", ".join(f"rank {r}: {told[i]}" for r, (told, _) in enumerate(rows))
                raise ValueError(f"{where}: the ranks disagree on {word} ({values})")
        for r, (told, theirs) in enumerate(rows):
            if (told, theirs) == rows[0]:
                continue
            one, other = _described(rows[0][1]), _described(theirs)
            at = 0
            while at < min(len(one), len(other)) and one[at] == other[at]:
                at += 1
            name = repr(tensors[at][0]) if at < len(tensors) else "missing"
            raise ValueError(
                f"{where}: the ranks' modules differ: rank 0 has {len(one)} parameters and "
                f"buffers, rank {r} has {len(other)}; number {at} (here {name}) is "
                f"{_words(one, at)} on rank 0 and {_words(other, at, one)} on rank {r}"
            )

    def _broadcast_state(self, root: int) -> None:
        tensors = [tensor.detach() for _, tensor in _named_state(self.module)]
        broadcast_tensors(self._own, tensors, root, self._bucket_bytes)

    # ------------------------------------------------------------ the interface of torch

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Call the module.

        Parameters
        ----------
        *inputs, **kwargs
            The arguments of ``module``.

        Returns
        -------
        object
            What ``module`` returns.

        Raises
        ------
        RuntimeError
            A parameter requires a gradient that did not when the wrapper was made. Gradients are to
            be averaged within a :class:`Join` context on the same communicator that does not have
            this object among its joinables.
        """
        synchronizes = torch.is_grad_enabled() and self.require_backward_grad_sync
        if torch.is_grad_enabled():
            self._before_forward(synchronizes)
        output = self.module(*inputs, **kwargs)
        if synchronizes:
            self._after_forward(output)
        return output

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """A context in which gradients gather on each rank, to be averaged later.

        Notes
        -----
        What counts is where *forward* is called. All ranks must do the same. The first backward
        through a forward outside averages what has gathered since.

        Examples
        --------
        >>> with model.no_sync():
        ...     loss(model(x[0]), y[0]).backward()
        >>> loss(model(x[1]), y[1]).backward()  # averages both
        """
        before = self.require_backward_grad_sync
        self.require_backward_grad_sync = False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    def join_hook(self, **kwargs: Any) -> MemberHook:
        """The hook that answers the messages of this model; see :class:`Joinable`.

        Parameters
        ----------
        **kwargs
            ``divide_by_initial_world_size`` (True by default): the mean is one over all ranks, also
            when some have run out of inputs.

        Returns
        -------
        JoinHook
            Contributes zeros. At the end it makes the ranks' parameters and buffers equal.
        """
        return _Hook(self, kwargs)

    @property
    def join_device(self) -> torch.device:
        """The device of the trained parameters."""
        return self._trained[0].device

    @property
    def join_process_group(self) -> Communicator:
        """The communicator that was given."""
        return self._comm

    # ------------------------------------------------------------ forward

    def _before_forward(self, synchronizes: bool) -> None:
        for name, parameter in self._frozen:
            if parameter.requires_grad:
                raise RuntimeError(
                    f"DataParallel: parameter {name!r} requires a gradient now, but did not when "
                    "the wrapper was made; make a new one"
                )
        if [(p.dtype, p.device) for p in self._trained] != self._kinds:
            self._arrange()  # the module has been moved, on all ranks
        if synchronizes:
            Join._require_listed(self)
        Join.notify_join_context(self)
        told = Join._announce(self, _FORWARD if synchronizes else _UNSYNCHRONIZED)
        if self._pass is not None and torch._C._current_graph_task_id() < 0:
            # Where that has been announced, the others have heard of what had begun only.
            self._release(told is None)
        if synchronizes:
            self._broadcast_buffers(0 if told is None else told.present[-1])

    def _broadcast_buffers(self, root: int) -> None:
        buffers = [buffer.detach() for buffer in self.module.buffers()]
        if self.broadcast_buffers and buffers:
            broadcast_tensors(self._own, buffers, root, self._bucket_bytes, if_changed=True)

    def _after_forward(self, output: Any) -> None:
        """Expect a backward pass, and know it when it comes to the outputs."""
        self._armed = True
        found = [t for t in _tensors(output) if t.requires_grad]
        me = weakref.ref(self)
        for tensor in found:
            if tensor.grad_fn is not None:  # a hook of a leaf would stay
                tensor.register_hook(functools.partial(_on_output, me))
        self._blind = not found or any(t.grad_fn is None for t in found)
        if self.find_unused_parameters and found:
            used = _reached(found)
            unused = {i for i, p in enumerate(self._trained) if id(p) not in used}
            self._unused = unused if self._unused is None else self._unused & unused

    # ------------------------------------------------------------ backward

    def _open(self, own: bool) -> _Pass:
        """A backward pass has come to this module."""
        self._pass = this = _Pass(self._members, own)
        self._call_at_the_end(this)
        return this

    def _call_at_the_end(self, this: _Pass) -> None:
        torch.autograd.Variable._execution_engine.queue_callback(lambda: self._end(this))

    def _saw(self, i: int) -> None:
        """The gradient of a parameter has been accumulated."""
        this = self._pass
        if this is None:
            if not self._armed:
                # Not a pass of this module; or one, from the same forward as the one before, that
                # has not come to its outputs yet: the gradient is then sent at the end.
                return
            this = self._open(own=False)
        self._mark(this, i)

    @torch.no_grad()
    def _mark(self, this: _Pass, i: int) -> None:
        if not this.begun:
            self._begin(this)
        k = self._bucket_of[i]
        if k < len(this.started):
            raise RuntimeError(
                f"DataParallel: the gradient of parameter {self._names[i]!r} has changed after it "
                "was sent to the other ranks: backward came to it twice (with reentrant "
                "checkpoints; give them use_reentrant=False), or with find_unused_parameters=True "
                "it is used by something that the outputs of forward do not show"
            )
        self._expect_no_more(this, i)
        self._advance(this)

    def _begin(self, this: _Pass) -> None:
        try:
            Join._require_listed(self)
            this.told = Join._announce(self, _BACKWARD)
        except BaseException:
            self._pass = None  # all ranks raise; nothing has been sent
            raise
        this.begun = True
        for i in self._unused or ():
            self._expect_no_more(this, i)
        self._unused = None

    def _expect_no_more(self, this: _Pass, i: int) -> None:
        if i not in this.ready:
            this.ready.add(i)
            this.missing[self._bucket_of[i]] -= 1

    def _advance(self, this: _Pass) -> None:
        """Start what is complete, in order, and let MPI make progress with what has started."""
        while len(this.started) < len(this.missing) and not this.missing[len(this.started)]:
            self._start(this)
        while this.launched < len(this.started) and this.started[this.launched].launch():
            this.launched += 1
        while this.arrived < this.launched and this.started[this.arrived].test():
            this.arrived += 1

    def _start(self, this: _Pass, failed: bool = False) -> None:
        """Average the next bucket."""
        bucket = self._bucket(len(this.started))
        used = []
        for i, place in zip(self._members[len(this.started)], bucket.places, strict=True):
            grad = self._trained[i].grad
            counts = grad is not None and not failed
            used.append(float(counts))
            if grad is None or not counts:
                place.zero_()
                continue
            if (
                grad.layout is not torch.strided
                or grad.dtype != place.dtype
                or grad.device != place.device
            ):
                raise TypeError(
                    f"DataParallel: the gradient of parameter {self._names[i]!r} is {grad.layout}, "
                    f"{grad.dtype}, on {grad.device}; expected is torch.strided, {place.dtype}, on "
                    f"{place.device}"
                )
            place.copy_(grad)
        bucket.rest.copy_(torch.tensor([*used, float(failed)], dtype=bucket.rest.dtype))
        this.started.append(self._average(bucket, this.told))

    def _start_the_rest(self, this: _Pass, failed: bool = False) -> None:
        while len(this.started) < len(self._members):
            self._start(this, failed)
        for pending in this.started[this.launched :]:
            pending.launch(block=True)

    def _bucket(self, k: int) -> Bucket:
        if not self._buckets:  # at first use: as many elements more as parameters, and one
            self._buckets = [
                Bucket([self._trained[i] for i in some], len(some) + 1) for some in self._members
            ]
        return self._buckets[k]

    def _average(self, bucket: Bucket, told: Announced | None) -> Pending:
        present = None
        if told is not None and not told.options.get("divide_by_initial_world_size", True):
            present = told.present
        call = Call(
            OPERATIONS["Allreduce"], self._own._comm, channel=BACKWARD, op=ReduceOp.AVG,
            present=present,
        )  # fmt: skip
        return Pending(call, bucket.flat, CONTROL)

    @torch.no_grad()
    def _end(self, this: _Pass) -> None:
        """The engine has come to the end of a pass."""
        if self._pass is not this:
            return
        node = torch._C._current_autograd_node()
        if node is not None and not this.own:
            # The end of a pass within a node (a reentrant checkpoint): wait for that of the outer.

            def after_the_node(*_: Any) -> None:
                handle.remove()
                self._call_at_the_end(this)

            handle = node.register_hook(after_the_node)
            return
        if not this.begun:  # torch.autograd.grad: no parameter was to get a gradient
            self._pass = None
            return
        self._start_the_rest(this)
        # Later: another model may have come to the end of the same pass, which must start all of
        # its messages, too, before anyone waits.
        engine = torch.autograd.Variable._execution_engine
        engine.queue_callback(lambda: self._finish(this))

    @torch.no_grad()
    def _finish(self, this: _Pass) -> None:
        """Everything has been sent."""
        if self._pass is not this:
            return
        Join._announce(self, _END)
        self._pass, self._armed = None, self._blind
        if self._collect(this.started):
            return
        Join._announce(self, _FAILED)  # hears why, and raises
        raise RuntimeError(
            f"DataParallel on rank {self._own.rank} of {self._own.size}: backward failed on "
            "another rank; the gradients have not been averaged"
        )

    def _collect(self, started: Sequence[Pending], alone: bool = True) -> bool:
        """Wait for the means and make them the gradients; False where a rank has failed.

        `alone` is False on a rank that has run out of inputs: its gradients are old.
        """
        for pending in started:
            pending.wait()
        counts = [bucket.rest.cpu().tolist() for bucket in self._buckets]
        if any(count[-1] != 0 for count in counts):
            return False
        for some, bucket, count in zip(self._members, self._buckets, counts, strict=True):
            for i, place, used in zip(some, bucket.places, count, strict=False):
                parameter = self._trained[i]
                if used == 0:
                    if not alone:
                        parameter.grad = None
                elif parameter.grad is None:
                    parameter.grad = torch.empty_like(parameter).copy_(place)
                else:
                    parameter.grad.copy_(place)
        return True

    @torch.no_grad()
    def _release(self, always: bool) -> None:
        """The last backward ended with an exception: complete the messages that others wait for.

        With `always`, also those of a pass in which this rank had sent nothing yet.
        """
        this, self._pass = self._pass, None
        self._armed, self._unused = False, None
        if this is None or not (this.begun or always):
            return
        self._start_the_rest(this, failed=True)
        for pending in this.started:
            pending.wait()

    # ------------------------------------------------------------ within Join

    @torch.no_grad()
    def _start_with_zeros(self, told: Announced) -> list[Pending]:
        """Take part in the averages with nothing."""
        started = []
        for k in range(len(self._members)):
            bucket = self._bucket(k)
            bucket.flat.zero_()
            started.append(self._average(bucket, told))
        for pending in started:
            pending.launch(block=True)
        return started

    def _make_equal(self, is_last_joiner: bool) -> None:
        own = self._own
        said = agree_lists(own._comm, CONTROL, (int(is_last_joiner),), (), 0)
        last = max(r for r, ((mine,), _) in enumerate(said) if mine)
        self._broadcast_state(last)


class _Hook(MemberHook):
    def __init__(self, model: DataParallel, options: Mapping[str, Any]) -> None:
        self.model = model
        self.options = options
        self.own = model._own  # of a copy: made here, by all ranks
        self.started: list[Pending] = []

    def answer(self, action: str, present: tuple[int, ...]) -> bool:
        """Take part in a forward or a backward of the others."""
        if action == _BACKWARD:
            # Nobody waits for a message before the end, since another model may come in between.
            self.started = self.model._start_with_zeros(Announced(present, self.options))
            return False
        with torch.no_grad():
            started, self.started = self.started, []
            if started:  # of a failure it hears in the next round
                self.model._collect(started, alone=False)
        if action == _FORWARD:
            self.model._broadcast_buffers(present[-1])
        return action in (_UNSYNCHRONIZED, _END)

    def abandon(self) -> None:
        """Complete the messages of a backward that will not come to its end."""
        self.model._release(always=False)
        for pending in self.started:
            pending.wait()
        self.started = []

    def post_hook(self, is_last_joiner: bool) -> None:
        """Make the ranks' parameters and buffers equal."""
        self.model._make_equal(is_last_joiner)


def _on_parameter(me: weakref.ref[DataParallel], i: int, _parameter: torch.Tensor) -> None:
    model = me()
    if model is not None:
        model._saw(i)


def _on_output(me: weakref.ref[DataParallel], _gradient: torch.Tensor) -> None:
    model = me()
    if model is not None and model._pass is None:
        model._open(own=True)


def _check(module: Any, bucket_bytes: Any) -> None:
    """Raise on this rank where the arguments cannot be right."""
    if not isinstance(module, torch.nn.Module):
        raise TypeError(
            f"DataParallel: module must be a torch.nn.Module, not {type(module).__name__}"
        )
    if as_numelem("DataParallel", "bucket_bytes", bucket_bytes) == 0:
        raise ValueError("DataParallel: bucket_bytes is 0; it must be at least 1")
    for name, part in module.named_modules():
        if getattr(part, "sparse", False) and isinstance(
            part, (torch.nn.Embedding, torch.nn.EmbeddingBag)
        ):
            raise TypeError(
                f"DataParallel: {name or 'the module'} has sparse gradients, which are not "
                "averaged; give it sparse=False"
            )
    devices: dict[torch.device, str] = {}
    for name, tensor in _named_state(module):
        if torch.nn.parameter.is_lazy(tensor):
            raise ValueError(
                f"DataParallel: {name!r} is not initialized yet; call the module once before"
            )
        check_tensor("DataParallel", name, tensor)
        if tensor.requires_grad:
            check_reducible("DataParallel", ReduceOp.AVG, tensor)
            devices.setdefault(tensor.device, name)
    if not devices:
        raise ValueError("DataParallel: no parameter of the module requires a gradient")
    if len(devices) > 1:
        where = ", ".join(f"{name!r} on {device}" for device, name in devices.items())
        raise ValueError(f"DataParallel: all trained parameters must be on one device ({where})")


def _named_state(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()


def _described(numbers: Sequence[int]) -> list[tuple[int, ...]]:
    """The rows that :meth:`DataParallel._compare` has made numbers of."""
    rows, at = [], 0
    while at < len(numbers):
        end = at + 4 + numbers[at + 3]
        rows.append(tuple(numbers[at:end]))
        at = end
    return rows


def _words(rows: Sequence[tuple[int, ...]], at: int, first: Sequence[tuple[int, ...]] = ()) -> str:
    if at >= len(rows):
        return "missing"
    name, dtype, trained, _, *shape = rows[at]
    grad = ", requires grad" if trained else ""
    other = ", of another name" if at < len(first) and first[at][0] != name else ""
    return f"{name_of(dtype)} of shape {tuple(shape)}{grad}{other}"


def _tensors(thing: Any, seen: set[int] | None = None) -> Iterable[torch.Tensor]:
    """The tensors in what a forward returns: in containers and dataclasses."""
    seen = set() if seen is None else seen
    if isinstance(thing, torch.Tensor):
        yield thing
        return
    if id(thing) in seen:
        return
    seen.add(id(thing))
    parts: Iterable[Any] = ()
    if isinstance(thing, Mapping):
        parts = thing.values()
    elif isinstance(thing, (list, tuple, set, frozenset)):
        parts = thing
    elif dataclasses.is_dataclass(thing) and not isinstance(thing, type):
        parts = [getattr(thing, field.name, None) for field in dataclasses.fields(thing)]
    for part in parts:
        yield from _tensors(part, seen)


def _reached(tensors: Iterable[torch.Tensor]) -> set[int]:
    """The ids of the leaves on which `tensors` depend."""
    tensors = list(tensors)
    waiting = [t.grad_fn for t in tensors if t.grad_fn is not None]
    seen, found = set(waiting), {id(t) for t in tensors if t.grad_fn is None}
    while waiting:
        node = waiting.pop()
        variable = getattr(node, "variable", None)
        if variable is not None:
            found.add(id(variable))
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                waiting.append(following)
    return found
