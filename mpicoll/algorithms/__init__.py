"""Training with uneven inputs: ranks that have run out of them keep the others' company."""

from ..communicator import Communicator
from ..errors import CollectiveMismatchError, JoinAborted
from .data_parallel import DataParallel
from .join import Join
from .joinable import Joinable, JoinHook
from .sharded_optimizer import ZeroRedundancyOptimizer

Joinable.register(Communicator)

__all__ = [
    "CollectiveMismatchError",
    "DataParallel",
    "Join",
    "JoinAborted",
    "JoinHook",
    "Joinable",
    "ZeroRedundancyOptimizer",
]
