"""Which members are lost: the silent ones, and those outside of a step in which others wait."""

from contextlib import suppress
from unittest import mock

import pytest

from fddp.elastic.signs import BETWEEN, Limits, Signs

LIMITS = Limits(most=4, silence_s=5.0, stall_s=2.0)
OTHERS = ("a", "b")


class Clock:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def run(self, signs: Signs, seconds: float, heard: tuple[str, ...] = OTHERS) -> list[str]:
        """Lets time pass, in which some members are heard; returns those that are lost."""
        lost = list[str]()
        for _ in range(int(seconds)):
            self.now += 1
            for uid in heard:
                signs.hear(uid)
            lost += signs.lost(OTHERS)
        return sorted(set(lost))


@pytest.fixture
def clock():
    clock = Clock()
    with mock.patch("time.monotonic", clock):
        yield clock


def test_a_member_that_sends_nothing_is_lost_after_the_limit(clock: Clock):
    signs = Signs(LIMITS)
    assert clock.run(signs, 5, heard=("a",)) == []
    assert clock.run(signs, 1, heard=("a",)) == ["b"]


def test_a_new_view_begins_with_the_full_limit(clock: Clock):
    signs = Signs(LIMITS)
    clock.run(signs, 4, heard=())
    signs.restart()
    assert clock.run(signs, 5, heard=()) == []


def test_a_process_that_was_stopped_itself_loses_nobody_when_it_goes_on(clock: Clock):
    signs = Signs(LIMITS)
    clock.run(signs, 3)
    clock.now += 1000
    assert signs.lost(OTHERS) == []
    assert clock.run(signs, 6, heard=("a",)) == ["b"]


def test_a_member_that_stays_outside_of_a_step_is_lost_while_others_wait_in_it(clock: Clock):
    signs = Signs(LIMITS)
    with signs.inside(7):
        signs.place("a", 7, True)
        signs.place("b", 7, False)  # between steps 6 and 7: it evaluates, or waits for data
        limit_s = BETWEEN * LIMITS.stall_s
        assert clock.run(signs, limit_s - 1) == []
        assert clock.run(signs, 2) == ["b"]
    assert clock.run(signs, 2 * limit_s) == []


def test_a_member_in_an_earlier_step_is_lost_too(clock: Clock):
    signs = Signs(LIMITS)
    with signs.inside(7):
        signs.place("a", 6, True)
        signs.place("b", 7, True)
        assert clock.run(signs, BETWEEN * LIMITS.stall_s + 1) == ["a"]


def test_a_member_whose_script_has_ended_is_missed_in_later_steps_alone(clock: Clock):
    signs = Signs(LIMITS)
    signs.left.update(a=8, b=7)
    with signs.inside(7):
        assert signs.lost(OTHERS) == ["b"]
    assert signs.lost(OTHERS) == []
    assert signs.done == 8


def test_a_step_that_fails_is_not_done(clock: Clock):
    signs = Signs(LIMITS)
    with suppress(ValueError), signs.inside(7):
        raise ValueError
    assert signs.done == 0


def test_a_place_is_a_step_and_whether_the_member_is_inside(clock: Clock):
    signs = Signs(LIMITS)
    with signs.inside(3):
        assert signs.own_place == (3, True)
    assert signs.own_place == (3, False)
