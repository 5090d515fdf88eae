"""Objects that are not Joinable: all ranks learn when the context is made what became of them."""

from __future__ import annotations

import pytest
from groups import several

import mpicoll
from mpicoll import plugins
from mpicoll.algorithms import Join, Joinable, JoinAborted, JoinHook
from mpicoll.errors import PluginError, PluginMismatchError


class Adapted(Joinable):
    join_device = join_process_group = None

    def __init__(self, comm):
        super().__init__()
        self.join_process_group = comm

    def join_hook(self, **kwargs):
        return JoinHook()


class Adapter:
    """Adapts lists: calls ``obj[0](comm)``."""

    @mpicoll.hookimpl
    def mpicoll_adapt_joinable(self, obj, comm, options):
        return obj[0](comm) if isinstance(obj, list) else None


@pytest.fixture
def adapter():
    plugins.load()
    manager = plugins._manager._pluggy
    made = Adapter()
    manager.register(made, name="adapter")
    yield made
    manager.unregister(made)


def test_nothing_can_adapt_it(world, works):
    for thing in (3, object()):
        with pytest.raises(TypeError, match=r"joinables\[0\] is a .* \(asked: "):
            Join([thing])
        with pytest.raises(TypeError, match=r"joinables\[1\] is a "):
            Join([world, thing])
    works()


def test_disabled_it_is_refused_without_a_message(world, monkeypatch):
    monkeypatch.setattr(plugins, "agree", lambda *_: pytest.fail("communicates"))
    with pytest.raises(TypeError, match=r"joinables\[0\] is a "):
        Join([3], enable=False)


def test_adapted(adapter, world, works):
    context = Join([[Adapted], [Adapted]])
    assert [type(j) for j in context.joinables] == [Adapted, Adapted]
    with context:
        assert Join.notify_join_context(context.joinables[0]).is_completed()
    works()


def test_adapters_are_told_the_communicator_of_the_others(adapter, comm):
    other = mpicoll.comm_from_mpi4py(comm)
    context = Join([[Adapted], other])
    assert context.joinables[1].join_process_group is other


def test_adapted_for_another_communicator(adapter, world, works):
    with pytest.raises(ValueError, match="must use the same communicator"):
        Join([world, [lambda comm: Adapted(mpicoll.COMM_SELF)]])
    works()


@several
@pytest.mark.parametrize("on_error", ["abort", "propagate"])
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_fails_on_one_rank(adapter, world, works, on_error, error):
    def fails(comm):
        if world.rank == world.size - 1:
            raise error("broken")
        return Adapted(comm)

    own = PluginError if error is ValueError else error
    others = PluginError if on_error == "abort" else JoinAborted
    with pytest.raises(own if world.rank == world.size - 1 else others, match="broken"):
        Join([[fails]], on_error=on_error)
    works()


@several
def test_can_be_adapted_on_one_rank_only(adapter, world, works):
    """The ranks have the same plugins; they differ in the object."""
    with pytest.raises((PluginError, PluginMismatchError, TypeError), match=r"is a builtins\.int"):
        Join([3 if world.rank else [Adapted]])
    works()
