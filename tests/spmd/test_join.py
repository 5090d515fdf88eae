"""The protocol of Join: announcements, hooks, early termination, life cycle, messages."""

from __future__ import annotations

import copy
import pickle
import warnings

import pytest
import torch
from groups import ranks, several

import mpicoll
from mpicoll import watch
from mpicoll._core import collectives
from mpicoll.algorithms import Join, Joinable, JoinAborted, JoinHook, session

ONE = torch.ones(1)


class Adder(Joinable):
    """One all-reduce of 1 per iteration; ranks that have run out add 0."""

    def __init__(self, comm=None, log=None, name="", hook=None):
        super().__init__()
        self.comm = comm or mpicoll.COMM_WORLD
        self.log = [] if log is None else log
        self.name = name
        self.given = None
        self.handles = []
        self.hook = hook

    def add(self):
        self.handles.append(Join.notify_join_context(self))
        return self.comm.Allreduce(ONE, mpicoll.MPI_SUM).item()

    def join_hook(self, **kwargs):
        self.given = kwargs
        return self.hook or _Hook(self)

    @property
    def join_device(self):
        return torch.device("cpu")

    @property
    def join_process_group(self):
        return self.comm


class _Hook(JoinHook):
    def __init__(self, adder):
        self.adder = adder

    def main_hook(self):
        self.adder.log.append(f"main{self.adder.name}")
        self.adder.comm.Allreduce(0 * ONE, mpicoll.MPI_SUM)

    def post_hook(self, is_last_joiner):
        self.adder.log.append((f"post{self.adder.name}", is_last_joiner))


@pytest.fixture
def adder(world):
    return Adder(world)


def iterate(context, adders, n):
    total = 0
    with context:
        for _ in range(n):
            total += sum(adder.add() for adder in adders)
    return total


#: Rank r with 3 + r inputs: the totals of the ranks.
TOTALS = {1: [3], 2: [6, 7], 3: [9, 11, 12], 4: [12, 15, 17, 18]}


@ranks(1, 2, 3, 4)
@pytest.mark.parametrize("on_error", ["abort", "propagate"])
@pytest.mark.parametrize("count", [1, 3])
def test_totals(comm, count, on_error):
    adders = [Adder(comm) for _ in range(count)]
    context = Join(adders, on_error=on_error)
    assert iterate(context, adders, 3 + comm.rank) == count * TOTALS[comm.size][comm.rank]
    behind = comm.size - 1 - comm.rank
    for adder in adders:
        assert adder.log == ["main"] * behind + [("post", behind == 0)]
    assert (context.iterations, context.shadowed) == (3 + comm.rank, behind)


@ranks(1, 2, 3, 4)
def test_totals_with_a_communicator(comm):
    with Join([comm]):
        total = sum(comm.Allreduce(ONE, mpicoll.MPI_SUM).item() for _ in range(3 + comm.rank))
    assert total == TOTALS[comm.size][comm.rank]


@ranks(3)
def test_g1_hooks(comm):
    """Inputs 3, 4, 5: main hooks 2, 1, 0, one post hook each; last joiner F, F, T."""
    log = []
    a, b = Adder(comm, log, "a"), Adder(comm, log, "b")
    iterate(Join([a, b]), [a, b], 3 + comm.rank)
    behind = 2 - comm.rank
    last = comm.rank == 2
    assert log == ["maina", "mainb"] * behind + [("posta", last), ("postb", last)]
    assert all(handle.wait() for handle in a.handles)
    assert len(a.handles) == 3 + comm.rank
    assert b.handles == [None] * len(a.handles), "only the first one notifies"


@ranks(1, 2, 3)
def test_g1_all_equal(comm):
    a = Adder(comm)
    assert iterate(Join([a]), [a], 4) == 4 * comm.size
    assert a.log == [("post", True)]


