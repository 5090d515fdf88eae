"""Which tensors can be sent at all, and how any layout becomes contiguous."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from .._core import buffers
from .dtypes import DTYPES

__all__ = ["check_tensor", "check_writable", "contiguous", "empty", "is_plain", "overlap"]


def check_tensor(call: str, name: str, tensor: object) -> None:
    """Raise ``TypeError`` unless `tensor` is a strided torch.Tensor of a known dtype."""
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{call}: {name} must be a torch.Tensor, not {type(tensor).__name__}")
    if tensor.layout is not torch.strided:
        raise TypeError(
            f"{call}: {name} has layout {tensor.layout}, which has no strided memory to send; "
            "pass a strided tensor, for example tensor.to_dense()"
        )
    if tensor.is_quantized:
        raise TypeError(
            f"{call}: {name} is quantized ({tensor.dtype}); send tensor.int_repr() or "
            "tensor.dequantize()"
        )
    if tensor.is_nested:
        raise TypeError(f"{call}: {name} is a nested tensor; send tensor.unbind() one by one")
    if tensor.is_meta:
        raise TypeError(f"{call}: {name} is a meta tensor, which has no memory to send")
    if type(tensor) is not torch.Tensor:
        if isinstance(tensor, FakeTensor):
            raise TypeError(f"{call}: {name} is a fake tensor, which has no memory to send")
        if tensor.device.type == "cpu" and is_traceable_wrapper_subclass(tensor):
            raise TypeError(
                f"{call}: {name} is a {type(tensor).__name__}, which wraps other tensors and has "
                "no memory of its own; pass the tensors that it wraps"
            )
    if tensor.dtype not in DTYPES:
        raise TypeError(f"{call}: {name} has dtype {tensor.dtype}, which mpicoll does not send")


def check_writable(call: str, name: str, tensor: torch.Tensor) -> None:
    """Raise ``ValueError`` where elements of `tensor` share memory, so that it cannot be filled."""
    if tensor.numel() > 1 and any(
        stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    ):
        raise ValueError(
            f"{call}: {name} of shape {tuple(tensor.shape)} and strides {tensor.stride()} is "
            "expanded: several elements share one place in memory and cannot be written; pass "
            "tensor.clone()"
        )


def empty(
    shape: Sequence[int], like: torch.Tensor, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """A new contiguous tensor for a result, uninitialised; recycled memory on the CPU."""
    if dtype is None and type(like) is torch.Tensor and like.device.type == "cpu":
        return buffers.empty(shape, like)
    return like.new_empty(shape, dtype=dtype)


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether memory and value of `tensor` agree: contiguous, neither conjugated nor negated."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def contiguous(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` itself if it is plain, else a contiguous copy of its value.

    Strides of dimensions of size one do not count: such a tensor is sent as it is.
    """
    if is_plain(tensor):
        return tensor if not tensor._is_zerotensor() else torch.zeros_like(tensor)
    plain = tensor.resolve_conj().resolve_neg().contiguous()
    if plain.device.type == "cpu" and not buffers.is_contiguous(plain):
        plain = plain.clone(memory_format=torch.contiguous_format)
    return plain


def overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether the stretches of memory in which two tensors' elements lie have a part in common.

    The elements themselves may lie between one another where a tensor is not contiguous.
    """
    if one.numel() == 0 or other.numel() == 0:
        return False
    places = _stretch(one), _stretch(other)
    if places[0] is None or places[1] is None:  # memory that torch does not show: judge by identity
        return _storage(one) == _storage(other)
    (first, last), (begin, end) = places[0], places[1]
    return first <= end and begin <= last


def _stretch(tensor: torch.Tensor) -> tuple[int, int] | None:
    """The addresses of the first and the last byte; None where they are hidden."""
    try:
        start = tensor.data_ptr()
    except (NotImplementedError, RuntimeError):  # inside a transform of torch.func
        return None
    if start == 0:
        return None
    reach = sum(int(n - 1) * int(s) for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (reach + 1) * tensor.element_size() - 1


def _storage(tensor: torch.Tensor) -> int:
    """What tells a tensor's storage from others where its address is hidden."""
    try:
        return tensor.untyped_storage()._cdata
    except NotImplementedError:  # inside a transform of torch.func
        return id(tensor)
