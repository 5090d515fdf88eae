"""Wrong arguments: the class that a Python user expects, the words, and nothing sent."""

from __future__ import annotations

import inspect

import pytest
import torch
from groups import every, ranks

import mpicoll
import mpicoll.nn.functional as F
from mpicoll import ReduceOp

SUM = ReduceOp.SUM


def good(comm) -> dict:
    """Every communicating call with arguments that would do, all by keyword."""
    x = torch.ones(comm.size, 2)
    W = comm.size
    return {
        "Allreduce": (comm.Allreduce, {"tensor": x, "op": SUM}),
        "Reduce": (comm.Reduce, {"tensor": x, "op": SUM, "root": 0}),
        "Reduce_": (comm.Reduce_, {"tensor": x, "op": SUM, "root": 0}),
        "Reduce_scatter": (
            comm.Reduce_scatter, {"tensor": x, "scatteraxis": 0, "numelem": 1, "op": SUM},
        ),
        "Scan": (comm.Scan, {"tensor": x, "op": SUM}),
        "Exscan": (comm.Exscan, {"tensor": x, "op": SUM}),
        "Bcast": (comm.Bcast, {"tensor": x, "root": 0}),
        "Bcast_": (comm.Bcast_, {"tensor": x, "root": 0}),
        "Gather": (comm.Gather, {"tensor": x, "gatheraxis": 0, "root": 0}),
        "Allgather": (comm.Allgather, {"tensor": x, "gatheraxis": 0}),
        "Scatter": (comm.Scatter, {"tensor": x, "scatteraxis": 0, "numelem": 1, "root": 0}),
        "Alltoall": (
            comm.Alltoall, {"tensor": x, "gatheraxis": 1, "scatteraxis": 0, "numelem": 1},
        ),
        "Isend": (comm.Isend, {"tensor": x, "dest": comm.rank, "tag": 0}),
        "Irecv": (comm.Irecv, {"tensor": x, "source": comm.rank, "tag": 0}),
        "Send": (comm.Send, {"tensor": x, "dest": comm.rank, "tag": 0}),
        "Recv": (comm.Recv, {"tensor": x, "source": comm.rank, "tag": 0}),
        "Sendrecv": (
            comm.Sendrecv,
            {"sendtensor": x, "dest": comm.rank, "recvtensor": x.clone(), "source": comm.rank,
             "sendtag": 0, "recvtag": 0},
        ),
        "broadcast": (F.broadcast, {"tensor": x, "src": 0, "group": comm}),
        "reduce": (F.reduce, {"tensor": x, "dst": 0, "op": SUM, "group": comm}),
        "all_reduce": (F.all_reduce, {"tensor": x, "op": SUM, "group": comm}),
        "gather": (F.gather, {"tensor": x, "dst": 0, "group": comm}),
        "scatter": (F.scatter, {"tensors": list(x), "src": 0, "group": comm}),
        "reduce_scatter": (
            F.reduce_scatter,
            {"output": torch.empty(2), "input_list": list(x), "op": SUM, "group": comm},
        ),
        "all_gather": (F.all_gather, {"tensor": x, "group": comm}),
        "all_gather_single": (
            F.all_gather_single,
            {"output_tensor": torch.empty(W * W, 2), "input_tensor": x, "group": comm},
        ),
        "all_to_all": (
            F.all_to_all,
            {"output_tensor_list": [torch.empty(2) for _ in range(W)],
             "input_tensor_list": list(x), "group": comm},
        ),
        "all_to_all_single": (
            F.all_to_all_single,
            {"output": torch.empty(W, 2), "input": x, "output_split_sizes": [1] * W,
             "input_split_sizes": [1] * W, "group": comm},
        ),
        "copy_to_group": (mpicoll.copy_to_group, {"tensor": x, "group": comm}),
        "reduce_from_group": (mpicoll.reduce_from_group, {"tensor": x, "group": comm}),
    }  # fmt: skip


