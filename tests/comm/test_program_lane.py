"""The order of a lane's programs and of their messages."""

from threading import Event
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fddp.comm.journal import Journal
from fddp.comm.program_lane import InOrder, ProgramLane


def test_a_program_waits_for_the_messages_of_the_program_before_it():
    tokens = list[float]()

    def program(token: float, x: int) -> tuple[float, int]:
        tokens.append(token)
        return token + 1, 2 * x

    lane: Any = SimpleNamespace(last=[1.0])
    first, second = InOrder(lane, program, 0), InOrder(lane, program, 1)
    assert (first(5), second(6), first(7)) == (10, 12, 14)
    assert tokens == [1.0, 2.0, 3.0]


def test_late_messages_leave_last_first_as_the_first_rank_chooses():
    """The wire is busy with the first message until the program has started all of them."""
    started = Event()
    left = list[int]()

    def send(kind: str, array: np.ndarray) -> None:
        assert started.wait(30)
        if kind == "sum":
            left.append(array.size)
        elif {2, 3, 4}.isdisjoint(left) and array[0, 0] == 3:
            array[0, 0] = 2  # the first rank has not started the last one

    lane = ProgramLane(1, jnp.float32(1), [send], Journal())

    def start_all(token: jax.Array) -> tuple[jax.Array, list[jax.Array]]:
        numbers = list[jax.Array]()
        for size, late in [(1, False), (2, True), (3, True), (4, True), (5, False)]:
            x = jnp.ones(size)
            token, number = lane.carrier.start(token, [x], "sum", x, "bucket 0", 0, late)
            numbers.append(number)
        return token, numbers

    def receive_all(token: jax.Array, numbers: list[jax.Array]) -> list[Any]:
        results = list[Any]()
        for size, number in enumerate(numbers, 1):
            token, (x,) = lane.carrier.done([token], number, [jnp.ones(size)], 0)
            results.append(x)
        return results

    flying = jax.block_until_ready(jax.jit(start_all)(jnp.float32(1)))
    started.set()
    for size, x in enumerate(jax.jit(receive_all)(*flying), 1):
        np.testing.assert_array_equal(x, np.ones(size))
    assert left == [1, 3, 4, 2, 5]
