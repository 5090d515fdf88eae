"""A simulated accelerator: device type ``simdev``, whose memory is host memory in disguise.

Every tensor on it is a wrapper around a CPU tensor that nothing but this module reaches: it has
no address, no DLPack, no numpy. Copies between the two kinds of memory are counted, and mixing
them in one operation is refused as a real device refuses it.

Making the device type known to torch is process-wide and cannot be undone, so the tests that
import this module run in processes of their own.
"""

from __future__ import annotations

import torch
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

__all__ = ["DEVICE", "Traffic", "on_device", "raw_of", "traffic"]

torch.utils.backend_registration._setup_privateuseone_for_python_backend("simdev")
DEVICE = torch.device("simdev:0")
_aten = torch.ops.aten


class Traffic:
    """Copies between the host and the device since the last :meth:`clear`."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self.to_host: list[int] = []  # bytes of every copy
        self.to_device: list[int] = []

    @property
    def copies(self) -> tuple[int, int]:
        """How many went out (to the host), and in (to the device)."""
        return len(self.to_host), len(self.to_device)


traffic = Traffic()


def _size(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


class SimTensor(torch.Tensor):
    """A tensor on the simulated device; ``raw`` is its memory."""

    @staticmethod
    def __new__(cls, raw: torch.Tensor) -> SimTensor:
        assert type(raw) is torch.Tensor, type(raw)
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            raw.shape,
            strides=raw.stride(),
            storage_offset=raw.storage_offset(),
            dtype=raw.dtype,
            device=DEVICE,
        )
        made.raw = raw
        torch._C._set_conj(made, raw.is_conj())
        torch._C._set_neg(made, raw.is_neg())
        return made

    def __init__(self, raw: torch.Tensor) -> None:
        pass

    __torch_function__ = torch._C._disabled_torch_function_impl

    def __repr__(self, **_: object) -> str:
        return f"SimTensor({self.raw!r})"

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if function is _aten.copy_.default:
            return _copy(*args[:2])
        if function is _aten._local_scalar_dense.default:
            traffic.to_host.append(_size(args[0]))
        elif function is _aten._to_copy.default:
            source = args[0]
            target = torch.device(kwargs.get("device") or source.device)
            if target.type != source.device.type:
                moved = traffic.to_host if target.type == "cpu" else traffic.to_device
                moved.append(_size(source))
        else:
            _refuse_mixing(function, args, kwargs)
        lands = kwargs.get("device")
        host = lands is not None and torch.device(lands).type == "cpu"
        if lands is not None:
            kwargs["device"] = torch.device("cpu")
        flat, spec = tree_flatten((args, kwargs))
        raws = [t.raw if isinstance(t, SimTensor) else t for t in flat]
        mine = {id(t.raw): t for t in flat if isinstance(t, SimTensor)}
        args, kwargs = tree_unflatten(raws, spec)
        result = function(*args, **kwargs)
        if host:
            return result
        return tree_map(
            lambda t: (
                (mine[id(t)] if id(t) in mine else SimTensor(t))
                if isinstance(t, torch.Tensor)
                else t
            ),
            result,
        )


def _copy(target: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    here, there = isinstance(target, SimTensor), isinstance(source, SimTensor)
    if here != there:
        (traffic.to_device if here else traffic.to_host).append(_size(source))
    (target.raw if here else target).copy_(source.raw if there else source)
    return target


def _refuse_mixing(function, args, kwargs) -> None:
    for tensor in tree_flatten((args, kwargs))[0]:
        if isinstance(tensor, torch.Tensor) and not isinstance(tensor, SimTensor) and tensor.dim():
            raise RuntimeError(
                f"{function}: expected all tensors on {DEVICE}, found one on {tensor.device}"
            )


def _empty(size, *, dtype=None, layout=None, device=None, pin_memory=None, memory_format=None):
    return SimTensor(torch.empty(size, dtype=dtype or torch.get_default_dtype()))


def _empty_strided(size, stride, *, dtype=None, layout=None, device=None, pin_memory=None):
    return SimTensor(torch.empty_strided(size, stride, dtype=dtype or torch.get_default_dtype()))


_library = torch.library.Library("aten", "IMPL")
_library.impl("empty.memory_format", _empty, "PrivateUse1")
_library.impl("empty_strided", _empty_strided, "PrivateUse1")


def on_device(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor`'s memory, layout and all, as a leaf on the device. Not a counted copy."""
    made = SimTensor(tensor.detach())
    return made.requires_grad_(tensor.requires_grad)


def raw_of(tensor: torch.Tensor) -> torch.Tensor:
    """Reach into a tensor of the device for its memory. Not a counted copy."""
    assert isinstance(tensor, SimTensor), f"{type(tensor).__name__} on {tensor.device}"
    return tensor.raw
