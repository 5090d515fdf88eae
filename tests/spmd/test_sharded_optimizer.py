"""ZeroRedundancyOptimizer against the same optimizer in one process, in plain torch."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
from groups import every, ranks, several

import mpicoll
from mpicoll.algorithms import DataParallel, Join, Joinable, JoinAborted, ZeroRedundancyOptimizer

CLOSE = {"rtol": 1e-10, "atol": 1e-12}
KINDS = {
    "SGD": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9}),
    "Adam": (torch.optim.Adam, {"lr": 0.02}),
    "AdamW": (torch.optim.AdamW, {}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 0.05}),
    "RMSprop": (torch.optim.RMSprop, {"lr": 0.01, "centered": True}),
}


def layers(seed=0, dtype=torch.float64):
    torch.manual_seed(seed)
    return torch.nn.Sequential(
        torch.nn.Linear(3, 5), torch.nn.Tanh(), torch.nn.Linear(5, 4), torch.nn.Tanh(),
        torch.nn.Linear(4, 1),
    ).to(dtype)  # fmt: skip


def batch(rank, k=0, n=6):
    made = torch.Generator().manual_seed(1000 * rank + k)
    return torch.randn(n, 3, generator=made, dtype=torch.float64)


def loss(output, rank=0):
    return ((output - rank).square().mean()) * (rank + 1)


def check(got, wanted, close=CLOSE):
    for g, w in zip(got, wanted, strict=True):
        torch.testing.assert_close(g, w, **close)


def same_everywhere(comm, module):
    told = comm.to_mpi4py().allgather([t.detach().tolist() for t in module.parameters()])
    assert all(other == told[0] for other in told)


def backward(module, k=0):
    """The same gradients on every rank."""
    module.zero_grad()
    loss(module(batch(0, k))).backward()


@ranks(1, 2, 3, 4)
@pytest.mark.parametrize("kind", KINDS)
def test_as_the_optimizer_itself(comm, kind):
    made, options = KINDS[kind]
    model, alone = layers(), layers()
    optimizer = ZeroRedundancyOptimizer(model.parameters(), made, comm, **options)
    other = made(alone.parameters(), **options)
    assert {**optimizer.param_groups[0], "params": 0} == {**other.param_groups[0], "params": 0}
    for k in range(4):
        for module, steps in ((model, optimizer), (alone, other)):
            backward(module, k)
            steps.step()
        check(model.parameters(), alone.parameters())


@ranks(1, 2, 3, 4)
def test_every_rank_has_a_share_of_the_state(comm):
    """The largest first, to the rank with the least; no state of others."""
    sizes = [7, 1, 5, 9, 3, 5, 2]
    parameters = [torch.nn.Parameter(torch.ones(n).double()) for n in sizes]
    optimizer = ZeroRedundancyOptimizer(parameters, torch.optim.Adam, comm)
    for p in parameters:
        p.grad = torch.ones_like(p)
    optimizer.step()
    mine = [len(p) for p in optimizer.optim.param_groups[0]["params"]]
    assert [len(p) for p in optimizer.optim.state] == mine
    expected = {
        1: [sizes],
        2: [[9, 5, 2], [7, 5, 3, 1]],
        3: [[9, 2], [7, 3, 1], [5, 5]],
        4: [[9], [7, 1], [5, 3], [5, 2]],
    }[comm.size]
    assert sorted(mine) == sorted(expected[comm.rank])


@ranks(2, 3, 4)
def test_fewer_parameters_than_ranks(comm):
    model, alone = torch.nn.Linear(2, 2, bias=False).double(), torch.nn.Linear(2, 2, bias=False)
    alone.load_state_dict(model.state_dict())
    alone.double()
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, comm, lr=0.1)
    other = torch.optim.Adam(alone.parameters(), lr=0.1)
    start = [p.detach().clone() for p in model.parameters()]
    for p, first in zip(alone.parameters(), start, strict=True):
        comm.Bcast_(first, 0)
        p.data.copy_(first)
        next(iter(model.parameters())).data.copy_(first)
    for _ in range(3):
        for module, steps in ((model, optimizer), (alone, other)):
            module.zero_grad()
            module(torch.ones(1, 2).double()).square().sum().backward()
            steps.step()
    check(model.parameters(), alone.parameters())


@ranks(1, 2, 3, 4)
def test_dtypes_and_gradients_that_are_missing(comm):
    parameters = [
        torch.nn.Parameter(torch.ones(n, dtype=dtype))
        for n, dtype in [
            (3, torch.float32), (0, torch.float32), (5, torch.bfloat16), (2, torch.complex64),
            (4, torch.float64), (1, torch.float32),
        ]
    ]  # fmt: skip
    scalar = torch.nn.Parameter(torch.tensor(1.0))
    strided = torch.nn.Parameter(torch.arange(6.0).view(2, 3).t())
    parameters += [scalar, strided]
    alone = copy.deepcopy(parameters)
    optimizer = ZeroRedundancyOptimizer(parameters, torch.optim.SGD, comm, lr=0.5)
    other = torch.optim.SGD(alone, lr=0.5)
    for some, steps in ((parameters, optimizer), (alone, other)):
        for i, p in enumerate(some):
            p.grad = None if i == 4 else torch.full_like(p, i + 0.25)
        steps.step()
    check(parameters, alone, {"rtol": 0, "atol": 0})
    assert strided.stride() == (1, 3)


@ranks(1, 2, 3, 4)
def test_groups_and_schedulers(comm):
    """Options of each group, changed by a scheduler, and groups that come later."""
    model, alone = layers(), layers()

    def made(module, make):
        optimizer = make(
            [{"params": module[0].parameters(), "lr": 0.1}, {"params": [module[2].weight]}]
        )
        return module, optimizer, [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)]

    both = [
        made(
            model,
            lambda groups: ZeroRedundancyOptimizer(
                groups, torch.optim.SGD, comm, lr=0.02, momentum=0.5
            ),
        ),
        made(alone, lambda groups: torch.optim.SGD(groups, lr=0.02, momentum=0.5)),
    ]
    for k in range(5):
        for module, optimizer, schedulers in both:
            if k == 2:
                optimizer.add_param_group({"params": list(module[4].parameters()), "lr": 0.3})
                schedulers[:] = [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)]
            backward(module, k)
            optimizer.step()
            schedulers[0].step()
        check(model.parameters(), alone.parameters())
    rates = [[group["lr"] for group in optimizer.param_groups] for _, optimizer, _ in both]
    assert rates[0] == rates[1]
    assert torch.equal(model[2].bias, layers()[2].bias), "in no group"


@every
def test_closures(comm):
    model, alone = layers(), layers()
    calls = []

    def closure(module):
        calls.append(torch.is_grad_enabled())
        backward(module)
        return loss(module(batch(0)))

    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, comm, lr=0.1)
    other = torch.optim.Adam(alone.parameters(), lr=0.1)
    for _ in range(2):
        with torch.no_grad():
            mine = optimizer.step(lambda: closure(model))
        check([mine], [other.step(lambda: closure(alone))])
    assert calls == [True] * 4
    check(model.parameters(), alone.parameters())
    assert optimizer.step() is None


@ranks(1, 2, 3, 4)
@pytest.mark.parametrize("kind", KINDS)
def test_state_dict(comm, kind):
    """To and from the optimizer itself, and to ranks that are shared out otherwise."""
    made, options = KINDS[kind]
    root = comm.size - 1
    model, alone = layers(), layers()
    optimizer = ZeroRedundancyOptimizer(model.parameters(), made, comm, **options)
    other = made(alone.parameters(), **options)
    for k in range(2):
        for module, steps in ((model, optimizer), (alone, other)):
            backward(module, k)
            steps.step()
    with pytest.raises(RuntimeError, match=r"call consolidate_state_dict\(to=rank\)"):
        optimizer.state_dict()
    optimizer.consolidate_state_dict(to=root)
    if comm.rank != root:
        with pytest.raises(RuntimeError, match="call consolidate_state_dict"):
            optimizer.state_dict()
    state = other.state_dict()
    if comm.rank == root:
        mine = optimizer.state_dict()
        assert mine["param_groups"] == state["param_groups"]
        assert mine["state"].keys() == state["state"].keys()
        for i, values in state["state"].items():
            assert mine["state"][i].keys() == values.keys()
            for name, value in values.items():
                torch.testing.assert_close(mine["state"][i][name], value, **CLOSE)
        third = made(layers().parameters(), **options)
        third.load_state_dict(mine)
    fresh = ZeroRedundancyOptimizer(alone.parameters(), made, comm, **{**options, "lr": 9.0})
    fresh.load_state_dict(copy.deepcopy(state))
    assert fresh.param_groups[0]["lr"] == other.param_groups[0]["lr"]
    twin = layers()
    twin.load_state_dict(alone.state_dict())
    last = made(twin.parameters(), **options)
    last.load_state_dict(copy.deepcopy(state))
    for module, steps in ((alone, fresh), (twin, last)):
        backward(module, 5)
        steps.step()
    check(alone.parameters(), twin.parameters())
    backward(model)
    optimizer.step()
    with pytest.raises(RuntimeError, match="before the next step"):
        optimizer.state_dict()


@every
def test_a_state_of_other_groups(comm):
    optimizer = ZeroRedundancyOptimizer(layers().parameters(), torch.optim.Adam, comm)
    other = torch.optim.Adam(layers()[:2].parameters())
    with pytest.raises(ValueError, match=r"groups of \[2\] parameters, here are groups of \[6\]"):
        optimizer.load_state_dict(other.state_dict())


@every
def test_bad_arguments(comm):
    parameters = list(layers().parameters())
    for given, made, error, text in [
        ([], torch.optim.Adam, ValueError, "empty parameter list"),
        (parameters, 3, TypeError, "must be a subclass of torch.optim.Optimizer, not 3"),
        (parameters, torch.nn.Linear, TypeError, "must be a subclass"),
        (parameters, torch.optim.LBFGS, TypeError, "evaluates a closure within its step"),
        ([3], torch.optim.Adam, TypeError, "int"),
    ]:
        with pytest.raises(error, match=text):
            ZeroRedundancyOptimizer(given, made, comm)
    optimizer = ZeroRedundancyOptimizer(parameters, torch.optim.Adam, comm)
    with pytest.raises(ValueError, match="to is 99"):
        optimizer.consolidate_state_dict(99)
    with pytest.raises(ValueError, match="some parameters appear in more than one"):
        optimizer.add_param_group({"params": parameters[:1]})
    with pytest.raises(ValueError, match="learning rate"):
        ZeroRedundancyOptimizer(parameters, torch.optim.Adam, comm, lr=-1.0)


@several
@every
def test_parameters_that_differ(comm):
    n = 3 if comm.rank == 0 else 4
    with pytest.raises(ValueError, match=r"rank 0 has \[torch.float32 \(3,\)\], rank 1 \[torch"):
        ZeroRedundancyOptimizer([torch.nn.Parameter(torch.ones(n))], torch.optim.SGD, comm, lr=1.0)
    first = torch.nn.Parameter(torch.ones(2))
    optimizer = ZeroRedundancyOptimizer([first], torch.optim.SGD, comm, lr=1.0)
    for _ in range(2):
        with pytest.raises(ValueError, match="the ranks' parameters differ"):
            optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(n))]})
    assert len(optimizer.param_groups) == len(optimizer.optim.param_groups) == 1
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(5))]})
    first.grad = torch.ones(2)
    optimizer.step()
    assert first.tolist() == [0, 0]


class Breaking(torch.optim.SGD):
    """Its step fails where it is told."""

    fails = False

    def step(self, closure=None):
        if self.fails:
            raise ArithmeticError("mine")
        return super().step(closure)


@several
@every
def test_a_step_that_fails(comm, works):
    """All ranks hear of it, and go on in step."""
    model = layers()
    optimizer = ZeroRedundancyOptimizer(model.parameters(), Breaking, comm, lr=0.1)
    backward(model)
    optimizer.optim.fails = comm.rank == 1
    if comm.rank == 1:
        with pytest.raises(ArithmeticError, match="mine"):
            optimizer.step()
    else:
        with pytest.raises(RuntimeError, match="the step of the share of rank 1 failed"):
            optimizer.step()
    optimizer.optim.fails = False
    optimizer.step()
    works(comm)


@every
def test_copies_are_refused(comm):
    optimizer = ZeroRedundancyOptimizer(layers().parameters(), torch.optim.Adam, comm)
    with pytest.raises(TypeError, match="shared out over the ranks"):
        copy.deepcopy(optimizer)


@every
def test_its_communicator_goes_with_it(comm):
    for _ in range(3):
        optimizer = ZeroRedundancyOptimizer(layers().parameters(), torch.optim.Adam, comm)
        del optimizer
        gc.collect()
    comm.Dup().Free()
    assert comm._dropped == {}


# ---------------------------------------------------------------- Join


def alone_on(size, count, kind, by_all=True, accumulate=1, rates=(), clip=None):
    """What one process computes; rank r makes ``count(r)`` steps."""
    made, options = KINDS[kind]
    module = layers()
    optimizer = made(module.parameters(), **options)
    for k in range(max(map(count, range(size)))):
        active = [r for r in range(size) if count(r) > k]
        module.zero_grad()
        for r in active:
            for m in range(accumulate):
                part = loss(module(batch(r, accumulate * k + m)), r)
                (part / (size if by_all else len(active))).backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(module.parameters(), clip)
        for group in optimizer.param_groups:
            group["lr"] = rates[k] if rates else group["lr"]
        optimizer.step()
    return module


COUNTS = {
    "up": lambda size: lambda r: r + 1,
    "down": lambda size: lambda r: size - r,
    "shards": lambda size: lambda r: (10, 6, 0, 4)[r],
}


@ranks(1, 2, 3, 4)
@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("by_all", [True, False])
def test_with_a_model(comm, kind, counts, by_all):
    """As in torch's tutorial."""
    made, options = KINDS[kind]
    count = COUNTS[counts](comm.size)
    model = DataParallel(layers(), comm, bucket_bytes=100)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), made, comm, **options)
    with Join([model, optimizer], divide_by_initial_world_size=by_all) as context:
        for k in range(count(comm.rank)):
            optimizer.zero_grad()
            loss(model(batch(comm.rank, k)), comm.rank).backward()
            optimizer.step()
    check(model.module.parameters(), alone_on(comm.size, count, kind, by_all).parameters())
    same_everywhere(comm, model)
    longest = max(map(count, range(comm.size)))
    assert (context.iterations, context.shadowed) == (
        count(comm.rank), longest - count(comm.rank),
    )  # fmt: skip