RECEIVES_FIRST = ("Isend", "Irecv", "Send", "Recv")
COLLECTIVES = [
    "Allreduce", "Reduce", "Reduce_", "Reduce_scatter", "Scan", "Exscan", "Bcast", "Bcast_",
    "Gather", "Allgather", "Scatter", "Alltoall", "Sendrecv", "broadcast", "reduce", "all_reduce",
    "gather", "scatter", "reduce_scatter", "all_gather", "all_gather_single", "all_to_all",
    "all_to_all_single", "copy_to_group", "reduce_from_group",
]  # fmt: skip
CALLS = [*COLLECTIVES, *RECEIVES_FIRST]
TENSORS = ("tensor", "sendtensor", "recvtensor", "output", "output_tensor", "input", "input_tensor")
LISTS = ("tensors", "input_list", "output_tensor_list", "input_tensor_list")
ROOTS = ("root", "src", "dst")
PEERS = ("dest", "source")
TAGS = ("tag", "sendtag", "recvtag")


def test_every_public_call_is_here(world):
    """A new call comes into this file, with its arguments."""
    calls = set(good(world))
    assert calls == set(CALLS)
    assert calls >= set(F.__all__) - {"ReduceOp"}
    methods = {
        name
        for name, method in vars(mpicoll.Communicator).items()
        if name[0].isupper() and inspect.isfunction(method)
    }
    for name in sorted(methods - calls):
        assert "tensor" not in "".join(inspect.signature(getattr(world, name)).parameters), name
    for name, (call, arguments) in good(world).items():
        assert list(inspect.signature(call).parameters) == list(arguments), name


@every
def test_the_arguments_would_do(comm):
    """What the other tests spoil one by one is right: each call works as it stands."""
    for name in COLLECTIVES:
        call, arguments = good(comm)[name]
        call(**arguments)
    for name in ("Isend", "Irecv"):
        call, arguments = good(comm)[name]
        back = comm.Irecv if name == "Isend" else comm.Isend
        handle = call(**arguments)
        other = back(torch.ones(comm.size, 2), comm.rank, 0)
        handle.wait()
        other.wait()


def spoiled(comm, name: str, argument: str, value):
    """The call with one argument replaced."""
    call, arguments = good(comm)[name]
    assert argument in arguments
    return lambda: call(**{**arguments, argument: value})


def arguments_of(names) -> list[tuple[str, str]]:
    """All (call, argument) with such an argument."""

    class Size:
        rank, size = 0, 1

        def __getattr__(self, name):
            return getattr(mpicoll.COMM_SELF, name)

    return [
        (name, argument)
        for name, (_, arguments) in good(Size()).items()
        for argument in arguments
        if argument in names
    ]


@every
@pytest.mark.parametrize(("name", "argument"), arguments_of(TENSORS))
def test_no_tensor(comm, works, name, argument):
    for value in (None, 3.0, [torch.ones(2)], "x"):
        with pytest.raises(
            TypeError,
            match=rf"{name}_?: {argument} must be a torch\.Tensor"
            rf"|I(send|recv): tensor must be a torch\.Tensor",
        ):
            spoiled(comm, name, argument, value)()
    works(comm)


def unusable() -> dict[str, torch.Tensor]:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        fake = torch.ones(4, 2)
    return {
        "torch.sparse_coo": torch.eye(2).to_sparse(),
        "torch.sparse_csr": torch.eye(2).to_sparse_csr(),
        "meta": torch.ones(4, 2, device="meta"),
        "fake": fake,
        "quantized": torch.quantize_per_tensor(torch.ones(4, 2), 0.1, 0, torch.qint8),
    }


@every
@pytest.mark.filterwarnings("ignore:.*:UserWarning", "ignore:.*:DeprecationWarning")
@pytest.mark.parametrize(("name", "argument"), arguments_of(TENSORS))
def test_no_strided_memory(comm, works, name, argument):
    """Sparse, meta, quantized and fake tensors: TypeError that names what they are."""
    for kind, tensor in unusable().items():
        with pytest.raises(TypeError, match=rf"{argument}.*{kind}"):
            spoiled(comm, name, argument, tensor)()
        with pytest.raises(TypeError, match=kind), torch.no_grad():
            spoiled(comm, name, argument, tensor)()
    works(comm)


@every
@pytest.mark.filterwarnings("ignore:.*:UserWarning")
def test_nested_tensor(comm, works):
    """A nested tensor calls itself strided, but has no shape."""
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    for name, argument in arguments_of(TENSORS):
        with pytest.raises(TypeError, match="nested"):
            spoiled(comm, name, argument, nested)()
    works(comm)


