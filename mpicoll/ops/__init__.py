"""What a collective is: one row per operation, one row per reduction.

Data only. Binding, adjoint, tests, benchmark and reference page are driven by these two
tables; nothing here imports the rest of mpicoll.
"""

from .operations import OPERATIONS, Operation
from .reductions import REDUCTIONS, Kind, ReduceOp, Reduction

__all__ = ["OPERATIONS", "REDUCTIONS", "Kind", "Operation", "ReduceOp", "Reduction"]
