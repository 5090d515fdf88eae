"""The one Function: every collective is a node of this kind, driven by its :class:`Call`."""

from __future__ import annotations

import torch
from torch._functorch.eager_transforms import enable_inplace_requires_grad
from torch.autograd import forward_ad

from .. import dispatch, watch
from .._core import collectives, mpi
from ..dispatch import CODES, Call
from ..ops import OPERATIONS, Kind, ReduceOp
from ..staging import kind_of
from . import adjoints, lockstep, transforms
from .dummies import alias, join
from .nodes import dense, node

__all__ = ["anchor", "apply", "apply_inplace", "claim", "needs_graph", "require_derivative"]

_transforms = torch._C._are_functorch_transforms_active


def anchor(reverse: bool = False) -> torch.Tensor:
    """An empty leaf that requires grad: puts a node in the graph whose data does not.

    `reverse` tells that it is for a gradient message.

    Raises
    ------
    RuntimeError
        In forward, inside a transform of torch.func: torch runs only the nodes that lead to the
        transform's input, so the other ranks would wait for this node in vain.
    """
    empty = torch.empty(0, device="cpu")
    if not _transforms():
        return empty.requires_grad_()
    if not reverse:
        raise RuntimeError(
            "inside a transform of torch.func, an operation whose own tensors do not depend on "
            "the transform's input cannot take part in the backward of other ranks; let its "
            "tensor depend on that input (0 * x), or use backward()"
        )
    with enable_inplace_requires_grad(True):
        return empty.requires_grad_()


class Communication(torch.autograd.Function):
    """A collective: ``forward(call, *tensors)``; tensors beyond the call's own are anchors."""

    @staticmethod
    def forward(call: Call, *tensors: torch.Tensor) -> torch.Tensor:
        result = dispatch.run(call, tensors)
        return tensors[-1] if call.output else result

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        call, tensors = inputs[0], inputs[1:]
        ctx.call = call
        if call.adjoint is not None:
            return
        ctx.metas = [(t.shape, t.dtype, t.device) if t.requires_grad else None for t in tensors]
        if call.output:
            ctx.mark_dirty(tensors[-1])
        derivative = call.derivative
        ctx.tied = _transforms()
        if derivative != "linear":
            ctx.save_for_forward(tensors[0], output)
            if derivative == "winner" or ctx.tied:
                ctx.save_for_backward(tensors[0], output)
            else:
                ctx.save_for_backward(tensors[0])
        elif ctx.tied:
            ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx, gradient):
        call = ctx.call
        if call.adjoint is not None:
            return None, _express_adjoint(call, gradient)
        first, *others = ctx.metas
        gradient = dense(gradient)
        if call.output and call.shape:  # the caller's tensor may have another shape
            gradient = gradient.reshape(call.shape)
        saved = ctx.saved_tensors
        if ctx.tied:
            gradient = transforms.tie(gradient, saved[-1])
        result = adjoints.adjoint(call, saved, gradient)
        # They hang on the node that ran, so that their backward runs its adjoint, too.
        zeros = (None if m is None else join(_zeros(m), [result]) for m in others)
        if first is None:
            return None, None, *zeros
        if result.shape != first[0] or result.dtype != first[1]:
            # A placeholder: its gradient is zero, and still hangs on the node that ran.
            result = join(_zeros(first), [result])
        return None, result, *zeros

    @staticmethod
    def jvp(ctx, _, tangent, *others):
        return adjoints.pushforward(ctx.call, ctx.saved_tensors, tangent)

    @staticmethod
    def vmap(info, in_dims, call, *tensors):
        larger, position = call.batched(info.batch_size)
        moved = [
            t if dim is None else t.movedim(dim, position)
            for t, dim in zip(tensors, in_dims[1:], strict=True)
        ]
        result = _communicate(larger, *moved)
        return result, position % result.dim()


