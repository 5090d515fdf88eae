"""Differentiable collectives in torch's words.

In all functions ``group`` is None (the world), a :class:`mpicoll.Communicator`, an
``mpi4py.MPI.Comm``, and ``src`` and ``dst`` are ranks
*of that group*. Every rank of the group calls, in the same order, forward and backward.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from .. import negotiate, watch
from .._core import collectives, mpi
from ..arguments import as_numelem, as_reduction, as_root, check_reducible
from ..autograd import apply, exchange, transforms
from ..autograd.exchange import unstack
from ..communicator import as_communicator
from ..dispatch import CODES, Call
from ..ops import OPERATIONS, ReduceOp
from ..staging import check_tensor, check_writable, code_of, name_of, plan_for

__all__ = [
    "ReduceOp",
    "all_gather",
    "all_gather_single",
    "all_reduce",
    "all_to_all",
    "all_to_all_single",
    "broadcast",
    "gather",
    "reduce",
    "reduce_scatter",
    "scatter",
]


def _core(call: str, group: Any) -> mpi.Comm:
    return as_communicator(call, group)._comm


def broadcast(tensor: torch.Tensor, src: int, group: Any = None) -> torch.Tensor:
    """Copy the source's tensor to every rank.

    Parameters
    ----------
    tensor
        Same shape and dtype on every rank; its values count only at `src`.
    src
        Rank in `group` whose values are sent.
    group
        The communicator; None: the world.

    Returns
    -------
    torch.Tensor
        A new contiguous tensor with the source's values.

    Raises
    ------
    TypeError
        `tensor` is not a strided tensor, or `group` is no communicator.
    ValueError
        `src` is no rank of the group.
    MPIError
        The MPI call failed.

    Notes
    -----
    **Adjoint**: dx_src = Σ_s g_s, zeros elsewhere.

    References
    ----------
    MPI-4.1, section 6.4.
    """
    comm = _core("broadcast", group)
    result = collectives.express(comm, CODES["Bcast"], tensor, -1, src)
    if result is not None:
        return result
    check_tensor("broadcast", "tensor", tensor)
    root = as_root("broadcast", "src", src, comm.size)
    return apply(Call(OPERATIONS["Bcast"], comm, root=root), tensor, name="broadcast")


def reduce(
    tensor: torch.Tensor, dst: int, op: Any = ReduceOp.SUM, group: Any = None
) -> torch.Tensor:
    """Combine the tensors of all ranks on one of them.

    Parameters
    ----------
    tensor
        Same shape and dtype on every rank.
    dst
        Rank in `group` that gets the result.
    op
        The reduction, the same on every rank.
    group
        The communicator; None: the world.

    Returns
    -------
    torch.Tensor
        A new contiguous tensor: the result at `dst`, zeros elsewhere.

    Raises
    ------
    TypeError
        `tensor` is not a strided tensor, or `op` does not take its dtype.
    ValueError
        `dst` is no rank of the group, or `op` no reduction.
    RuntimeError
        `tensor` requires grad and `op` has no gradient.
    MPIError
        The MPI call failed.

    Notes
    -----
    **Adjoint**: that of :func:`all_reduce` with G = g_dst.

    References
    ----------
    MPI-4.1, section 6.9.1.
    """
    comm = _core("reduce", group)
    check_tensor("reduce", "tensor", tensor)
    root = as_root("reduce", "dst", dst, comm.size)
    reduction = as_reduction("reduce", op)
    check_reducible("reduce", reduction, tensor)
    return apply(Call(OPERATIONS["Reduce"], comm, op=reduction, root=root), tensor, name="reduce")


def all_reduce(tensor: torch.Tensor, op: Any = ReduceOp.SUM, group: Any = None) -> torch.Tensor:
    """Combine the tensors of all ranks; every rank gets the result.

    Parameters
    ----------
    tensor
        Same shape and dtype on every rank.
    op
        The reduction, the same on every rank.
    group
        The communicator; None: the world.

    Returns
    -------
    torch.Tensor
        A new contiguous tensor, equal on all ranks bit for bit.

    Raises
    ------
    TypeError, ValueError, RuntimeError, MPIError
        As for :func:`reduce`.

    Notes
    -----
    **Adjoint**: with G = Σ_s g_s, SUM: G; AVG: G / W; MAX, MIN: G · 1[x_r = y] / (number of
    ranks with x_s = y); PROD: G · Π_{s≠r} x_s.

    References
    ----------
    MPI-4.1, section 6.9.6.
    """
    communicator = as_communicator("all_reduce", group)
    comm = communicator._made
    if comm is not None and type(op) is ReduceOp:
        result = collectives.express(comm, CODES["Allreduce"], tensor, op, 0)
        if result is not None:
            return result
    comm = communicator._comm
    check_tensor("all_reduce", "tensor", tensor)
    reduction = as_reduction("all_reduce", op)
    check_reducible("all_reduce", reduction, tensor)
    return apply(Call(OPERATIONS["Allreduce"], comm, op=reduction), tensor, name="all_reduce")


def _stacked(name: str, comm: mpi.Comm, tensor: torch.Tensor, root: int = -1) -> torch.Tensor:
    row = tensor.unsqueeze(0)
    size = comm.size
    call = Call(
        OPERATIONS[name],
        comm,
        root=root,
        gatheraxis=0,
        gathered=[1] * size,
        shape=(size, *tensor.shape),
        staged=not plan_for(tensor.device).direct,
    )
    return apply(call, row)


def gather(tensor: torch.Tensor, dst: int = 0, group: Any = None) -> tuple[torch.Tensor, ...]:
    """Bring the tensors of all ranks to one of them.

    Parameters
    ----------
    tensor
        Same shape and dtype on every rank.
    dst
        Rank in `group` that gets them.
    group
        The communicator; None: the world.

    Returns
    -------
    tuple of torch.Tensor
        One tensor per rank, in rank order; zeros off `dst`.

    Raises
    ------
    TypeError, ValueError, MPIError
        As for :func:`broadcast`.

    Notes
    -----
    **Adjoint**: dx_r = the gradient of the r-th tensor at `dst`.

    References
    ----------
    MPI-4.1, section 6.5.
    """
    comm = _core("gather", group)
    check_tensor("gather", "tensor", tensor)
    root = as_root("gather", "dst", dst, comm.size)
    return unstack(_stacked("Gather", comm, tensor, root), comm.size)


def all_gather(tensor: torch.Tensor, group: Any = None) -> tuple[torch.Tensor, ...]:
    """Bring the tensors of all ranks to every rank.

    Parameters
    ----------
    tensor
        Same shape and dtype on every rank.
    group
        The communicator; None: the world.

    Returns
    -------
    tuple of torch.Tensor
        One tensor per rank, in rank order.

    Raises
    ------
    TypeError, MPIError
        As for :func:`broadcast`.

    Notes
    -----
    **Adjoint**: dx_r = Σ_s g_s[r], one reduce-scatter.

    References
    ----------
    MPI-4.1, section 6.7.
    """
    comm = _core("all_gather", group)
    check_tensor("all_gather", "tensor", tensor)
    return unstack(_stacked("Allgather", comm, tensor), comm.size)


def _check_output(call: str, name: str, output: torch.Tensor, like: torch.Tensor) -> None:
    """What torch asks of a tensor that is overwritten, and that it fits."""
    check_tensor(call, name, output)
    check_writable(call, name, output)
    if output.dtype != like.dtype:
        raise TypeError(f"{call}: {name} has dtype {output.dtype}, the input {like.dtype}")
    if output.device != like.device:
        raise ValueError(f"{call}: {name} is on {output.device}, the input on {like.device}")
    if torch.is_grad_enabled() and output.requires_grad:
        base = output if output._base is None else output._base
        if base.is_leaf:
            raise RuntimeError(
                f"{call}: {name} is a leaf (or a view of one) that requires grad and cannot be "
                "written in place; pass a tensor that does not require grad"
            )


def all_gather_single(
    output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any = None
) -> torch.Tensor:
    """Bring the tensors of all ranks to every rank, in one tensor.

    Parameters
    ----------
    output_tensor
        Filled with the ranks' tensors one after the other along dimension 0: of shape
        ``(W * n, ...)`` for an input of shape ``(n, ...)``, or ``(W, n, ...)``. Any layout.
    input_tensor
        Same shape and dtype on every rank.
    group
        The communicator; None: the world.

    Returns
    -------
    torch.Tensor
        `output_tensor` itself.

    Raises
    ------
    TypeError, ValueError, MPIError
        As for :func:`broadcast`; `output_tensor` does not fit.
    RuntimeError
        `output_tensor` is a leaf that requires grad.

    Notes
    -----
    **Adjoint**: dx_r = Σ_s (r's rows of g_s), one reduce-scatter.

    References
    ----------
    MPI-4.1, section 6.7.
    """
    comm = _core("all_gather_single", group)
    check_tensor("all_gather_single", "input_tensor", input_tensor)
    _check_output("all_gather_single", "output_tensor", output_tensor, input_tensor)
    shape = tuple(input_tensor.shape)
    rows = (comm.size * shape[0], *shape[1:]) if shape else (comm.size,)
    if tuple(output_tensor.shape) not in (rows, (comm.size, *shape)):
        raise ValueError(
            f"all_gather_single: output_tensor has shape {tuple(output_tensor.shape)}; for an "
            f"input of shape {shape} on {comm.size} ranks it must be {rows}"
        )
    source = input_tensor if shape else input_tensor.reshape(1)
    call = Call(
        OPERATIONS["Allgather"],
        comm,
        gatheraxis=0,
        gathered=[source.shape[0]] * comm.size,
        shape=rows,
        output=True,
        staged=not plan_for(source.device).direct,
    )
    return apply(call, source, output_tensor)


def scatter(
    tensors: Sequence[torch.Tensor] | None, src: int = 0, group: Any = None
) -> torch.Tensor:
    """Hand out the source's tensors, one to each rank.

    Parameters
    ----------
    tensors
        At `src`: one tensor per rank, of one dtype. Elsewhere it does not count and may be None;
        shape, dtype and whether a gradient is wanted come from the source.
    src
        Rank in `group` whose tensors are handed out.
    group
        The communicator; None: the world.

    Returns
    -------
    torch.Tensor
        A new contiguous tensor: the source's r-th, on the device of this rank's first tensor
        (None: the default device).

    Raises
    ------
    TypeError, ValueError
        `src` is no rank of the group. `tensors` at the source is not a sequence of W tensors of
        one dtype and device: on all ranks.
    MPIError
        The MPI call failed.

    Notes
    -----
    **Adjoint**: g_r goes to the source's r-th tensor; zeros to the tensors of other ranks.

    References
    ----------
    MPI-4.1, section 6.6.
    """
    comm = _core("scatter", group)
    root = as_root("scatter", "src", src, comm.size)
    mine: list[torch.Tensor] = []
    problem: Exception | None = None
    if comm.rank == root:
        try:
            mine = _check_list("scatter", "tensors", tensors, comm.size)
        except (TypeError, ValueError) as error:
            problem = error
    else:
        given = tensors if isinstance(tensors, Sequence) else ()
        mine = [t for t in given if isinstance(t, torch.Tensor)]
    head = _head(mine, problem) if comm.rank == root else (0,) * 4
    heads = negotiate.agree("scatter", comm, head, ())
    if not heads[root]:
        watch.refuse(comm, "scatter", f"its source, rank {root}, has run out of inputs")
    valid, dtype, wants, ndim = heads[root]
    if problem is not None:
        raise problem
    if not valid:
        raise ValueError(
            f"scatter on rank {comm.rank} of {comm.size}: the source, rank {root}, was given "
            "unusable tensors; its own error names them"
        )
    width = 1 + ndim
    numbers: list[int] = []
    for t in mine if comm.rank == root else ():
        numbers += [t.dim(), *t.shape, *[0] * (ndim - t.dim())]
    table = negotiate.broadcast(
        "scatter", comm, tuple(numbers) if numbers else (0,) * (comm.size * width), root
    )
    rows = [table[i : i + width] for i in range(0, len(table), width)]
    shapes = [torch.Size(row[1 : 1 + row[0]]) for row in rows]
    like = mine[0] if mine else torch.empty(0)
    blank = torch.empty(0, dtype=name_of(dtype), device=like.device)
    none = torch.Size((0,))
    sends = mine if comm.rank == root else [blank] * comm.size
    receives = [shapes[comm.rank] if s == root else none for s in range(comm.size)]
    transformed = transforms.active()
    if not wants and not transformed:
        sends = [t.detach() for t in sends]
    anchored = bool(wants) and torch.is_grad_enabled()
    dummies = [t for t in mine if transformed or t.requires_grad] if comm.rank != root else []
    return exchange(comm, sends, receives, anchored=anchored, dummies=dummies)[root]


def _head(tensors: Sequence[torch.Tensor], problem: Exception | None) -> tuple[int, ...]:
    if problem is not None:
        return 0, 0, 0, 0
    wants = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
    return 1, code_of(tensors[0].dtype), int(wants), max(t.dim() for t in tensors)


def _check_list(call: str, name: str, tensors: Any, size: int) -> list[torch.Tensor]:
    """A list of `size` tensors of one dtype and device."""
    if isinstance(tensors, torch.Tensor) or not isinstance(tensors, Sequence):
        raise TypeError(
            f"{call}: {name} must be a sequence of tensors, not {type(tensors).__name__}"
        )
    if len(tensors) != size:
        raise ValueError(f"{call}: {name} has {len(tensors)} tensors; the group has {size} ranks")
    for i, tensor in enumerate(tensors):
        check_tensor(call, f"{name}[{i}]", tensor)
        if tensor.dtype != tensors[0].dtype:
            raise TypeError(
                f"{call}: {name}[{i}] has dtype {tensor.dtype}, {name}[0] {tensors[0].dtype}"
            )
        if tensor.device != tensors[0].device:
            raise ValueError(
                f"{call}: {name}[{i}] is on {tensor.device}, {name}[0] on {tensors[0].device}"
            )
    return list(tensors)


def reduce_scatter(
    output: torch.Tensor,
    input_list: Sequence[torch.Tensor],
    op: Any = ReduceOp.SUM,
    group: Any = None,
) -> torch.Tensor:
    """Combine the r-th tensors of all ranks on rank r.

    Parameters
    ----------
    output
        Filled with the result; any layout.
    input_list
        One tensor per rank, each shaped like `output`; same shape and dtype on every rank.
    op
        The reduction, the same on every rank.
    group
        The communicator; None: the world.

    Returns
    -------
    torch.Tensor
        `output` itself.

    Raises
    ------
    TypeError, ValueError, MPIError
        As for :func:`reduce`; `output` does not fit.
    RuntimeError
        `output` is a leaf that requires grad, or an input requires grad and `op` has no gradient.

    Notes
    -----
    **Adjoint**: that of :func:`all_reduce` for each tensor, with G = the gradient of the rank
    that the tensor is for.

    References
    ----------
    MPI-4.1, section 6.10.
    """
    comm = _core("reduce_scatter", group)
    inputs = _check_list("reduce_scatter", "input_list", input_list, comm.size)
    _check_output("reduce_scatter", "output", output, inputs[0])
    reduction = as_reduction("reduce_scatter", op)
    for i, tensor in enumerate(inputs):
        check_reducible("reduce_scatter", reduction, tensor)
        if tensor.shape != output.shape:
            raise ValueError(
                f"reduce_scatter: input_list[{i}] has shape {tuple(tensor.shape)}, output "
                f"{tuple(output.shape)}; all must be equal"
            )
    call = Call(
        OPERATIONS["Reduce_scatter"],
        comm,
        op=reduction,
        scatteraxis=0,
        scattered=[1] * comm.size,
        shape=(1, *output.shape),
        output=True,
        staged=not plan_for(output.device).direct,
    )
    return apply(call, _stack(inputs), output, name="reduce_scatter")


def _stack(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The tensors along a new first dimension; without a copy if they are cut from one."""
    first = tensors[0]
    step = first.numel() * first.element_size()
    if (
        not any(t.requires_grad for t in tensors)
        and not transforms.active()
        and first.device.type == "cpu"
        and step
        and all(
            t.is_contiguous()
            and not t.is_conj()
            and not t.is_neg()
            and t.data_ptr() == first.data_ptr() + i * step
            and t.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
            for i, t in enumerate(tensors)
        )
    ):
        shape = (len(tensors), *first.shape)
        strides = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
        return first.as_strided(shape, strides)
    return torch.stack(list(tensors))


def all_to_all(
    output_tensor_list: Sequence[torch.Tensor],
    input_tensor_list: Sequence[torch.Tensor],
    group: Any = None,
) -> list[torch.Tensor]:
    """Send a tensor to every rank and receive one from every rank.

    Parameters
    ----------
    output_tensor_list
        One tensor per rank, filled with what that rank sends; any layout.
    input_tensor_list
        One tensor per rank, sent to it; the shapes may differ. Rank s's r-th input is shaped like
        rank r's s-th output.
    group
        The communicator; None: the world.

    Returns
    -------
    list of torch.Tensor
        The tensors of `output_tensor_list` themselves.

    Raises
    ------
    TypeError, ValueError
        An argument is of the wrong type or size. What a rank sends and what the other expects
        differ in size or dtype: on all ranks.
    RuntimeError
        An output is a leaf that requires grad.
    MPIError
        The MPI call failed.

    Notes
    -----
    **Adjoint**: the all-to-all back, with the inputs' shapes.

    References
    ----------
    MPI-4.1, section 6.8.
    """
    comm = _core("all_to_all", group)
    inputs = _check_list("all_to_all", "input_tensor_list", input_tensor_list, comm.size)
    outputs = _check_list("all_to_all", "output_tensor_list", output_tensor_list, comm.size)
    for i, output in enumerate(outputs):
        _check_output("all_to_all", f"output_tensor_list[{i}]", output, inputs[0])
    _agree_on_splits(
        "all_to_all", comm, inputs[0], [t.numel() for t in inputs], [t.numel() for t in outputs]
    )
    shapes = [t.shape for t in outputs]
    if any(t._is_view() for t in outputs) and torch.is_grad_enabled():
        # torch lets a node with several outputs write into no view: copy instead.
        anchored = any(t.requires_grad for t in outputs)
        parts = exchange(comm, inputs, shapes, anchored=anchored)
        for output, part in zip(outputs, parts, strict=True):
            output.copy_(part)
        return outputs
    return list(exchange(comm, inputs, shapes, outputs))


def _agree_on_splits(
    call: str, comm: mpi.Comm, like: torch.Tensor, sends: Sequence[int], receives: Sequence[int]
) -> tuple[int, int, bool]:
    """Raise on all ranks unless all pairs agree.

    Returns the largest side and the longest block of any rank, and whether any rank stages.
    """
    meant = negotiate.swap(call, comm, sends, receives)
    wrong = next((s for s in range(comm.size) if meant[s] != receives[s]), -1)
    rows = negotiate.agree(
        call,
        comm,
        (
            wrong,
            0 if wrong < 0 else meant[wrong],
            0 if wrong < 0 else receives[wrong],
            max(sum(sends), sum(receives)),
            code_of(like.dtype),
            max(sends),
            int(not plan_for(like.device).direct),
        ),
        (-1, 0, 0, 0, code_of(like.dtype), 0, 0),
    )
    where = f"{call} on rank {comm.rank} of {comm.size}"
    if len({row[4] for row in rows}) > 1:
        kinds = ", ".join(f"rank {r}: {name_of(row[4])}" for r, row in enumerate(rows))
        raise TypeError(f"{where}: the ranks' tensors differ in dtype ({kinds})")
    for r, (other, sent, expected, *_) in enumerate(rows):
        if other >= 0:
            raise ValueError(
                f"{where}: rank {other} sends {sent} elements to rank {r}, which expects {expected}"
            )
    return max(row[3] for row in rows), max(row[5] for row in rows), any(row[6] for row in rows)


def all_to_all_single(
    output: torch.Tensor,
    input: torch.Tensor,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    group: Any = None,
) -> torch.Tensor:
    """Cut a tensor along dimension 0, send a piece to every rank, join what they send.

    Parameters
    ----------
    output
        Filled with the pieces of all ranks, in rank order; any layout.
    input
        Rows beyond dimension 0 alike on every rank.
    output_split_sizes
        How many rows come from each rank; None: equally many from each.
    input_split_sizes
        How many rows go to each rank; None: equally many to each. Zero is allowed.
    group
        The communicator; None: the world.

    Returns
    -------
    torch.Tensor
        `output` itself.

    Raises
    ------
    TypeError, ValueError
        An argument is of the wrong type or size; None was given and W does not divide
        dimension 0. What a rank sends and what the other expects differ: on all ranks.
    RuntimeError
        `output` is a leaf that requires grad.
    MPIError
        The MPI call failed.

    Notes
    -----
    **Adjoint**: the same with the splits exchanged.

    References
    ----------
    MPI-4.1, section 6.8.
    """
    comm = _core("all_to_all_single", group)
    check_tensor("all_to_all_single", "input", input)
    _check_output("all_to_all_single", "output", output, input)
    sends = _splits("input", input, input_split_sizes, comm.size)
    receives = _splits("output", output, output_split_sizes, comm.size)
    if output.shape[1:] != input.shape[1:]:
        raise ValueError(
            f"all_to_all_single: output has rows of shape {tuple(output.shape[1:])}, input of "
            f"{tuple(input.shape[1:])}"
        )
    inner = math.prod(input.shape[1:])
    largest, longest, staged = _agree_on_splits(
        "all_to_all_single",
        comm,
        input,
        [n * inner for n in sends],
        [n * inner for n in receives],
    )
    call = Call(
        OPERATIONS["Alltoall"],
        comm,
        splits=(sends, receives),
        output=True,
        staged=staged,
        largest=largest,
        longest=longest,
    )
    return apply(call, input, output)


def _splits(name: str, tensor: torch.Tensor, sizes: Sequence[int] | None, world: int) -> list[int]:
    call = "all_to_all_single"
    if tensor.dim() == 0:
        raise ValueError(f"{call}: {name} is 0-d; there is no dimension 0 to cut")
    rows = tensor.shape[0]
    if sizes is None or len(sizes) == 0:
        if rows % world:
            raise ValueError(
                f"{call}: {name} has {rows} rows, which {world} ranks do not divide; give "
                f"{name}_split_sizes"
            )
        return [rows // world] * world
    checked = [as_numelem(call, f"{name}_split_sizes[{i}]", n) for i, n in enumerate(sizes)]
    if len(checked) != world or sum(checked) != rows:
        raise ValueError(
            f"{call}: {name}_split_sizes is {checked}; it must have {world} numbers that add up "
            f"to {rows}, the rows of {name}"
        )
    return checked