@every
@pytest.mark.parametrize(("name", "argument"), arguments_of(LISTS))
def test_wrong_lists(comm, works, name, argument):
    """On every rank at once: of lists off the source of a scatter nothing counts."""
    W = comm.size
    if name == "scatter" and comm.rank != 0:
        for value in (None, torch.ones(W, 2), [torch.ones(2)] * (W + 1), ["x"] * W, [], 5):
            with pytest.raises(ValueError, match="the source, rank 0, was given"):
                spoiled(comm, name, argument, value)()
        with pytest.raises(ValueError, match="the source, rank 0, was given"):
            spoiled(comm, name, argument, None)()
    else:
        for value in (None, torch.ones(W, 2), 5):
            with pytest.raises(TypeError, match=f"{name}: {argument} must be a sequence"):
                spoiled(comm, name, argument, value)()
        with pytest.raises(
            ValueError, match=f"{name}: {argument} has {W + 1} tensors; .*{W} ranks"
        ):
            spoiled(comm, name, argument, [torch.ones(2)] * (W + 1))()
        with pytest.raises(TypeError, match=rf"{name}: {argument}\[0\] must be a torch.Tensor"):
            spoiled(comm, name, argument, ["x"] * W)()
        with pytest.raises(ValueError, match=f"{argument} has 0 tensors"):
            spoiled(comm, name, argument, [])()
        mixed = [torch.ones(2)] * (W - 1) + [torch.ones(2, dtype=torch.float64)]
        if W > 1:  # a single tensor has one dtype
            with pytest.raises(TypeError, match=r"dtype torch\.float64"):
                spoiled(comm, name, argument, mixed)()
    works(comm)


@every
@pytest.mark.parametrize(("name", "argument"), arguments_of(ROOTS))
def test_wrong_root(comm, works, name, argument):
    for value in (comm.size, -1, 2**40):
        with pytest.raises(
            ValueError, match=f"{name}: {argument} is {value}; .*0 to {comm.size - 1}"
        ):
            spoiled(comm, name, argument, value)()
    for value in (None, "0", 1.0, torch.ones(1)):
        with pytest.raises(TypeError, match=f"{name}: {argument} must be an integer, not "):
            spoiled(comm, name, argument, value)()
    works(comm)


@every
@pytest.mark.parametrize(("name", "argument"), arguments_of(PEERS))
def test_wrong_peer(comm, works, name, argument):
    shown = {"Send": "Isend", "Recv": "Irecv"}.get(name, name)
    for value in (comm.size, -7, 2**40):
        with pytest.raises(
            ValueError, match=f"{shown}: {argument} is {value}; .*0 to {comm.size - 1}"
        ):
            spoiled(comm, name, argument, value)()
    for value in ("0", 1.0):
        with pytest.raises(TypeError, match=f"{shown}: {argument} must be an integer"):
            spoiled(comm, name, argument, value)()
    works(comm)


@every
@pytest.mark.parametrize(("name", "argument"), arguments_of(TAGS))
def test_wrong_tag(comm, works, name, argument):
    shown = {"Send": "Isend", "Recv": "Irecv"}.get(name, name)
    for value in (-7, 2**40):
        with pytest.raises(ValueError, match=rf"{shown}: {argument} is {value}; .*MPI_TAG_UB"):
            spoiled(comm, name, argument, value)()
    for value in (None, "0", 1.5):
        with pytest.raises(TypeError, match=f"{shown}: {argument} must be an integer"):
            spoiled(comm, name, argument, value)()
    works(comm)


@every
@pytest.mark.parametrize(("name", "argument"), arguments_of(("gatheraxis", "scatteraxis")))
def test_wrong_axis(comm, works, name, argument):
    for value in (2, -3, 2**40):
        with pytest.raises(IndexError, match=f"{name}: {argument} is {value}; .*2 dimensions"):
            spoiled(comm, name, argument, value)()
    for value in (None, "0", 1.0):
        with pytest.raises(TypeError, match=f"{name}: {argument} must be an integer"):
            spoiled(comm, name, argument, value)()
    call, arguments = good(comm)[name]
    with pytest.raises(IndexError, match="a 0-d tensor has none"):
        call(**{**arguments, "tensor": torch.tensor(1.0)})
    works(comm)


@every
@pytest.mark.parametrize(("name", "argument"), arguments_of(("numelem",)))
def test_wrong_numelem(comm, works, name, argument):
    with pytest.raises(ValueError, match=f"{name}: numelem is -1; it must not be negative"):
        spoiled(comm, name, argument, -1)()
    with pytest.raises(ValueError, match=f"{name}: numelem is {2**80}"):
        spoiled(comm, name, argument, 2**80)()
    for value in (None, "1", 1.0):
        with pytest.raises(TypeError, match=f"{name}: numelem must be an integer"):
            spoiled(comm, name, argument, value)()
    works(comm)


