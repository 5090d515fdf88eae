"""DataParallel against one process that holds the data of all ranks, in plain torch."""

from __future__ import annotations

import copy
import dataclasses
import gc
import pickle
import weakref

import pytest
import torch
from groups import every, ranks, several
from torch.utils.checkpoint import checkpoint

import mpicoll
from mpicoll import watch
from mpicoll._core import nonblocking
from mpicoll.algorithms import CollectiveMismatchError, DataParallel, Join, Joinable, JoinAborted
from mpicoll.algorithms import JoinHook as Hook

CLOSE = {"rtol": 1e-12, "atol": 1e-12}
EXACT = {"rtol": 0, "atol": 0}


@pytest.fixture(autouse=True)
def nothing_is_left_in_flight(request):
    yield
    assert nonblocking.in_flight() == []


def layers(seed=0, dtype=torch.float64, **more):
    torch.manual_seed(seed)
    return torch.nn.Sequential(
        torch.nn.Linear(3, 5), torch.nn.Tanh(), torch.nn.Linear(5, 4), torch.nn.Tanh(),
        torch.nn.Linear(4, 1),
    ).to(dtype)  # fmt: skip


def batch(rank, k=0, n=6, dtype=torch.float64):
    made = torch.Generator().manual_seed(1000 * rank + k)
    return torch.randn(n, 3, generator=made, dtype=torch.float64).to(dtype)


def loss(output, rank=0):
    return ((output - rank).square().mean()) * (rank + 1)


def gradients(module, *losses):
    """The gradients of the sum of `losses` of one rank, without touching ``grad``."""
    return torch.autograd.grad(
        sum(losses), [p for p in module.parameters() if p.requires_grad], allow_unused=True
    )


def mean(parts, size=None):
    """The mean of the ranks' gradients; None counts as zero, None of all stays None."""
    result = []
    for some in zip(*parts, strict=True):
        there = [g for g in some if g is not None]
        result.append(sum(there) / (size or len(some)) if there else None)
    return result


def grads(model):
    return [p.grad for p in model.parameters() if p.requires_grad]


def check(got, wanted, close=CLOSE):
    assert [g is None for g in got] == [w is None for w in wanted]
    for g, w in zip(got, wanted, strict=True):
        if w is not None:
            torch.testing.assert_close(g, w, **close)


def same_everywhere(comm, tensors):
    told = comm.to_mpi4py().allgather([t.detach().tolist() for t in tensors])
    assert all(other == told[0] for other in told)


# ---------------------------------------------------------------- one backward


@ranks(1, 2, 3, 4)
@pytest.mark.parametrize("bucket_bytes", [1, 100, 25 << 20])
def test_gradients_are_averaged(comm, bucket_bytes):
    model = DataParallel(layers(), comm, bucket_bytes=bucket_bytes)
    alone = layers()
    for k in range(3):
        model.zero_grad()
        loss(model(batch(comm.rank, k)), comm.rank).backward()
        parts = [gradients(alone, loss(alone(batch(r, k)), r)) for r in range(comm.size)]
        check(grads(model), mean(parts))


@every
def test_all_start_like_rank_0(comm):
    made = torch.nn.Sequential(
        torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 1)
    )
    with torch.no_grad():
        for tensor in made.state_dict().values():
            tensor.fill_(comm.rank + 1)
        made[0].weight.requires_grad_(False)
    model = DataParallel(made, comm, bucket_bytes=20)
    assert model.module is made
    for name, tensor in model.state_dict().items():
        assert name.startswith("module.")
        assert torch.equal(tensor, torch.ones_like(tensor))


