"""Communicators of a given size, for tests whose numbers belong to one size."""

from __future__ import annotations

import functools
import inspect

import pytest
from mpi4py import MPI

import mpicoll

RANK, SIZE = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
LARGEST = 4


def part(size: int) -> mpicoll.Communicator | None:
    """The first `size` ranks as a communicator of their own; None on the others. Collective."""
    return mpicoll.COMM_WORLD.Split(0 if size > RANK else None)


def ranks(*sizes: int):
    """Run a test on the first W ranks, for every W of `sizes` that there are ranks for.

    The test gets a communicator of W ranks as its first argument; the ranks outside have nothing
    to do. A test with no fitting size is not collected, so that nothing has to be skipped: runs
    with 1 to 4 ranks together cover everything.
    """
    assert sizes
    assert all(1 <= size <= LARGEST for size in sizes)
    fitting = [size for size in sizes if size <= SIZE]

    def decorate(test):
        if not fitting:
            return None

        @functools.wraps(test)
        def run(ranks, request, *args, **kwargs):
            comm = part(ranks)
            if comm is None:
                return
            request.addfinalizer(comm.Free)  # once the ranks have met again
            test(comm, *args, **kwargs)

        _, *others = inspect.signature(test).parameters.values()
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        first = [inspect.Parameter(name, kind) for name in ("ranks", "request")]
        run.__signature__ = inspect.Signature([*first, *others])
        return pytest.mark.parametrize("ranks", fitting)(run)

    return decorate


def every(test):
    """Run a test on all ranks, with a communicator of its own."""
    return ranks(min(SIZE, LARGEST))(test)


def several(test):
    """A test for two ranks or more; not collected where there is one."""
    return test if SIZE > 1 else None