@ranks(3)
@pytest.mark.parametrize("on_error", ["abort", "propagate"])
@pytest.mark.parametrize("shadow", [False, True])
def test_g2_early_termination(comm, shadow, on_error):
    """Inputs 2, 5, 5: all raise, none past iteration 2, the communicator works afterwards."""
    a = Adder(comm)
    context = Join([comm] if shadow else [a], throw_on_early_termination=True, on_error=on_error)
    done = 0

    def body():
        nonlocal done
        with context:
            for _ in range(2 if comm.rank == 0 else 5):
                comm.Allreduce(ONE, mpicoll.MPI_SUM) if shadow else a.add()
                done += 1

    with pytest.raises(RuntimeError) as caught:
        body()
    others = "Detected at least one rank that exhausted inputs. Throwing across all ranks."
    assert str(caught.value) == ("Rank 0 exhausted all inputs." if comm.rank == 0 else others)
    assert type(caught.value) is RuntimeError
    assert done == 2
    assert a.log == [], "no hook runs"
    assert comm.Allreduce(ONE, mpicoll.MPI_SUM).item() == 3
    assert iterate(Join([a]), [a], 1) == 3, "the joinable can be used again"


@ranks(1, 2, 3)
@pytest.mark.parametrize("shadow", [False, True])
def test_finishing_together_throws_nothing(comm, shadow):
    a = Adder(comm)
    with Join([comm] if shadow else [a], throw_on_early_termination=True):
        for _ in range(3):
            comm.Allreduce(ONE, mpicoll.MPI_SUM) if shadow else a.add()
    assert a.log == ([] if shadow else [("post", True)])


def test_disabled_communicates_nothing(world, adder, monkeypatch):
    """No message but those of the body: control traffic, of plugins too, is all agreements."""
    calls = []
    real = collectives.agree
    monkeypatch.setattr(collectives, "agree", lambda *args: calls.append(args) or real(*args))
    seen = []
    observer = watch.observe(seen.append, lambda event: None)
    try:
        for joinable in (adder, world):
            with Join([joinable], enable=False):
                adder.add()
    finally:
        watch.stop(observer)
    assert calls == []
    assert [event.op for event in seen] == ["Allreduce", "Allreduce"]
    assert adder.handles == [None, None]
    assert (adder.log, adder.given) == ([], None)
    iterate(Join([adder]), [adder], 1)
    assert calls, "the count would have noticed"


@ranks(2)
def test_g5_allgather(comm):
    """Inputs 2 and 4, one row per iteration: the active rank sees 2, 2, 1, 1 rows."""
    rows = []
    with Join([comm]):
        for _ in range(2 + 2 * comm.rank):
            rows.append(comm.Allgather(torch.full((1, 3), comm.rank), 0)[:, 0].tolist())
    assert rows == [[0, 1], [0, 1], [1], [1]][: 2 + 2 * comm.rank]


# ---------------------------------------------------------------- life cycle


def test_ranks_without_inputs(world, works, adder):
    """Only the last rank has any; then no rank has."""
    n = 3 if world.rank == world.size - 1 else 0
    assert iterate(Join([adder]), [adder], n) == n
    assert adder.log == ["main"] * (3 - n) + [("post", n == 3)]
    adder.log.clear()
    assert iterate(Join([adder]), [adder], 0) == 0
    assert adder.log == [("post", True)]
    works()


@pytest.mark.parametrize("shadow", [False, True])
def test_again_and_again(world, works, shadow):
    """One context, entered in a loop; the lengths turn round the ranks."""
    adder = Adder(world)
    context = Join([world] if shadow else [adder])
    for epoch in range(4):
        lengths = [(r + epoch) % world.size for r in range(world.size)]
        total = 0
        with context as entered:
            assert entered is context
            for _ in range(lengths[world.rank]):
                total += world.Allreduce(ONE, mpicoll.MPI_SUM).item() if shadow else adder.add()
        expected = sum(sum(n > k for n in lengths) for k in range(lengths[world.rank]))
        assert total == expected
        assert context.iterations == lengths[world.rank]
    works()