class _Guard(torch.autograd.Function):
    """Takes the place of a tensor's history once its memory has been overwritten."""

    @staticmethod
    def forward(tensor: torch.Tensor, call: str) -> torch.Tensor:
        return tensor

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        ctx.call = inputs[1]
        ctx.mark_dirty(inputs[0])

    @staticmethod
    def backward(ctx, gradient):
        raise RuntimeError(
            f"{ctx.call}: a tensor that was passed to this in-place operation was used again "
            "afterwards; use the return value instead"
        )


class _Land(torch.autograd.Function):
    """Write a result into a caller's tensor; the output is an alias of it."""

    @staticmethod
    def forward(result: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().copy_(result)

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        tensor = inputs[1]
        ctx.meta = (tensor.shape, tensor.dtype, tensor.device) if tensor.requires_grad else None

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None if ctx.meta is None else _zeros(ctx.meta)


_communicate = node(Communication)
# For where no transform is active, which the core has seen.
_communicate_plain = super(torch.autograd.Function, Communication).apply
_guard = node(_Guard)
_land = node(_Land)


def _zeros(meta) -> torch.Tensor:
    shape, dtype, device = meta
    return torch.zeros(shape, dtype=dtype, device=device)


def needs_graph(*tensors: torch.Tensor) -> bool:
    """Whether an operation on these tensors has to be seen by autograd."""
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        return True
    return _transforms() or forward_ad._current_level >= 0


def _summed(call: Call, dtype: torch.dtype) -> bool:
    """Whether the gradient would be summed over the ranks though the dtype cannot be."""
    return OPERATIONS[call.operation.dual].reduces and kind_of(call.dtype or dtype) is Kind.OTHER


def _chain(call: Call, dtype: torch.dtype) -> lockstep.Chain | None:
    differentiates = call.derivative is not None and not _summed(call, dtype)
    return lockstep.chain_of(call.comm, call.dtype or dtype, differentiates)


def require_derivative(call: Call, name: str, dtype: torch.dtype) -> None:
    """Raise RuntimeError if `call` cannot be a node of the graph."""
    if _summed(call, dtype):
        raise RuntimeError(
            f"{name}: the gradient would have to be summed over the ranks, which {dtype} cannot "
            "be, but the input requires grad; pass tensor.detach(), or convert it first"
        )
    if call.derivative is None:
        assert call.op is not None
        raise RuntimeError(
            f"{name}: {call.op.name} has no gradient here, but the input requires grad; pass "
            "tensor.detach(), or call it under torch.no_grad()"
        )


def apply(
    call: Call, *tensors: torch.Tensor, name: str = "", anchored: bool = False
) -> torch.Tensor:
    """Carry out a call, as a node of the graph where one is needed.

    `anchored` puts it in the graph though no tensor here requires grad, because another rank's
    does.
    """
    if transforms.batches(tensors[0]):
        return _older_batch(call, tensors[0])
    chain = _chain(call, tensors[0].dtype) if watch.ordered else None
    if chain is not None or needs_graph(*tensors):
        require_derivative(call, name or call.operation.name, tensors[0].dtype)
        transformed = transforms.active()
        if call.output and (transformed or tensors[-1]._is_view()):
            # Into a view: torch takes the first input of a node that writes into a view for that
            # view. In a transform: torch sees the copy. So copy.
            if transformed:
                transforms.refuse_batches(name or call.operation.name)
            call.output = False
            result = apply(call, *tensors[:-1], anchored=not transformed)
            return tensors[-1].copy_(result.view(tensors[-1].shape))
        if transformed:
            tensors = transforms.align(name or call.operation.name, call.comm, tensors)
    elif anchored:
        tensors = (tensors[0], anchor(), *tensors[1:])
    else:
        result = dispatch.run(call, tensors)
        if call.output:
            torch.autograd.graph.increment_version(tensors[-1])
            return tensors[-1]
        return result
    if chain is None:
        return _communicate(call, *tensors)
    result = _communicate(call, tensors[0], chain.tip, *tensors[1:])
    chain.advance(result)
    return result


def _older_batch(call: Call, tensor: torch.Tensor) -> torch.Tensor:
    """Serve a batch of torch's older vmap (is_grads_batched, vectorize) as one larger tensor."""
    size = transforms.batch_size([tensor])
    larger, position = call.batched(size)
    result = apply(larger, transforms.physical(tensor, size).movedim(0, position))
    return transforms.logical(result, position % result.dim())


# Calls of the express lane, by number, reduction and root. They lack the communicator, which
# nothing here may keep alive.
_prototypes: dict[tuple[int, int, int], Call] = {}
_ROWS = [OPERATIONS[name] for name in CODES]


def _express(
    comm: mpi.Comm, code: int, tensor: torch.Tensor, op: int, root: int
) -> torch.Tensor | None:
    """An elementwise call on a plain tensor that requires grad, its arguments seen by the core.

    None if it has no derivative: the full path words the error.
    """
    prototype = _prototypes.get((code, op, root)) or _prototype(comm, code, op, root)
    if prototype is None:
        return None
    return _communicate_plain(prototype.replace(comm=comm), tensor)


def _prototype(comm: mpi.Comm, code: int, op: int, root: int) -> Call | None:
    row = _ROWS[code]
    call = Call(row, comm)
    if "op" in row.arguments:
        call.op = ReduceOp(op)
    if "root" in row.arguments:
        call.root = root
    if call.derivative is None:
        return None
    whole = adjoints.whole_adjoint(call)
    if whole is not None:
        reduction = -1 if whole.op is None else int(whole.op)
        call.adjoint = CODES[whole.operation.name], reduction, whole.root, whole.reverse
    del call.comm
    _prototypes[code, op, root] = call
    return call


collectives.graph(_express)


def _express_adjoint(call: Call, gradient: torch.Tensor) -> torch.Tensor:
    if not torch.is_grad_enabled():
        code, op, root, reverse = call.adjoint  # type: ignore[misc]
        result = collectives.express_adjoint(call.comm, code, gradient, op, root, reverse)
        if result is not None:
            return result
    return adjoints.adjoint(call, (), dense(gradient))


def apply_inplace(call: Call, tensor: torch.Tensor, name: str) -> torch.Tensor:
    """Carry out a call whose result takes the place of `tensor` in memory.

    The result shares the tensor's storage. In the graph, a non-leaf `tensor` may not be used
    afterwards: its history is replaced by a node that raises.
    """
    chain = _chain(call, tensor.dtype) if watch.ordered else None
    if chain is None and not needs_graph(tensor):
        result = dispatch.run(call, (tensor,))
        torch.autograd.graph.increment_version(tensor)
        return result
    require_derivative(call, name, tensor.dtype)
    if transforms.active():
        transforms.refuse_batches(name)
        call.inplace = False
        return tensor.copy_(apply(call, tensor.clone(), name=name))
    source = claim(tensor, name)
    if call.derivative != "linear":
        # The adjoint needs the values that the result overwrites.
        call.inplace = False
        source, target = source.clone(), source
    tip = () if chain is None else (chain.tip,)
    result = _communicate(call, source, *tip)
    if chain is not None:
        chain.advance(result)
    if call.derivative != "linear":
        return _land(result, target)
    torch.autograd.graph.increment_version(tensor)
    return result


def claim(tensor: torch.Tensor, name: str) -> torch.Tensor:
    """`tensor` with its history, which is taken from the caller's own: it will be overwritten.

    A leaf stays as it is. Comes before the communication, because torch refuses here what may
    not be written in place.
    """
    if not tensor.requires_grad or tensor.is_leaf or _of_leaf(tensor):
        return tensor
    source = alias(tensor)
    _guard(tensor, name)
    return source


def _of_leaf(tensor: torch.Tensor) -> bool:
    """A view of a leaf that requires grad is as free as the leaf: torch refuses to guard it."""
    base = tensor._base
    return base is not None and base.is_leaf and base.requires_grad
