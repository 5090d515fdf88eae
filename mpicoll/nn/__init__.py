"""Differentiable communication in torch's words."""

from . import functional

__all__ = ["functional"]