def test_leaving_the_body_early(world, works, adder):
    """``break`` and ``return`` are ends like any other."""

    def leaves():
        with Join([adder]):
            for _ in range(2):
                adder.add()
            return world.rank
        raise AssertionError("not reached")

    assert leaves() == world.rank
    total = 0
    for _ in range(1):
        with Join([adder]):
            for k in range(5):
                if k == world.rank:
                    break
                total += adder.add()
    assert total == sum(sum(r > k for r in range(world.size)) for k in range(world.rank))
    works()


def test_nested_on_different_communicators(world, works):
    """The inner context is entered by the ranks of its communicator, in every iteration."""
    inner = world.Split(world.rank % 2)
    outer = Adder(world)
    total = inside = 0
    with Join([outer]):
        for _ in range(2):
            total += outer.add()
            with Join([inner]):
                for _ in range(1 + inner.rank):
                    inside += inner.Allreduce(ONE, mpicoll.MPI_SUM).item()
    assert total == 2 * world.size
    assert inside == 2 * sum(inner.size - k for k in range(1 + inner.rank))
    inner.Free()
    works()


@pytest.mark.parametrize("shadow", [False, True])
def test_nested_on_one_communicator(world, works, shadow):
    a, b = Adder(world), Adder(world)
    with Join([world] if shadow else [a]):
        for thing in (world, b) if shadow else (a, b, world):
            with pytest.raises(RuntimeError, match="active Join context"):
                Join([thing]).__enter__()
    assert iterate(Join([b]), [b], 1) == world.size
    works()


def test_a_context_that_is_active(world, works, adder):
    context = Join([adder])
    with context, pytest.raises(RuntimeError, match="active Join context already"):
        context.__enter__()
    works()


def test_what_entry_sets_is_taken_back(world, works):
    """Also after an error; construction sets nothing."""
    adder = Adder(world)
    before = dict(vars(adder))
    contexts = [Join([adder]), Join([adder], on_error="propagate"), Join([world])]
    assert vars(adder) == before
    for context in contexts:
        with context:
            pass
        assert vars(adder) | {"given": None} == before
        assert not watch.on
    with pytest.raises(RuntimeError, match="all ranks"), Join([world]):
        world.Dup()
    assert not watch.on
    works()


def test_copies_are_in_no_context(world, adder):
    """A model can be copied and saved in the body of its context."""
    adder.comm = None  # the communicator cannot be saved
    with Join([adder]):
        for copied in (copy.deepcopy(adder), pickle.loads(pickle.dumps(adder))):
            assert vars(copied) == vars(adder)
            assert Join.notify_join_context(copied) is None
        assert Join.notify_join_context(adder).is_completed()


def test_kwargs(world, adder):
    marker = object()
    assert iterate(Join([adder], True, False, some=marker, other=2), [adder], 1) == world.size
    assert adder.given == {"some": marker, "other": 2}, "on_error is not forwarded"


def test_communicator_stands_first(world, works):
    """In a list with others: every collective on it is a round of all hooks."""
    log = []

    class Hook(JoinHook):
        def main_hook(self):
            log.append("main")

        def post_hook(self, is_last_joiner):
            log.append(is_last_joiner)

    adder = Adder(world, hook=Hook())
    context = Join([adder, world])
    assert context.joinables == [world, adder]
    n = 1 + world.rank
    assert iterate(context, [adder], n) == sum(world.size - k for k in range(n))
    assert adder.handles == [None] * n
    behind = world.size - n
    assert log == ["main"] * behind + [behind == 0]
    works()


@several
def test_warns_once_when_far_behind(world, works, monkeypatch):
    filters = list(warnings.filters)
    n = session.BEHIND + 3 if world.rank else 0
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with Join([world]):
            for _ in range(n):
                world.Barrier()
    words = [str(w.message) for w in caught if "more than 1000 iterations" in str(w.message)]
    assert len(words) == (world.rank == 0)
    assert list(warnings.filters) == filters
    works()


def test_iteration_of_exactly_a_thousand_does_not_warn(world):
    n = session.BEHIND if world.rank else 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with Join([world]):
            for _ in range(n):
                world.Barrier()


# ---------------------------------------------------------------- validation