@ranks(2, 3, 4)
@pytest.mark.parametrize("shadow", [False, True])
@pytest.mark.parametrize("on_error", ["abort", "propagate"])
def test_all_that_a_training_loop_does(comm, shadow, on_error):
    """Accumulation, clipping, a learning rate that changes, sums in between, and evaluation."""
    rates = [0.3 / (k + 1) for k in range(comm.size)]
    made, options = KINDS["Adam"]
    model = DataParallel(layers(), comm, bucket_bytes=1)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), made, comm, **options)
    joinables = [optimizer, comm, model] if shadow else [model, optimizer]
    sums = []
    with Join(joinables, on_error=on_error):
        for k in range(comm.rank + 1):
            optimizer.zero_grad()
            for m in range(3):
                with model.no_sync() if m < 2 else torch.enable_grad():
                    loss(model(batch(comm.rank, 3 * k + m)), comm.rank).backward()
            if shadow and k % 2 == 0:
                sums.append(comm.Allreduce(torch.ones(1), mpicoll.MPI_SUM).item())
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.2)
            optimizer.param_groups[0]["lr"] = rates[k]
            optimizer.step()
            with torch.no_grad():
                model(batch(comm.rank))
    assert sums == ([comm.size - k for k in range(0, comm.rank + 1, 2)] if shadow else [])
    expected = alone_on(comm.size, lambda r: r + 1, "Adam", True, 3, rates, 0.2)
    check(model.module.parameters(), expected.parameters())


