"""Operations as nodes of the autograd graph, with their true adjoints."""

from .dummies import JoinDummies, join
from .exchange import exchange
from .functions import apply, apply_inplace, needs_graph, require_derivative
from .replicated import copy_to, reduce_from

__all__ = [
    "JoinDummies",
    "apply",
    "apply_inplace",
    "copy_to",
    "exchange",
    "join",
    "needs_graph",
    "reduce_from",
    "require_derivative",
]
