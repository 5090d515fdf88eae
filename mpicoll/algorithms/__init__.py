"""Training with uneven inputs: ranks that have run out of them keep the others' company."""

from ..communicator import Communicator
from ..errors import CollectiveMismatchError, JoinAborted
from .join import Join
from .joinable import Joinable, JoinHook

Joinable.register(Communicator)

__all__ = ["CollectiveMismatchError", "Join", "JoinAborted", "JoinHook", "Joinable"]
