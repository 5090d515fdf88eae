"""Under ``mpiexec -n 2``: every rank runs the same tests in the same order."""

from __future__ import annotations

import logging

import pytest
import torch
from mpicoll_template import RunningMean

import mpicoll
from mpicoll.algorithms import Join

WORLD = mpicoll.COMM_WORLD


def numbers():
    """Rank r has 1 + 2 r batches of the number r + 1."""
    return [torch.full((2,), WORLD.rank + 1.0) for _ in range(1 + 2 * WORLD.rank)]


# [test]
def test_uneven_inputs():
    """The mean counts every number once, on every rank, as often as it was there."""
    mean = RunningMean(WORLD)
    with Join([mean]) as context:
        for batch in numbers():
            mean.update(batch)
    counts = [2 * (1 + 2 * r) for r in range(WORLD.size)]
    expected = sum((r + 1) * n for r, n in enumerate(counts)) / sum(counts)
    assert mean.mean == pytest.approx(expected)
    assert mean.sums[1] == sum(counts)
    assert context.shadowed == 2 * (WORLD.size - 1 - WORLD.rank)


# [end of test]


def test_the_hook_and_the_observer_report(caplog):
    mean = RunningMean(WORLD)
    with caplog.at_level(logging.INFO, "mpicoll_template"), Join([mean], report="loss"):
        for batch in numbers():
            mean.update(batch)
    behind = 2 * (WORLD.size - 1 - WORLD.rank)
    share = round(100 * behind / (1 + 2 * (WORLD.size - 1)))
    assert caplog.messages == [
        f"loss: answered {behind} updates",
        f"waited for others in {share} % of the iterations",
    ]


@pytest.mark.parametrize("fails", [False, True])
def test_the_context_leaves_nothing_behind(fails):
    mean = RunningMean(WORLD)
    try:
        with Join([mean], on_error="propagate"):
            assert len(mean.before_update) == 1
            if fails:  # on all ranks alike
                raise KeyError("mine")
    except KeyError:
        assert fails
    assert mean.before_update == []


def test_other_objects_are_left_to_others():
    with pytest.raises(TypeError, match=r"asked: template \(mpicoll-template 0.1.0\)"), Join([3]):
        pass


def test_without_join_it_is_what_it_was():
    mean = RunningMean(WORLD)
    assert mean.update(torch.full((3,), float(WORLD.rank))) == (WORLD.size - 1) / 2