@every
@pytest.mark.parametrize(("name", "argument"), arguments_of(("op",)))
def test_wrong_op(comm, works, name, argument):
    for value in (13, -1, 99):
        with pytest.raises(ValueError, match=rf"{name}: op is {value}; .*SUM \(2\)"):
            spoiled(comm, name, argument, value)()
    for value in (None, "sum", 2.0, torch.add):
        with pytest.raises(TypeError, match=f"{name}: op must be a mpicoll.ReduceOp"):
            spoiled(comm, name, argument, value)()
    from mpi4py import MPI

    own = MPI.Op.Create(lambda a, b, dt: None)
    for value in (own, MPI.REPLACE, MPI.NO_OP):
        with pytest.raises(ValueError, match=f"{name}: op is .*predefined"):
            spoiled(comm, name, argument, value)()
    own.Free()
    with pytest.raises(ValueError, match=f"{name}: op is .*PREMUL_SUM"):
        spoiled(comm, name, argument, torch.distributed.ReduceOp.PREMUL_SUM)()
    works(comm)


@every
@pytest.mark.parametrize(("name", "argument"), arguments_of(("group",)))
def test_wrong_group(comm, works, name, argument):
    from mpi4py import MPI

    for value in ("world", 0, MPI.GROUP_EMPTY, object()):
        with pytest.raises(TypeError, match=f"{name}: group must be None"):
            spoiled(comm, name, argument, value)()
    with pytest.raises(ValueError, match=f"{name}: group is MPI.COMM_NULL"):
        spoiled(comm, name, argument, MPI.COMM_NULL)()
    works(comm)


@every
@pytest.mark.parametrize("op", list(ReduceOp), ids=lambda op: op.name)
def test_reductions_that_do_not_exist(comm, works, op):
    """AVG of integers and bool, order of complex, bits of floats, anything of float8: TypeError."""
    inexact = [torch.float16, torch.float32, torch.float64, torch.complex64]
    exact = [torch.bool, torch.uint8, torch.int64]
    wrong = [torch.float8_e4m3fn]
    if op is ReduceOp.AVG:
        wrong += exact
    if op in (ReduceOp.MAX, ReduceOp.MIN, ReduceOp.MINLOC, ReduceOp.MAXLOC):
        wrong += [torch.complex64, torch.complex128]
    if op in (ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR):
        wrong += inexact
    for dtype in wrong:
        x = torch.zeros(comm.size, 2, dtype=dtype)
        for name, _ in arguments_of(("op",)):
            call, arguments = good(comm)[name]
            arguments["op"] = op
            if name == "reduce_scatter":
                arguments.update(output=x[0].clone(), input_list=list(x))
            else:
                arguments["tensor"] = x
            with pytest.raises(TypeError, match=rf"{name}_?: {op.name} of {dtype} does not exist"):
                call(**arguments)
    works(comm)


@every
def test_prefix_average(comm, works):
    for call in (comm.Scan, comm.Exscan):
        with pytest.raises(ValueError, match="AVG is no prefix reduction; use SUM and divide"):
            call(torch.ones(2), ReduceOp.AVG)
    works(comm)


@every
def test_pairs(comm, works):
    for op in (ReduceOp.MINLOC, ReduceOp.MAXLOC):
        for x in (torch.ones(()), torch.ones(3), torch.ones(2, 3)):
            with pytest.raises(ValueError, match=f"{op.name} takes .value, index. pairs"):
                comm.Allreduce(x, op)
        with pytest.raises(ValueError, match="would cut the pairs"):
            comm.Reduce_scatter(torch.ones(3, 2), 1, 1, op)
    works(comm)


