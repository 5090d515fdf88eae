"""From a tensor to memory that MPI may touch: dtypes, layouts, devices, host buffers."""

from .buckets import Bucket, partition
from .devices import (
    Plan,
    cuda_aware_mpi_support,
    deactivate_cuda_aware_mpi_support,
    on_device,
    plan_for,
)
from .dtypes import code_of, kind_of, name_of, widened
from .host import Pipeline, piece_elements
from .layout import check_tensor, check_writable, contiguous, empty, is_plain, overlap

__all__ = [
    "Bucket",
    "Pipeline",
    "Plan",
    "check_tensor",
    "check_writable",
    "code_of",
    "contiguous",
    "cuda_aware_mpi_support",
    "deactivate_cuda_aware_mpi_support",
    "empty",
    "is_plain",
    "kind_of",
    "name_of",
    "on_device",
    "overlap",
    "partition",
    "piece_elements",
    "plan_for",
    "widened",
]