def test_constructor(world):
    adder = Adder(world)
    with pytest.raises(TypeError, match=r"must be a list of joinables, not a mpicoll.*: Join\(\["):
        Join(mpicoll.COMM_WORLD)
    with pytest.raises(ValueError, match="joinables is empty"):
        Join([])
    with pytest.raises(ValueError, match=r"joinables\[1\].*twice"):
        Join([adder, adder])
    with pytest.raises(ValueError, match="twice"):
        Join([world, adder, world])
    with pytest.raises(ValueError, match=r"joinables\[1\].*same communicator"):
        Join([adder, Adder(mpicoll.COMM_SELF)])
    with pytest.raises(ValueError, match="on_error is 'ignore'"):
        Join([adder], on_error="ignore")
    with pytest.raises(TypeError, match=r"joinables\[0\] is a builtins.int"), Join([3]):
        pass


def test_the_world_and_none_are_the_same(world):
    nobody = Adder(world)
    nobody.comm = None
    with Join([nobody, Adder(world)]):
        pass


def test_mpi4py_communicator(world):
    """mpi4py's world is the world."""
    other = Adder(world)
    other.comm = world.to_mpi4py()
    with Join([other, Adder(world)]):
        pass


class Unchained(torch.nn.Module, Joinable):
    def __init__(self):
        torch.nn.Module.__init__(self)

    def join_hook(self, **kwargs):
        return JoinHook()

    join_device = torch.device("cpu")
    join_process_group = None


class Chained(Unchained):
    def __init__(self):
        super().__init__()
        Joinable.__init__(self)
        self.layer = torch.nn.Linear(1, 1)


def test_init_was_not_chained():
    with pytest.raises(RuntimeError, match=r"Unchained.*Joinable.__init__"):
        Join([Unchained()])
    with pytest.raises(RuntimeError, match=r"Unchained.*Joinable.__init__"):
        Join.notify_join_context(Unchained())


def test_a_module_that_is_a_joinable():
    module = Chained()
    assert Join.notify_join_context(module) is None
    with Join([module]):
        assert Join.notify_join_context(module).is_completed()
    assert Join.notify_join_context(module) is None


def test_communicator_is_a_joinable(world):
    assert isinstance(world, Joinable)


def test_joinable_is_abstract():
    with pytest.raises(TypeError, match="abstract"):
        Joinable()


@several
def test_ranks_that_disagree_on_the_context(world, works):
    adder = Adder(world)
    with pytest.raises(ValueError, match="disagree on the arguments"):
        Join([adder], throw_on_early_termination=world.rank == 0).__enter__()
    with Join([adder]):
        assert adder.add() == world.size
    works()


def test_hook_of_another_type(world, works):
    adder = Adder(world, hook="hook")
    if world.size == 1:
        with pytest.raises(TypeError, match="not a JoinHook"):
            Join([adder]).__enter__()
    else:  # it fails on all ranks; a propagating context tells so
        with pytest.raises(TypeError, match="not a JoinHook"):
            Join([adder], on_error="propagate").__enter__()
    works()


# ---------------------------------------------------------------- propagate


class Failing(JoinHook):
    def __init__(self, adder, where, who):
        self.adder, self.where, self.who = adder, where, who

    def main_hook(self):
        if self.where == "main" and self.adder.comm.rank == self.who:
            raise KeyError("main")
        self.adder.comm.Allreduce(0 * ONE, mpicoll.MPI_SUM)

    def post_hook(self, is_last_joiner):
        if self.where == "post" and self.adder.comm.rank == self.who:
            raise KeyError("post")
        self.adder.comm.Allreduce(ONE, mpicoll.MPI_SUM)


