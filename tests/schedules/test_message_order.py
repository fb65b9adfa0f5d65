"""Claims about ways that take turns until the fastest one is known."""

from dataclasses import replace

import numpy as np
import pytest

import fddp
from fddp.schedules.message_order import STEPS, TRIED, TURNS, Trial


def steps(trial: Trial, seconds: list[float], count: int) -> list[int]:
    """The ways of so many steps, one as long as the other but for the first of a turn, which
    misleads."""
    ways = list[int]()
    for number in range(count):
        ways.append(trial.way(len(seconds)))
        own = seconds[ways[-1]]
        trial.took((100.0 / own, own, 1.5 * own, 20.0 * own)[number % STEPS])
    return ways


@pytest.mark.parametrize("seconds", [[1.0, 2.0], [2.0, 1.0], [3.0, 2.0, 1.0]])
def test_ways_take_turns_and_the_fastest_one_stays(group, seconds: list[float]):
    n = len(seconds)
    got = steps(Trial(group(1)), seconds, n * TURNS * STEPS + 5)
    assert got[: n * TURNS * STEPS] == [
        way for _ in range(TURNS) for way in range(n) for _ in range(STEPS)
    ]
    assert got[n * TURNS * STEPS :] == [int(np.argmin(seconds))] * 5


def test_what_is_said_of_one_way_alone_is_nothing(group):
    trial = Trial(told(group(1), []))
    assert [trial.way(1) for _ in range(3)] == [0, 0, 0]


def told(group: fddp.Group, words: list[list[int]]) -> fddp.Group:
    """A group in which rank 0 says these, one after the other."""
    said = iter(words)
    return replace(
        group,
        hosts=group.hosts._replace(broadcast=lambda own, root: np.array(next(said), own.dtype)),
    )


def test_at_each_turn_all_ranks_take_rank_0_s_way_whatever_they_would_have_taken(group):
    got = steps(Trial(told(group(1), [[0, 0], [0, 0], [1, 0], [1, 1]])), [1.0, 2.0], 4 * STEPS)
    assert got == [0] * 2 * STEPS + [1] * 2 * STEPS


def test_steps_that_all_fail_end_the_trial_as_well(group):
    trial = Trial(group(1))
    assert [trial.way(2) for _ in range(TRIED + 2)][-2:] == [0, 0]