@every
@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64]
)
def test_dtypes(comm, dtype):
    """16 bit floats exactly: added in float32, in rank order, and rounded once."""

    class Scale(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.w = torch.nn.Parameter(torch.ones(700, dtype=dtype))  # more than goes in one step
            self.v = torch.nn.Parameter(torch.ones(3, dtype=dtype))

        def forward(self, x):
            result = (self.w * x).sum() + self.v.sum() * x[0]
            return result.real if dtype.is_complex else result

    def data(r):
        made = torch.Generator().manual_seed(r)
        real = torch.randn(700, generator=made)
        if dtype.is_complex:
            return torch.complex(real, torch.randn(700, generator=made)).to(dtype)
        return real.to(dtype)

    model, alone = DataParallel(Scale(), comm), Scale()
    model(data(comm.rank)).backward()
    parts = [gradients(alone, alone(data(r))) for r in range(comm.size)]
    half = dtype in (torch.float16, torch.bfloat16)
    wide = [[g.float() if half else g for g in some] for some in parts]
    check(grads(model), [g.to(dtype) for g in mean(wide)], EXACT if half else {})


@every
def test_several_dtypes_in_one_module(comm):
    made = torch.nn.ModuleList([layers(1, torch.float32), layers(2, torch.float64)])

    class Both(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = copy.deepcopy(made)

        def forward(self, x):
            return self.parts[1](x) + self.parts[0](x.float()).double()

    model, alone = DataParallel(Both(), comm, bucket_bytes=70), Both()
    loss(model(batch(comm.rank))).backward()
    parts = [gradients(alone, loss(alone(batch(r)))) for r in range(comm.size)]
    check(grads(model), mean(parts), {"rtol": 1e-5, "atol": 1e-6})
    assert [g.dtype for g in grads(model)] == [torch.float32] * 6 + [torch.float64] * 6


class Branches(torch.nn.Module):
    """Uses the layers that it is told to."""

    def __init__(self, n=4):
        super().__init__()
        torch.manual_seed(5)
        self.layers = torch.nn.ModuleList([torch.nn.Linear(3, 3).double() for _ in range(n)])

    def forward(self, x, which):
        for i in which:
            x = self.layers[i](x)
        return x


def chosen(rank, size):
    """Branch 3 is used by nobody, branch 0 only by the last rank."""
    return [1 + rank % 2] if rank < size - 1 else [1 + rank % 2, 0]


@ranks(1, 2, 3, 4)
@pytest.mark.parametrize("find", [False, True])
@pytest.mark.parametrize("bucket_bytes", [1, 25 << 20])
def test_unused_parameters(comm, bucket_bytes, find):
    model = DataParallel(Branches(), comm, bucket_bytes=bucket_bytes, find_unused_parameters=find)
    alone = Branches()
    for _ in range(2):
        model.zero_grad()
        loss(model(batch(comm.rank), chosen(comm.rank, comm.size))).backward()
        parts = [
            gradients(alone, loss(alone(batch(r), chosen(r, comm.size)))) for r in range(comm.size)
        ]
        check(grads(model), mean(parts))
    assert model.module.layers[3].weight.grad is None
    kept = model.module.layers[3].weight.grad = torch.full((3, 3), 7.0).double()
    loss(model(batch(comm.rank), [0])).backward()
    assert model.module.layers[3].weight.grad is kept
    torch.testing.assert_close(kept, torch.full_like(kept, 7.0), **CLOSE)


@several
@every
def test_find_unused_parameters_starts_before_the_end(comm):
    """The buckets of what is not used do not hold up the others."""
    started = []
    for find in (False, True):
        model = DataParallel(Branches(3), comm, bucket_bytes=1, find_unused_parameters=find)
        observer = watch.observe(lambda event: started.append(event.op), lambda event: None)
        try:
            x = batch(comm.rank).requires_grad_()
            output = model(x, [0, 1])  # the buckets of branch 2 are the first
            del started[:]
            x.register_hook(lambda _: started.append("the end"))
            loss(output).backward()
        finally:
            watch.stop(observer)
        before = started.index("the end")
        assert before >= 4 if find else before == 0
        assert started.count("Allreduce") == 6


@every
def test_frozen_and_shared_parameters(comm):
    class Tied(torch.nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(3)
            self.first = torch.nn.Linear(3, 3).double()
            self.second = torch.nn.Linear(3, 3).double()
            self.second.weight = self.first.weight
            self.frozen = torch.nn.Linear(3, 1).double().requires_grad_(False)

        def forward(self, x):
            return self.frozen(self.second(self.first(x).tanh()))

    model, alone = DataParallel(Tied(), comm), Tied()
    loss(model(batch(comm.rank))).backward()
    parts = [gradients(alone, loss(alone(batch(r)))) for r in range(comm.size)]
    check(grads(model), mean(parts))
    assert len(grads(model)) == 3
    assert model.module.frozen.weight.grad is None
    model.module.frozen.weight.requires_grad_(True)
    with pytest.raises(RuntimeError, match=r"'frozen.weight' requires a gradient now"):
        model(batch(comm.rank))


@every
def test_memory_formats(comm):
    torch.manual_seed(0)
    made = torch.nn.Conv2d(2, 3, 3).double().to(memory_format=torch.channels_last)
    model, alone = DataParallel(made, comm), copy.deepcopy(made)
    data = [torch.randn(2, 2, 5, 5, generator=torch.Generator().manual_seed(r)).double()
            for r in range(comm.size)]  # fmt: skip
    loss(model(data[comm.rank])).backward()
    check(grads(model), mean([gradients(alone, loss(alone(x))) for x in data]))
    assert made.weight.grad.stride() == made.weight.stride()


# ---------------------------------------------------------------- several backwards


@ranks(1, 2, 3, 4)
def test_accumulation_without_synchronization(comm):
    """Only one rank uses branch 0, and only within no_sync."""
    model, alone = DataParallel(Branches(), comm, bucket_bytes=1), Branches()
    for _ in range(2):
        model.zero_grad()
        which = [1, 0] if comm.rank == comm.size - 1 else [1]
        with model.no_sync():
            assert not model.require_backward_grad_sync
            output = model(batch(comm.rank, 0), which)
        before = nonblocking.in_flight()
        loss(output).backward()  # what counts is where forward was called
        assert nonblocking.in_flight() == before == []
        mine = gradients(alone, loss(alone(batch(comm.rank, 0), which)))
        check(grads(model), mine)
        assert model.require_backward_grad_sync
        loss(model(batch(comm.rank, 1), [1])).backward()
        parts = [
            gradients(
                alone,
                loss(alone(batch(r, 0), [1, 0] if r == comm.size - 1 else [1])),
                loss(alone(batch(r, 1), [1])),
            )
            for r in range(comm.size)
        ]
        check(grads(model), mean(parts))


@every
def test_accumulation_with_synchronization(comm):
    model, alone = DataParallel(layers(), comm), layers()
    for k in range(3):
        loss(model(batch(comm.rank, k)), comm.rank).backward()
    parts = [
        gradients(alone, *(loss(alone(batch(r, k)), r) for k in range(3))) for r in range(comm.size)
    ]
    check(grads(model), mean(parts))
    model.zero_grad(set_to_none=False)
    loss(model(batch(comm.rank, 7)), comm.rank).backward()
    parts = [gradients(alone, loss(alone(batch(r, 7)), r)) for r in range(comm.size)]
    check(grads(model), mean(parts))


@every
def test_backward_twice_through_one_graph(comm):
    model, alone = DataParallel(layers(), comm), layers()
    total = loss(model(batch(comm.rank)), comm.rank)
    for times in (1, 2, 3):
        total.backward(retain_graph=True)
        parts = [gradients(alone, loss(alone(batch(r)), r)) for r in range(comm.size)]
        check(grads(model), [times * g for g in mean(parts)])


@every
def test_several_forwards_before_one_backward(comm):
    model, alone = DataParallel(layers(), comm), layers()
    (loss(model(batch(comm.rank, 0))) + loss(model(batch(comm.rank, 1)), 1)).backward()
    parts = [
        gradients(alone, loss(alone(batch(r, 0))), loss(alone(batch(r, 1)), 1))
        for r in range(comm.size)
    ]
    check(grads(model), mean(parts))
    model.zero_grad()
    first, second = loss(model(batch(comm.rank, 0))), loss(model(batch(comm.rank, 1)), 1)
    first.backward()
    second.backward()
    check(grads(model), mean(parts))


@every
def test_two_models(comm):
    """Each on a communicator of its own; backward comes to both at once."""
    first, second = DataParallel(layers(1), comm), DataParallel(layers(2), comm)
    alone = layers(1), layers(2)
    (loss(first(batch(comm.rank))) * loss(second(batch(comm.rank, 1)))).backward()

    def both(r):
        return loss(alone[0](batch(r))) * loss(alone[1](batch(r, 1)))

    for model, plain in zip((first, second), alone, strict=True):
        check(grads(model), mean([gradients(plain, both(r)) for r in range(comm.size)]))


@every
@pytest.mark.parametrize("bucket_bytes", [1, 25 << 20])
def test_two_models_in_one_pass_in_any_order(comm, bucket_bytes):
    """The ranks come to the models, and to their ends, in different orders."""
    models = [DataParallel(Branches(), comm, bucket_bytes=bucket_bytes) for _ in range(2)]
    alone = [Branches() for _ in range(2)]

    def total(both, r):
        first, second = both if r % 2 == 0 else both[::-1]
        x = first(batch(r), [r % 3])
        return loss(second(x, [1, (r + 1) % 3])) + loss(first(batch(r, 1), [2]))

    for _ in range(2):
        for model in models:
            model.zero_grad()
        total(models, comm.rank).backward()
        parts = [
            torch.autograd.grad(
                total(alone, r), [p for m in alone for p in m.parameters()], allow_unused=True
            )
            for r in range(comm.size)
        ]
        # A mean over all ranks, those that have not used a parameter counted as zero.
        wanted = [None if g is None else g for g in mean(parts, comm.size)]
        check([g for model in models for g in grads(model)], wanted)


@every
def test_torch_autograd_grad_communicates_nothing(comm):
    """It gives the gradient of this rank; a penalty on it is averaged like any other loss."""
    model, alone = DataParallel(layers(), comm), layers()
    x = batch(comm.rank).requires_grad_()
    if comm.rank == 0:
        check(*(torch.autograd.grad(loss(module(x)), [x]) for module in (model, alone)))
    (inner,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    assert grads(model) == [None] * 6
    inner.square().sum().backward()

    def penalty(r):
        y = batch(r).requires_grad_()
        return torch.autograd.grad(alone(y).sum(), y, create_graph=True)[0].square().sum()

    check(grads(model), mean([gradients(alone, penalty(r)) for r in range(comm.size)]))


@every
def test_the_module_itself_communicates_nothing(comm):
    model = DataParallel(layers(), comm)
    loss(model(batch(comm.rank))).backward()
    model.zero_grad()
    if comm.rank == 0:
        loss(model.module(batch(0))).backward()
        alone = layers()
        check(grads(model), gradients(alone, loss(alone(batch(0)))))
        with torch.no_grad():
            model(batch(0))
    comm.Barrier()


# ---------------------------------------------------------------- what forward returns


@dataclasses.dataclass
class Output:
    main: torch.Tensor
    other: object = None


class Opaque:
    __slots__ = ("hidden",)

    def __init__(self, hidden):
        self.hidden = hidden


SHAPES = {
    "dict": (lambda y: {"a": [y, 3]}, lambda o: o["a"][0]),
    "dataclass": (lambda y: Output(y), lambda o: o.main),
    "nested": (lambda y: Output(None, {"x": (y,)}), lambda o: o.other["x"][0]),
    "opaque": (Opaque, lambda o: o.hidden),
}


@every
@pytest.mark.parametrize("find", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_outputs_of_any_shape(comm, shape, find):
    """Also where none of the wrapper's outputs can be seen."""
    wrap, unwrap = SHAPES[shape]

    class Wrapping(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = layers()

        def forward(self, x):
            return wrap(self.inner(x))

    model, alone = DataParallel(Wrapping(), comm, find_unused_parameters=find), layers()
    for _ in range(2):
        model.zero_grad()
        total = loss(unwrap(model(batch(comm.rank))))
        for times in (1, 2):
            total.backward(retain_graph=True)
            parts = [gradients(alone, loss(alone(batch(r)))) for r in range(comm.size)]
            check(grads(model), [times * g for g in mean(parts)])


@every
@pytest.mark.parametrize("find", [False, True])
def test_a_parameter_as_output(comm, find):
    class Own(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.w, self.v = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))

        def forward(self):
            return self.w

    model = DataParallel(Own(), comm, bucket_bytes=1, find_unused_parameters=find)
    for _ in range(2):
        model.zero_grad()
        (model() * (comm.rank + 1)).sum().backward()
        assert model.module.w.grad.tolist() == [(comm.size + 1) / 2] * 2
        assert model.module.v.grad is None


class Auxiliary(torch.nn.Module):
    """Keeps a part of the loss that its outputs do not show."""

    def __init__(self, early=False):
        super().__init__()
        self.early = early
        self.inner = layers()
        self.scale = torch.nn.Parameter(torch.ones(2).double())

    def forward(self, x):
        output = None if self.early else self.inner(x)
        self.kept = (self.scale * x.sum()).square().sum()
        return self.inner(x) if self.early else output


@every
@pytest.mark.parametrize("only", [False, True])
@pytest.mark.parametrize("early", [False, True])
def test_losses_that_the_outputs_do_not_show(comm, only, early):
    """Backward comes to that part after the outputs, or (not `early`) before."""
    model, alone = DataParallel(Auxiliary(early), comm, bucket_bytes=1), Auxiliary(early)

    def total(module, rank):
        output = loss(module(batch(rank)))
        kept = (alone if module is alone else module.module).kept
        return kept if only else output + kept

    for _ in range(2):
        model.zero_grad()
        once = total(model, comm.rank)
        for times in (1,) if only else (1, 2):  # the second pass is known by the outputs only
            once.backward(retain_graph=True)
            parts = [gradients(alone, total(alone, r)) for r in range(comm.size)]
            check(grads(model), [g if g is None else times * g for g in mean(parts)])


@every
def test_what_find_unused_parameters_cannot_see_is_an_error(comm):
    model = DataParallel(Auxiliary(True), comm, bucket_bytes=1, find_unused_parameters=True)
    total = loss(model(batch(comm.rank))) + model.module.kept
    with pytest.raises(RuntimeError, match=r"parameter 'scale' has changed after it was sent"):
        total.backward()
    model.zero_grad()
    loss(model(batch(comm.rank))).backward()
    assert model.module.scale.grad is None
    assert all(p.grad is not None for p in model.module.inner.parameters())


# ---------------------------------------------------------------- checkpoints


class Checkpointed(torch.nn.Module):
    """All its parameters lie in checkpoints: where reentrant, a backward pass inside the other."""

    def __init__(self, reentrant, nested):
        super().__init__()
        torch.manual_seed(4)
        self.parts = torch.nn.ModuleList([torch.nn.Linear(3, 3).double() for _ in range(4)])
        self.reentrant, self.nested = reentrant, nested

    def two(self, i, x):
        return self.parts[i + 1](self.parts[i](x).tanh()).tanh()

    def again(self, function, *args):
        if self.reentrant is None:
            return function(*args)
        return checkpoint(function, *args, use_reentrant=self.reentrant)

    def all_parts(self, x):
        return self.again(self.two, 2, self.again(self.two, 0, x))

    def forward(self, x):
        x = x.requires_grad_()
        return self.again(self.all_parts, x) if self.nested else self.all_parts(x)


@every
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # within the outer one
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("bucket_bytes", [1, 25 << 20])
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("opaque", [False, True])
def test_checkpoints(comm, reentrant, bucket_bytes, nested, opaque):
    class Wrapped(Checkpointed):
        def forward(self, x):
            y = super().forward(x)
            return Opaque(y) if opaque else y

    model = DataParallel(Wrapped(reentrant, nested), comm, bucket_bytes=bucket_bytes)
    alone = Checkpointed(None, nested)
    for k in range(2):
        model.zero_grad()
        output = model(batch(comm.rank, k))
        loss(output.hidden if opaque else output).backward()
        parts = [gradients(alone, loss(alone(batch(r, k)))) for r in range(comm.size)]
        check(grads(model), mean(parts))


@every
@pytest.mark.parametrize("reentrant", [False, True])
def test_the_wrapper_within_checkpoints(comm, reentrant):
    model, alone = DataParallel(layers(), comm, bucket_bytes=1), layers()
    for _ in range(2):
        model.zero_grad()
        y = [
            checkpoint(model, batch(comm.rank, k).requires_grad_(), use_reentrant=reentrant)
            for k in range(2)
        ]
        loss(y[0] + 2 * y[1]).backward()
        parts = [
            gradients(alone, loss(alone(batch(r, 0)) + 2 * alone(batch(r, 1))))
            for r in range(comm.size)
        ]
        check(grads(model), mean(parts))


# ---------------------------------------------------------------- order and overlap


@several
@every
def test_buckets_start_in_one_order_while_backward_goes_on(comm):
    """The ranks reach the layers in different orders; the messages have one order."""

    class Sum(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = torch.nn.ParameterList([torch.ones(n + 2).double() for n in range(5)])

        def forward(self, order):
            total = 0
            for i in order:  # backward goes the other way
                total = total + (self.parts[i] * (comm.rank + 1)).sum()
            return total

    model = DataParallel(Sum(), comm, bucket_bytes=1)
    log = []
    for i, p in enumerate(model.module.parts):
        p.register_post_accumulate_grad_hook(lambda p, i=i: log.append(i))
    events = []

    def started(event):
        events.append((event.op, event.direction, event.reduce_op, event.dtype))
        log.append(("start", event.count))

    observer = watch.observe(started, lambda event: log.append(("end", event.count)))
    order = [0, 1, 2, 3, 4] if comm.rank % 2 == 0 else [2, 4, 3, 1, 0]
    try:
        output = model(order)
        del log[:]
        output.backward()
    finally:
        watch.stop(observer)
    assert events == [("Allreduce", "backward", "AVG", torch.float64)] * 5
    sizes = [n + 2 + 2 for n in range(5)][::-1]  # one more for the parameter, one for failures
    assert [n for word, n in (x for x in log if isinstance(x, tuple)) if word == "start"] == sizes
    assert [n for word, n in (x for x in log if isinstance(x, tuple)) if word == "end"] == sizes
    assert log.index(("end", sizes[0])) > log.index(("start", sizes[-1]))
    if comm.rank == 0:
        assert log.index(("start", sizes[0])) < log.index(0), "before the last gradient is there"
    mine = (comm.size + 1) / 2
    for p in model.module.parts:
        assert p.grad.tolist() == [mine] * len(p)


# ---------------------------------------------------------------- failures


class Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, fails):
        ctx.fails = fails
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        if ctx.fails:
            raise ArithmeticError("mine")
        return g, None


class Fragile(torch.nn.Module):
    """Backward fails between its two layers."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.first, self.second = (torch.nn.Linear(3, 3).double() for _ in range(2))

    def forward(self, x, fails=False):
        return self.second(Failing.apply(self.first(x), fails))


@several
@every
@pytest.mark.parametrize("bucket_bytes", [1, 25 << 20])
def test_an_exception_in_backward(comm, bucket_bytes):
    model, alone = DataParallel(Fragile(), comm, bucket_bytes=bucket_bytes), Fragile()
    for who in ([comm.size - 1], [0], range(comm.size)):
        if comm.rank in who:
            with pytest.raises(ArithmeticError, match="mine"):
                loss(model(batch(comm.rank), True)).backward()
        else:
            with pytest.raises(RuntimeError, match="backward failed on another rank"):
                loss(model(batch(comm.rank))).backward()
        model.zero_grad()
        loss(model(batch(comm.rank, 1))).backward()  # this releases the others
        parts = [gradients(alone, loss(alone(batch(r, 1)))) for r in range(comm.size)]
        check(grads(model), mean(parts))


@every
def test_a_module_that_is_moved(comm):
    model, alone = DataParallel(layers(), comm), layers()
    loss(model(batch(comm.rank))).backward()
    for dtype in (torch.float32, torch.float64):
        for module in (model, alone):
            module.to(dtype)
        model.zero_grad()
        loss(model(batch(comm.rank, dtype=dtype))).backward()
        parts = [gradients(alone, loss(alone(batch(r, dtype=dtype)))) for r in range(comm.size)]
        check(grads(model), mean(parts), {})


@every
def test_gradients_of_another_dtype(comm):
    model = DataParallel(layers(), comm)
    loss(model(batch(comm.rank))).backward()
    model.zero_grad()
    output = model(batch(comm.rank))
    weight = model.module[4].weight
    old = weight.data

    def narrow(p):
        p.data = p.data.float()
        p.grad = p.grad.float()

    handle = weight.register_post_accumulate_grad_hook(narrow)
    with pytest.raises(TypeError, match=r"'4.weight' is torch.strided, torch.float32, on cpu"):
        loss(output).backward()
    handle.remove()
    weight.grad = None
    weight.data = old
    model.zero_grad()
    loss(model(batch(comm.rank))).backward()
    alone = layers()
    check(grads(model), mean([gradients(alone, loss(alone(batch(r)))) for r in range(comm.size)]))


class Looking(torch.nn.Module):
    """A gradient that is sparse although no embedding is there."""

    def __init__(self):
        super().__init__()
        self.table = torch.nn.Parameter(torch.ones(5, 2))

    def forward(self, i):
        return torch.nn.functional.embedding(i, self.table, sparse=True)


@every
def test_sparse_gradients(comm):
    model = DataParallel(Looking(), comm)
    with pytest.raises(TypeError, match=r"gradient of parameter 'table' is torch.sparse_coo"):
        model(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(TypeError, match="sparse=False"):
        DataParallel(torch.nn.Sequential(torch.nn.Embedding(3, 2, sparse=True)), comm)


@every
def test_bad_arguments(comm):
    linear = torch.nn.Linear(2, 2)
    for module, options, error, text in [
        (3, {}, TypeError, "module must be a torch.nn.Module, not int"),
        (linear, {"bucket_bytes": 0}, ValueError, "bucket_bytes is 0"),
        (linear, {"bucket_bytes": 1.5}, TypeError, "bucket_bytes must be an integer"),
        (torch.nn.Tanh(), {}, ValueError, "no parameter of the module requires a gradient"),
        (torch.nn.LazyLinear(3), {}, ValueError, "not initialized yet"),
        (torch.nn.Linear(2, 2, device="meta"), {}, TypeError, "meta tensor"),
    ]:
        with pytest.raises(error, match=text):
            DataParallel(module, comm, **options)
    with pytest.raises(TypeError, match="group must be None"):
        DataParallel(linear, "world")


@several
@every
def test_modules_that_differ(comm):
    first = comm.rank == 0

    def named(name):
        module = torch.nn.Module()
        setattr(module, name, torch.nn.Parameter(torch.ones(3)))
        return module

    for module, options, text in [
        (torch.nn.Linear(2, 2 if first else 3), {}, r"float32 of shape \(2, 2\), requires grad"),
        (torch.nn.Linear(2, 2, bias=first), {}, "has 2 parameters and buffers, rank 1 has 1"),
        (torch.nn.Linear(2, 2).to(torch.float32 if first else torch.float64), {}, "torch.float64"),
        (torch.nn.Linear(2, 2).requires_grad_(True), {"bucket_bytes": 5 + comm.rank},
         r"disagree on bucket_bytes \(rank 0: 5, rank 1: 6"),
        (named("a" if first else "b"), {}, "of another name on rank 1"),
        (torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.BatchNorm1d(1, affine=False,
         track_running_stats=first)), {}, "rank 1 has 2"),
    ]:  # fmt: skip
        with pytest.raises(ValueError, match=text) as caught:
            DataParallel(module, comm, **options)
        assert f"DataParallel on rank {comm.rank} of {comm.size}" in str(caught.value)


# ---------------------------------------------------------------- buffers


def normalized():
    torch.manual_seed(1)
    return torch.nn.Sequential(
        torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1)
    ).double()


@ranks(1, 2, 3, 4)
@pytest.mark.parametrize("broadcasts", [True, False])
def test_buffers(comm, broadcasts):
    model, alone = DataParallel(normalized(), comm, broadcast_buffers=broadcasts), normalized()
    for k in range(3):
        before = [b.clone() for b in model.module.buffers()]
        output = model(batch(comm.rank, k))
        loss(output).backward()
        after = {r: copy.deepcopy(alone) for r in range(comm.size)}
        for r, each in after.items():
            each(batch(r, k if broadcasts else 0))
        if broadcasts:  # all started from those of rank 0
            check(list(model.module.buffers()), list(after[comm.rank].buffers()))
            alone = after[0]
        else:
            moved = torch.nn.BatchNorm1d(4).double()
            for b, value in zip(moved.buffers(), before, strict=True):
                b.copy_(value)
            moved(model.module[0](batch(comm.rank, k)))
            check(list(model.module.buffers()), list(moved.buffers()))


@every
def test_buffers_that_do_not_change_leave_graphs_valid(comm):
    model = DataParallel(normalized(), comm)
    model.eval()
    assert not model.module[1].training
    first, second = model(batch(comm.rank, 0)), model(batch(comm.rank, 1))
    loss(first + second).backward()
    alone = normalized().eval()
    parts = [
        gradients(alone, loss(alone(batch(r, 0)) + alone(batch(r, 1)))) for r in range(comm.size)
    ]
    check(grads(model), mean(parts))
    assert model.train().module[1].training


# ---------------------------------------------------------------- copies


@every
def test_copies(comm):
    model = DataParallel(layers(), comm)
    loss(model(batch(comm.rank))).backward()
    twin = copy.deepcopy(model)
    twin.zero_grad()
    loss(twin(batch(comm.rank)), comm.rank).backward()
    alone = layers()
    check(grads(twin), mean([gradients(alone, loss(alone(batch(r)), r)) for r in range(comm.size)]))
    check(grads(model), mean([gradients(alone, loss(alone(batch(r)))) for r in range(comm.size)]))
    with pytest.raises(TypeError, match="cannot be pickled"):  # the communicator
        pickle.dumps(model)
    other = DataParallel(layers(9), comm)
    other.load_state_dict(model.state_dict())
    check(list(other.parameters()), list(model.parameters()), EXACT)


@every
def test_wrapped_again(comm):
    """The wrapper before it has nothing to say any more."""
    made = layers()
    first = DataParallel(made, comm)
    loss(first(batch(comm.rank))).backward()
    second = DataParallel(made, comm)
    made.zero_grad()
    loss(second(batch(comm.rank))).backward()
    alone = layers()
    check(grads(made), mean([gradients(alone, loss(alone(batch(r)))) for r in range(comm.size)]))
    del first
    made.zero_grad()
    loss(second(batch(comm.rank))).backward()
    check(grads(made), mean([gradients(alone, loss(alone(batch(r)))) for r in range(comm.size)]))


# ---------------------------------------------------------------- Join

SHARDS = (100, 60, 0, 37)
RATE = 0.05


def shard(rank):
    """The batches of a rank: 100, 60, 0 and 37 samples, ten in a batch."""
    n = SHARDS[rank % 4]
    made = torch.Generator().manual_seed(rank)
    x = torch.randn(n, 3, generator=made, dtype=torch.float64)
    return list(x.split(10)) if n else []


def alone_on(make, shards, by_all):
    """What one process computes for the same schedule of averages."""
    module, size = make(), len(shards)
    optimizer = torch.optim.SGD(module.parameters(), lr=RATE)
    states = [list(module.buffers())] * size  # the buffers of each rank
    for k in range(max(map(len, shards))):
        active = [r for r in range(size) if len(shards[r]) > k]
        parts, start = [], states[active[-1]]
        for r in active:
            each = copy.deepcopy(module)
            for b, value in zip(each.buffers(), start, strict=True):
                b.copy_(value)
            parts.append(gradients(each, loss(each(shards[r][k]), r)))
            states[r] = list(each.buffers())
        for p, g in zip(module.parameters(), mean(parts, size if by_all else None), strict=True):
            p.grad = g
        optimizer.step()
    for b, value in zip(module.buffers(), states[active[-1]], strict=True):
        b.copy_(value)
    return module


def train(model, optimizer, batches, rank):
    for x in batches:
        optimizer.zero_grad()
        loss(model(x), rank).backward()
        optimizer.step()


@ranks(1, 2, 3, 4)
@pytest.mark.parametrize("by_all", [True, False])
@pytest.mark.parametrize("on_error", ["abort", "propagate"])
@pytest.mark.parametrize("make", [layers, normalized])
def test_uneven_shards(comm, by_all, on_error, make):
    model = DataParallel(make(), comm, bucket_bytes=100)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    options = {} if by_all else {"divide_by_initial_world_size": False}
    with Join([model], on_error=on_error, **options) as context:
        train(model, optimizer, shard(comm.rank), comm.rank)
    expected = alone_on(make, [shard(r) for r in range(comm.size)], by_all)
    close = {"rtol": 1e-9, "atol": 1e-11}
    check(list(model.state_dict().values()), list(expected.state_dict().values()), close)
    same_everywhere(comm, model.state_dict().values())
    mine = len(shard(comm.rank))
    assert (context.iterations, context.shadowed) == (mine, 10 - mine)
    train(model, optimizer, [batch(comm.rank, 50)], comm.rank)  # together again


@ranks(2, 3, 4)
@pytest.mark.parametrize("first", ["lowest", "highest"])
def test_buffers_come_from_who_has_inputs(comm, first):
    def batches(r):
        count = r + 1 if first == "lowest" else comm.size - r
        return [batch(r, k) for k in range(count)]

    model = DataParallel(normalized(), comm)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    with Join([model]):
        train(model, optimizer, batches(comm.rank), comm.rank)
    expected = alone_on(normalized, [batches(r) for r in range(comm.size)], True)
    check(list(model.state_dict().values()), list(expected.state_dict().values()))


@ranks(2, 3, 4)
@pytest.mark.parametrize("shadow", [False, True])
def test_accumulation_in_join(comm, shadow):
    """Four forwards for a step, the first three without averages; ranks run out at steps."""
    model, alone = DataParallel(layers(), comm, bucket_bytes=1), layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    steps = comm.rank + 1
    total = 0.0
    with Join([comm, model] if shadow else [model], on_error="propagate"):
        for k in range(steps):
            optimizer.zero_grad()
            for m in range(4):
                with model.no_sync() if m < 3 else torch.enable_grad():
                    part = loss(model(batch(comm.rank, 4 * k + m)), comm.rank)
                    part.backward()
                    if shadow and m % 2 == 0:  # any number of others in between
                        total += comm.Allreduce(torch.ones(1), mpicoll.MPI_SUM).item()
            with torch.no_grad():
                model(batch(comm.rank))
            optimizer.step()
    assert total == (2 * sum(comm.size - k for k in range(steps)) if shadow else 0)
    other = torch.optim.SGD(alone.parameters(), lr=RATE)
    for k in range(comm.size):
        parts = [
            gradients(alone, *(loss(alone(batch(r, 4 * k + m)), r) for m in range(4)))
            for r in range(k, comm.size)
        ]
        for p, g in zip(alone.parameters(), mean(parts, comm.size), strict=True):
            p.grad = g
        other.step()
    check(list(model.parameters()), list(alone.parameters()))


@ranks(2, 3, 4)
@pytest.mark.parametrize("find", [False, True])
def test_unused_parameters_in_join(comm, find):
    model = DataParallel(Branches(), comm, bucket_bytes=1, find_unused_parameters=find)
    alone = Branches()
    with Join([model]):
        for k in range(comm.rank + 1):
            model.zero_grad()
            loss(model(batch(comm.rank, k), chosen(comm.rank, comm.size))).backward()
            parts = [
                gradients(alone, loss(alone(batch(r, k), chosen(r, comm.size))))
                for r in range(k, comm.size)
            ]
            check(grads(model), mean(parts, comm.size))
    # Ranks that had run out have the gradients of the others, too.
    last = comm.size - 1
    parts = [gradients(alone, loss(alone(batch(last, last), chosen(last, comm.size))))]
    check(grads(model), mean(parts, comm.size))


class Counting(Joinable):
    """An all-reduce per iteration on the communicator of all."""

    def __init__(self, comm):
        super().__init__()
        self.comm, self.mains, self.posts = comm, 0, []

    def add(self):
        Join.notify_join_context(self)
        return self.comm.Allreduce(torch.ones(1), mpicoll.MPI_SUM).item()

    def join_hook(self, **kwargs):
        return _CountingHook(self)

    @property
    def join_device(self):
        return torch.device("cpu")

    @property
    def join_process_group(self):
        return self.comm


class _CountingHook(Hook):
    def __init__(self, counting):
        self.counting = counting

    def main_hook(self):
        self.counting.mains += 1
        self.counting.comm.Allreduce(torch.zeros(1), mpicoll.MPI_SUM)

    def post_hook(self, is_last_joiner):
        self.counting.posts.append(is_last_joiner)


@ranks(2, 3, 4)
@pytest.mark.parametrize("first", ["model", "counting"])
@pytest.mark.parametrize("backward", [True, False])
@pytest.mark.parametrize("on_error", ["abort", "propagate"])
def test_with_a_joinable_of_the_users_own(comm, first, on_error, backward):
    """In the order of the list, whose hooks are then run in it."""
    model, counting = DataParallel(layers(), comm, bucket_bytes=1), Counting(comm)
    joinables = [model, counting] if first == "model" else [counting, model]
    totals = []
    with Join(joinables, on_error=on_error) as context:
        for k in range(comm.rank + 1):
            model.zero_grad()
            if first == "counting":
                totals.append(counting.add())
            with torch.enable_grad() if backward else model.no_sync():
                loss(model(batch(comm.rank, k))).backward()
            if first == "model":
                totals.append(counting.add())
    assert totals == [comm.size - k for k in range(comm.rank + 1)]
    behind = comm.size - 1 - comm.rank
    assert (counting.mains, counting.posts) == (behind, [behind == 0])
    assert (context.iterations, context.shadowed) == (comm.rank + 1, behind)


@ranks(2, 3, 4)
def test_with_a_communicator_that_nobody_uses(comm):
    """Who ran out last is known also where the communicator has announced nothing."""
    model = DataParallel(layers(), comm)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    with Join([comm, model]):
        train(model, optimizer, [batch(comm.rank, k) for k in range(comm.size - comm.rank)], 0)
    alone = layers()
    other = torch.optim.SGD(alone.parameters(), lr=RATE)
    for k in range(comm.size):
        parts = [gradients(alone, loss(alone(batch(r, k)))) for r in range(comm.size - k)]
        for p, g in zip(alone.parameters(), mean(parts, comm.size), strict=True):
            p.grad = g
        other.step()
    check(list(model.parameters()), list(alone.parameters()))


@ranks(2, 3, 4)
@pytest.mark.parametrize("on_error", ["abort", "propagate"])
def test_early_termination(comm, on_error, works):
    model = DataParallel(layers(), comm)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    done = 0

    def body():
        nonlocal done
        with Join([model], throw_on_early_termination=True, on_error=on_error):
            for k in range(2 if comm.rank == 0 else 4):
                train(model, optimizer, [batch(comm.rank, k)], comm.rank)
                done += 1

    with pytest.raises(RuntimeError, match=r"exhausted") as caught:
        body()
    assert type(caught.value) is RuntimeError
    assert done == 2
    train(model, optimizer, [batch(comm.rank, 9)], comm.rank)
    works(comm)


@ranks(2, 3, 4)
@pytest.mark.parametrize("where", ["body", "forward", "backward", "late"])
@pytest.mark.parametrize("out", [False, True])
def test_a_failure_reaches_all_ranks(comm, where, out, works):
    """Also those that wait for a bucket, and those that have run out of inputs."""
    guilty = comm.size - 1
    model = DataParallel(Fragile(), comm, bucket_bytes=1)

    def body():
        with Join([model], on_error="propagate"):
            for k in range(1 if out and comm.rank == 0 else 3):
                model.zero_grad()
                fails = comm.rank == guilty and k == 1
                if fails and where == "body":
                    raise ArithmeticError("mine")
                output = model(batch(comm.rank, k), fails and where == "late")
                if fails and where == "forward":
                    raise ArithmeticError("mine")
                loss(Failing.apply(output, fails and where == "backward")).backward()

    if comm.rank == guilty:
        with pytest.raises(ArithmeticError, match="mine"):
            body()
    else:
        with pytest.raises(JoinAborted, match=f"rank {guilty} left the Join context with Arith"):
            body()
    works(comm)
    model.zero_grad()
    alone = Fragile()
    loss(model(batch(comm.rank, 9))).backward()
    check(
        grads(model), mean([gradients(alone, loss(alone(batch(r, 9)))) for r in range(comm.size)])
    )


@ranks(1, 2, 3)
@pytest.mark.parametrize("other", [False, True])
@pytest.mark.parametrize("early", [False, True])
def test_a_model_that_is_not_in_the_list(comm, other, early, works):
    """It would hang as soon as a rank has run out of inputs."""
    model = DataParallel(layers(), comm)
    listed = DataParallel(layers(), comm) if other else comm
    total = loss(model(batch(comm.rank)))

    def body():
        with Join([listed], on_error="propagate"):
            with torch.no_grad():
                model(batch(comm.rank))
            total.backward() if early else model(batch(comm.rank))

    with pytest.raises(RuntimeError, match=r"DataParallel on the communicator .* add it to the"):
        body()
    model.zero_grad()
    loss(model(batch(comm.rank))).backward()
    alone = layers()
    check(grads(model), mean([gradients(alone, loss(alone(batch(r)))) for r in range(comm.size)]))
    works(comm)


@ranks(2, 3)
def test_ranks_that_do_not_do_the_same(comm):
    model = DataParallel(layers(), comm)

    def body():
        here = model.no_sync() if comm.rank == 0 else torch.enable_grad()
        with Join([model], on_error="propagate"), here:
            model(batch(comm.rank))

    with pytest.raises(CollectiveMismatchError, match=r"no_sync\(\) of joinables\[0\]"):
        body()


@every
def test_what_join_asks_for(comm):
    model = DataParallel(layers(), comm)
    assert isinstance(model, Joinable)
    assert isinstance(model, torch.nn.Module)
    assert model.join_process_group is comm
    assert model.join_device == torch.device("cpu")


def test_on_the_world(world):
    """It can be pickled, too."""
    model = DataParallel(layers())
    assert model.join_process_group is world
    twin = pickle.loads(pickle.dumps(model))
    loss(twin(batch(world.rank))).backward()
    alone = layers()
    check(grads(twin), mean([gradients(alone, loss(alone(batch(r)))) for r in range(world.size)]))
    assert grads(model) == [None] * 6
    with Join([twin, model]):
        for k in range(world.rank + 1):
            twin.zero_grad()
            loss(twin(batch(world.rank, k))).backward()
    last = world.size - 1
    parts = [[g / world.size for g in gradients(alone, loss(alone(batch(last, last))))]]
    check(grads(twin), mean(parts))


@every
def test_its_communicator_goes_with_it(comm):
    """Without a warning, which the tests turn into an error."""
    for _ in range(3):
        model = DataParallel(layers(), comm)
        loss(model(batch(comm.rank))).backward()
        own = weakref.ref(model._own._comm)
        del model
        gc.collect()
        assert own() is None
    comm.Dup().Free()
    assert comm._dropped == {}