@several
@pytest.mark.parametrize("where", ["body", "main", "post", "join_hook", "collective"])
@pytest.mark.parametrize("error", [KeyError, KeyboardInterrupt, SystemExit])
def test_propagates(world, works, where, error):
    """A failure on rank 0 alone: the others, blocked in a collective, name rank and error."""
    adder = Adder(world)
    adder.hook = Failing(adder, where, 0)

    def body():
        context = Join([adder], on_error="propagate")
        if where == "join_hook" and world.rank == 0:
            adder.hook = None
            adder.log = None  # join_hook works, what it returns does not
            adder.join_hook = lambda **_: (_ for _ in ()).throw(KeyError("join_hook"))
        with context:
            for k in range(2 + world.rank):
                if where == "body" and world.rank == 0 and k == 1:
                    raise error("body")
                if where == "collective" and world.rank == 0:
                    Join.notify_join_context(adder)
                    raise error("collective")  # the others wait in Allreduce
                adder.add()

    raised = error if where in ("body", "collective") else KeyError
    expected = raised if world.rank == 0 else JoinAborted
    with pytest.raises(expected) as caught:
        body()
    if world.rank:
        assert caught.value.rank == 0
        assert raised.__name__ in str(caught.value)
        assert where in str(caught.value)
    assert not watch.on
    works()


@several
@pytest.mark.parametrize("shape", [1, 100_000])
def test_propagates_in_a_shadow(world, works, shape):

    def body():
        with Join([world], on_error="propagate"):
            for k in range(2 + world.rank):
                if world.rank == world.size - 1 and k == 1:
                    raise ZeroDivisionError("of the last rank" + "!" * shape)
                world.Allreduce(ONE, mpicoll.MPI_SUM)

    expected = ZeroDivisionError if world.rank == world.size - 1 else JoinAborted
    with pytest.raises(expected, match="of the last rank!"):
        body()
    works()


@several
def test_a_hook_that_uses_a_shadowed_communicator(world, works):
    """It would answer itself; nothing hangs."""
    adder = Adder(world)

    def body():
        with Join([world, adder], on_error="propagate"):
            for _ in range(0 if world.rank == 0 else 3):
                world.Barrier()

    with pytest.raises((RuntimeError, JoinAborted), match="whose collectives are shadowed"):
        body()
    works()


# ---------------------------------------------------------------- observers


@pytest.mark.parametrize("shadow", [False, True])
def test_observers_see_every_collective(world, works, shadow):
    """Paired, forward and backward, also those that a rank makes to keep the others company."""
    adder = Adder(world)
    started, finished = [], []
    observer = watch.observe(started.append, finished.append)
    try:
        with Join([world] if shadow else [adder]):
            for _ in range(1 + world.rank):
                Join.notify_join_context(adder)
                x = torch.ones(3 if shadow else 1, requires_grad=shadow)
                y = world.Allreduce(x, mpicoll.MPI_SUM)
                if shadow:
                    y.sum().backward()
    finally:
        watch.stop(observer)
    each = ["forward", "backward"] if shadow else ["forward"]
    assert [event.direction for event in started] == each * world.size
    assert started == finished, "the same objects, in the same order"
    assert [event.seq for event in started] == sorted({event.seq for event in started})
    for event in started:
        assert (event.op, event.reduce_op, event.root) == ("Allreduce", "SUM", None)
        assert (event.rank, event.size, event.error) == (world.rank, world.size, None)
        assert event.dtype is torch.float32
        assert event.t_start <= event.t_end
        assert (event.count, event.nbytes) == ((3, 12) if shadow else (1, 4))
    works()


@several
def test_observers_see_errors(world, works):
    events = []
    observer = watch.observe(lambda event: None, events.append)
    try:
        with pytest.raises(RuntimeError, match="root, rank 0, has run out"), Join([world]):
            world.Bcast(ONE, 0) if world.rank else None
    finally:
        watch.stop(observer)
    assert [(event.op, type(event.error)) for event in events] == (
        [("Bcast", RuntimeError)] if world.rank else []
    )
    works()


def test_an_observer_does_not_communicate(world, works):
    def started(event):
        with pytest.raises(RuntimeError, match="observer must not communicate"):
            world.Barrier()
        seen.append(event)

    seen = []
    observer = watch.observe(started, lambda event: None)
    try:
        world.Allreduce(ONE, mpicoll.MPI_SUM)
    finally:
        watch.stop(observer)
    assert len(seen) == 1
    works()