@ranks(2, 3, 4)
def test_alone(comm):
    """The gradients need not come from a DataParallel; nor be there for every parameter."""
    parameters = [torch.nn.Parameter(torch.zeros(n)) for n in (2, 3, 4, 5)]
    optimizer = ZeroRedundancyOptimizer(parameters, torch.optim.SGD, comm, lr=1.0)
    with Join([optimizer]) as context:
        for k in range(comm.rank + 1):
            for i, p in enumerate(parameters):
                p.grad = None if (i + k) % 4 == 0 else torch.full_like(p, float(10**k))
            optimizer.step()
    assert (context.iterations, context.shadowed) == (comm.rank + 1, comm.size - 1 - comm.rank)
    for i, p in enumerate(parameters):
        total = -sum(10**k for k in range(comm.size) if (i + k) % 4)
        assert p.tolist() == [total] * len(p)


@ranks(2, 3)
def test_a_failure_reaches_all_ranks(comm, works):
    guilty = comm.size - 1
    model = DataParallel(layers(), comm, bucket_bytes=1)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), Breaking, comm, lr=0.1)

    def body():
        with Join([model, optimizer], on_error="propagate"):
            for k in range(1 if comm.rank == 0 else 4):
                optimizer.zero_grad()
                loss(model(batch(comm.rank, k))).backward()
                optimizer.optim.fails = comm.rank == guilty and k == 2
                optimizer.step()

    if comm.rank == guilty:
        with pytest.raises(ArithmeticError, match="mine"):
            body()
    else:
        with pytest.raises(JoinAborted, match=f"rank {guilty} left the Join context with Arith"):
            body()
    works(comm)


@every
def test_an_optimizer_that_is_not_in_the_list(comm, works):
    model = DataParallel(layers(), comm)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, comm)

    def body():
        with Join([model], on_error="propagate"):
            loss(model(batch(comm.rank))).backward()
            optimizer.step()

    with pytest.raises(RuntimeError, match=r"ZeroRedundancyOptimizer .* add it to the list"):
        body()
    optimizer.step()
    works(comm)


@every
def test_what_join_asks_for(comm):
    optimizer = ZeroRedundancyOptimizer(layers().parameters(), torch.optim.Adam, comm)
    assert isinstance(optimizer, Joinable)
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert optimizer.join_process_group is comm
    assert optimizer.join_device == torch.device("cpu")
