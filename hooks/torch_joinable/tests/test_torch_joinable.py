"""Under ``mpiexec -n 2``: the same result as torch's own Join where it has one."""

from __future__ import annotations

import tempfile

import pytest
import torch
import torch.distributed as dist
from mpi4py import MPI
from torch.distributed.algorithms.join import Join as TorchJoin
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import mpicoll
from mpicoll.algorithms import Join, Joinable

WORLD = mpicoll.COMM_WORLD


@pytest.fixture(scope="module", autouse=True)
def torch_distributed():
    """A process group of the gloo backend with the ranks of MPI."""
    with tempfile.TemporaryDirectory() as folder:
        path = MPI.COMM_WORLD.bcast(f"{folder}/store" if WORLD.rank == 0 else None)
        dist.init_process_group(
            "gloo", init_method=f"file://{path}", rank=WORLD.rank, world_size=WORLD.size
        )
        yield
        dist.destroy_process_group()
        MPI.COMM_WORLD.Barrier()


def inputs(more: int = 0) -> list[torch.Tensor]:
    """Rank r has 2 + r batches."""
    generator = torch.Generator().manual_seed(WORLD.rank)
    return [torch.randn(4, 3, generator=generator) for _ in range(2 + WORLD.rank + more)]


def make(**options) -> DistributedDataParallel:
    torch.manual_seed(0)
    layers = [torch.nn.Linear(3, 5), torch.nn.BatchNorm1d(5), torch.nn.Linear(5, 1)]
    return DistributedDataParallel(torch.nn.Sequential(*layers), **options)


def train(model, optimizer, batches) -> None:
    for x in batches:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()


def values(model) -> list[torch.Tensor]:
    return [t.detach().clone() for t in model.state_dict().values()]


def same_everywhere(tensors) -> bool:
    """Bit for bit on all ranks."""
    everywhere = MPI.COMM_WORLD.allgather([t.tolist() for t in tensors])
    return all(other == everywhere[0] for other in everywhere)


@pytest.mark.parametrize("initial", [True, False])
@pytest.mark.parametrize("options", [{}, {"find_unused_parameters": True}])
def test_distributed_data_parallel_as_in_torch(initial, options):
    results = []
    for join in (TorchJoin, Join):
        model = make(**options)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with join([model], divide_by_initial_world_size=initial):
            train(model, optimizer, inputs())
        results.append(values(model))
    theirs, ours = results
    assert all(map(torch.equal, theirs, ours))
    assert same_everywhere(ours)
    assert not torch.equal(ours[0], values(make())[0])


def test_with_a_sharded_optimizer_as_in_torch():
    results = []
    for join in (TorchJoin, Join):
        model = make()
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.1)
        with join([model, optimizer]):
            train(model, optimizer, inputs())
        results.append(values(model))
    assert all(map(torch.equal, *results))


def test_an_optimizer_ends_with_the_state_of_the_last():
    model = make()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    with Join([model, optimizer]):
        train(model, optimizer, inputs())
    states = [optimizer.state[p] for p in model.parameters()]
    assert all(state["step"] == 2 + WORLD.size - 1 for state in states)
    assert same_everywhere([state["exp_avg"] for state in states])
    # Training on together keeps the ranks together.
    train(model, optimizer, [torch.ones(4, 3)] * 2)
    assert same_everywhere(list(model.parameters()))


def test_an_optimizer_alone_announces_its_steps():
    """It does not step where there is no input: the gradients there are old."""
    parameter = torch.nn.Parameter(torch.zeros(2))
    parameter.grad = torch.ones(2)
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    with Join([optimizer]) as context:
        for _ in inputs():
            optimizer.step()
    assert context.iterations == 2 + WORLD.rank
    assert context.shadowed == WORLD.size - 1 - WORLD.rank
    assert parameter.tolist() == [-(2.0 + WORLD.size - 1)] * 2


class Summing:
    """Something of a third party whose step communicates."""

    def __init__(self) -> None:
        self.sums: list[float] = []

    def step(self, value: float = 0.0) -> None:
        """Add up over the ranks."""
        self.sums.append(WORLD.Allreduce(torch.tensor(value), mpicoll.MPI_SUM).item())


def test_anything_that_steps():
    thing = Summing()
    with Join([thing]):
        for _ in inputs():
            thing.step(1.0)
    active = [sum(2 + r > i for r in range(WORLD.size)) for i in range(2 + WORLD.size - 1)]
    assert thing.sums == active
    assert "step" not in vars(thing)


@pytest.mark.parametrize("fails", [False, True])
def test_what_the_context_sets_is_taken_back(fails):
    model, thing = make(), Summing()
    before = dict(model.__dict__), len(model._forward_pre_hooks)
    try:
        with Join([model, thing], on_error="propagate"):
            assert len(model._forward_pre_hooks) == 1
            assert model._join_config.enable
            assert "step" in vars(thing)
            if fails:  # on all ranks alike
                raise KeyError("mine")
    except KeyError:
        assert fails
    assert len(model._forward_pre_hooks) == before[1] == 0
    assert model._join_config == before[0]["_join_config"]
    assert vars(thing) == {"sums": []}


def test_groups_of_torch_become_communicators():
    groups = [dist.new_group([r]) for r in range(WORLD.size)]
    model = make(process_group=groups[WORLD.rank])
    joined = Join([model]).joinables[0]
    assert isinstance(joined, Joinable)
    assert joined.join_process_group.size == 1
    assert Join([model]).joinables[0].join_process_group is joined.join_process_group
    with Join([model]) as context:
        train(model, torch.optim.SGD(model.parameters(), lr=0.1), inputs())
    assert (context.iterations, context.shadowed) == (2 + WORLD.rank, 0)


@pytest.mark.parametrize("thing", [3, "step", Summing, object()])
def test_the_rest_is_left_to_others(thing):
    with pytest.raises(TypeError, match="torch-joinable"), Join([thing]):
        pass


def test_nothing_is_left_to_wait_for():
    assert WORLD.Allreduce(torch.ones(1), mpicoll.MPI_SUM).item() == WORLD.size
