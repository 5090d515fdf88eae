"""The dtypes: one row each, with the code that the C core knows them by."""

from __future__ import annotations

import torch

from ..ops import Kind

__all__ = ["DTYPES", "code_of", "kind_of", "name_of", "widened"]

#: dtype -> (code in reductions.h, kind).
DTYPES: dict[torch.dtype, tuple[int, Kind]] = {
    torch.bool: (0, Kind.BOOL),
    torch.uint8: (1, Kind.INTEGER),
    torch.int8: (2, Kind.INTEGER),
    torch.uint16: (3, Kind.INTEGER),
    torch.int16: (4, Kind.INTEGER),
    torch.uint32: (5, Kind.INTEGER),
    torch.int32: (6, Kind.INTEGER),
    torch.uint64: (7, Kind.INTEGER),
    torch.int64: (8, Kind.INTEGER),
    torch.float16: (9, Kind.HALF),
    torch.bfloat16: (10, Kind.HALF),
    torch.float32: (11, Kind.FLOAT),
    torch.float64: (12, Kind.FLOAT),
    torch.complex64: (13, Kind.COMPLEX),
    torch.complex128: (14, Kind.COMPLEX),
}
# Moved and never computed with: every other dtype that this torch has and that fills whole bytes.
_OTHERS = sorted(
    {
        value
        for name, value in vars(torch).items()
        if isinstance(value, torch.dtype)
        and value not in DTYPES
        and (name.startswith("float8") or name == "complex32")
    },
    key=str,
)
DTYPES.update({dtype: (16 + i, Kind.OTHER) for i, dtype in enumerate(_OTHERS)})
_BY_CODE = {code: dtype for dtype, (code, _) in DTYPES.items()}


def code_of(dtype: torch.dtype) -> int:
    """The number that stands for `dtype` in messages; -1 where mpicoll does not know it."""
    return DTYPES.get(dtype, (-1,))[0]


def kind_of(dtype: torch.dtype) -> Kind:
    """The kind of `dtype`'s elements."""
    return DTYPES[dtype][1]


def name_of(code: int) -> torch.dtype | None:
    """The dtype that a number stands for; None where this torch does not have it."""
    return _BY_CODE.get(code)


def widened(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` in the dtype in which its elements are added and multiplied."""
    return tensor.float() if kind_of(tensor.dtype) is Kind.HALF else tensor