@ranks(2, 3, 4)
def test_expanded_tensors_cannot_be_written(comm, works):
    x, W = torch.zeros(1).expand(4), comm.size
    splits = [4] + [0] * (W - 1)
    for call in (
        lambda: comm.Bcast_(x, 0),
        lambda: comm.Reduce_(x, SUM, 0),
        lambda: comm.Irecv(x, None, 0),
        lambda: comm.Recv(x, None, 0),
        lambda: comm.Sendrecv(torch.ones(4), None, x, None),
        lambda: F.all_gather_single(torch.zeros(1).expand(W), torch.ones(1), comm),
        lambda: F.all_to_all_single(x, x, splits, splits, comm),
        lambda: F.all_to_all([x] * W, [x] * W, comm),
        lambda: F.reduce_scatter(x, [x] * W, group=comm),
    ):
        with pytest.raises(ValueError, match=r"is expanded: .*; pass tensor\.clone\(\)"):
            call()
    works(comm)


@every
def test_outputs_that_do_not_fit(comm, works):
    W = comm.size
    x = torch.ones(2, 3)
    with pytest.raises(
        ValueError, match=rf"output_tensor has shape \(1, 3\); .* must be \({2 * W}, 3\)"
    ):
        F.all_gather_single(torch.empty(1, 3), x, comm)
    with pytest.raises(
        TypeError, match=r"output_tensor has dtype torch\.float64, the input torch\.float32"
    ):
        F.all_gather_single(torch.empty(2 * W, 3, dtype=torch.float64), x, comm)
    with pytest.raises(ValueError, match=r"input_list\[0\] has shape \(2, 3\), output \(2,\)"):
        F.reduce_scatter(torch.empty(2), [x] * W, group=comm)
    with pytest.raises(ValueError, match=r"output has rows of shape \(2,\), input of \(3,\)"):
        F.all_to_all_single(torch.empty(W, 2), torch.empty(W, 3), group=comm)
    with pytest.raises(ValueError, match=rf"input_split_sizes is .*{W} numbers that add up to {W}"):
        F.all_to_all_single(torch.empty(W), torch.empty(W), None, [W + 1] + [0] * (W - 1), comm)
    with pytest.raises(ValueError, match="output_split_sizes is"):
        F.all_to_all_single(torch.empty(W), torch.empty(W), [1] * (W + 1), None, comm)
    with pytest.raises(ValueError, match=r"output_split_sizes\[0\] is -1"):
        F.all_to_all_single(torch.empty(W), torch.empty(W), [-1] * W, None, comm)
    with pytest.raises(TypeError, match=r"input_split_sizes\[0\] must be an integer"):
        F.all_to_all_single(torch.empty(W), torch.empty(W), None, [1.0] * W, comm)
    with pytest.raises(ValueError, match="0-d"):
        F.all_to_all_single(torch.tensor(1.0), torch.tensor(1.0), group=comm)
    leaf = torch.empty(2 * W, 3, requires_grad=True)
    for output in (leaf, leaf[:]):
        with pytest.raises(RuntimeError, match=r"leaf .*requires grad"):
            F.all_gather_single(output, x, comm)
    works(comm)


@every
def test_wait_takes_handles(comm, works):
    for value in (None, torch.ones(1), 3):
        with pytest.raises(TypeError, match="Wait: waithandle must be a WaitHandle, not"):
            comm.Wait(value)
    works(comm)


@every
def test_split_arguments(comm, works):
    with pytest.raises(ValueError, match="Split: color is -1"):
        comm.Split(-1)
    with pytest.raises(ValueError, match=f"Split: color is {2**40}"):
        comm.Split(2**40)
    with pytest.raises(ValueError, match=f"Split: key is {2**40}"):
        comm.Split(0, 2**40)
    for value in ("a", 1.0):
        with pytest.raises(TypeError, match="Split: color must be an integer"):
            comm.Split(value)
    for value in (None, "a", 1.0):
        with pytest.raises(TypeError, match="Split: key must be an integer"):
            comm.Split(0, value)
    works(comm)


# ---------------------------------------------------------------- what only the ranks together know


@every
@pytest.mark.parametrize("name", ["Scatter", "Reduce_scatter", "Alltoall"])
def test_numelem_sums(comm, works, name):
    """On all ranks, with everybody's number."""
    W = comm.size
    mine = 1 + (comm.rank == W - 1)
    with pytest.raises(
        ValueError,
        match=rf"{name} on rank {comm.rank} of {W}: numelem adds up to "
        rf"{W + 1} over all ranks .*rank {W - 1}: 2.*size {W} along axis 0",
    ):
        spoiled(comm, name, "numelem", mine)()
    with pytest.raises(ValueError, match="numelem adds up to 0"):
        spoiled(comm, name, "numelem", 0)()
    works(comm)


