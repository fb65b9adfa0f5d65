"""A program of a lane waits for the messages of the program before it."""

from types import SimpleNamespace
from typing import Any

from fddp.comm.program_lane import InOrder


def test_a_program_waits_for_the_messages_of_the_program_before_it():
    tokens = list[float]()

    def program(token: float, x: int) -> tuple[float, int]:
        tokens.append(token)
        return token + 1, 2 * x

    lane: Any = SimpleNamespace(last=[1.0])
    first, second = InOrder(lane, program, 0), InOrder(lane, program, 1)
    assert (first(5), second(6), first(7)) == (10, 12, 14)
    assert tokens == [1.0, 2.0, 3.0]