@ranks(2, 3)
def test_unequal_shapes(comm, works):
    x = torch.ones(comm.size, 2 + comm.rank)
    last = rf"rank {comm.size - 1}: \({comm.size}, {comm.size + 1}\)"
    for call in (
        lambda: comm.Allgather(x, 0),
        lambda: comm.Gather(x, 0, 0),
        lambda: comm.Alltoall(x, 0, 0, comm.size),
        lambda: comm.Reduce_scatter(x, 0, 1),
    ):
        with pytest.raises(ValueError, match=rf"on rank {comm.rank} of {comm.size}: .*{last}"):
            call()
    deep = torch.ones((1,) * (10 + comm.rank))
    with pytest.raises(ValueError, match="shapes must be equal"):
        comm.Allgather(deep, 0)
    works(comm)


@ranks(2, 3)
def test_unequal_dtypes(comm, works):
    x = torch.ones(comm.size, 2, dtype=torch.float64 if comm.rank else torch.float32)
    for call in (
        lambda: comm.Allgather(x, 0),
        lambda: comm.Gather(x, 0, 0),
        lambda: comm.Alltoall(x, 0, 0, comm.size),
        lambda: comm.Reduce_scatter(x, 0, 1),
        lambda: F.all_to_all([t.clone() for t in x], list(x), comm),
        lambda: F.all_to_all_single(x.clone(), x, group=comm),
    ):
        with pytest.raises(TypeError, match=r"rank 0: torch\.float32, rank 1: torch\.float64"):
            call()
    works(comm)


@ranks(2, 3)
def test_unequal_axes_roots_and_reductions(comm, works):
    x, r = torch.ones(comm.size, comm.size), comm.rank
    for name, call in {
        "gatheraxis": lambda: comm.Allgather(x, min(r, 1)),
        "root": lambda: comm.Gather(x, 0, min(r, 1)),
        "scatteraxis": lambda: comm.Scatter(x, min(r, 1), 1, 0),
        "op": lambda: comm.Reduce_scatter(x, 0, 1, ReduceOp.MAX if r else SUM),
    }.items():
        with pytest.raises(ValueError, match=rf"the ranks disagree on {name} \(rank 0: "):
            call()
    with pytest.raises(ValueError, match="disagree on scatteraxis"):
        comm.Alltoall(x, 0, min(r, 1), 1)
    with pytest.raises(ValueError, match="disagree on root"):
        comm.Scatter(x, 0, 1, min(r, 1))
    works(comm)


@ranks(1, 2, 3)
def test_scatter_axis_is_the_roots(comm, works):
    """Only the root's tensor tells whether there is such an axis: on all ranks."""
    x = torch.ones(comm.size) if comm.rank == 0 else torch.ones(1, 1, 1)
    with pytest.raises(IndexError, match="scatteraxis is 2; the tensor has 1 dimensions"):
        comm.Scatter(x, 2, 1, 0)
    got = comm.Scatter(x, 0 if comm.rank == 0 else -1, 1, 0)  # the same axis of the root's tensor
    assert got.shape == (1,)
    works(comm)


@ranks(2, 3)
def test_scatter_list_of_the_source(comm, works):
    W = comm.size
    for wrong in ([torch.ones(1)] * (W - 1), [torch.ones(1)] * (W - 1) + [None], None):
        with pytest.raises((TypeError, ValueError)) as caught:
            F.scatter(wrong if comm.rank == W - 1 else None, W - 1, comm)
        if comm.rank != W - 1:
            assert caught.type is ValueError
            assert f"scatter on rank {comm.rank} of {W}: the source, rank {W - 1}" in str(
                caught.value
            )
    works(comm)


@ranks(2, 3)
def test_splits_that_do_not_meet(comm, works):
    """Rank 0 sends a row to everybody, who expect two of it: on all ranks, naming the pair."""
    W, r = comm.size, comm.rank
    sends, receives = [1] * W, [1] * W
    if r:
        receives[0] = 2
    with pytest.raises(ValueError, match="rank 0 sends 1 elements to rank 1, which expects 2"):
        F.all_to_all_single(torch.empty(sum(receives)), torch.empty(W), receives, sends, comm)
    with pytest.raises(ValueError, match="rank 0 sends 1 elements to rank 1, which expects 2"):
        F.all_to_all([torch.empty(n) for n in receives], [torch.empty(n) for n in sends], comm)
    works(comm)
