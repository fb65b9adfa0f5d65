"""Chooses the bits of each bucket by simulation: messages in time, with the least error."""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

# Mean square rounding error of a normal number, by bits. It assumes that the largest number of a
# block is about three standard deviations.
LOST = {32: 0.0, 16: 2.0**-18 / 3, 8: (3 / 127) ** 2 / 12, 4: (3 / 7) ** 2 / 12, 1: 1 - 2 / math.pi}
FEWER = dict(zip(LOST, [*LOST][1:]))


class SimulatedMessage(NamedTuple):
    """The sum of a bucket over replicas, in the simulation."""

    bucket: int
    """Index of the bucket."""
    ready_s: float
    """Seconds from the start of a step until the bucket is ready."""
    due_s: float
    """Seconds from the start of a step until the deadline of the sum."""
    nbytes: int
    """Bytes at 32 bits."""


def fitting_bits(
    messages: Sequence[SimulatedMessage], seconds: Callable[[int, int], float]
) -> tuple[int, ...]:
    """Returns the bits of each bucket (32, 16, 8, 4 or 1) for messages in launch order.

    `seconds` maps the position of a message and its bits to a duration.

    >>> two = lambda due: [
    ...     SimulatedMessage(0, 1.0, due, 8), SimulatedMessage(1, 2.0, due, 8)]
    >>> [fitting_bits(two(due), lambda k, bits: bits / 32) for due in (3.0, 2.5, 2.25)]
    [(32, 32), (32, 16), (32, 8)]
    """
    chosen = {message.bucket: 32 for message in messages}

    def arrival_s(last: int, bits: dict[int, int]) -> float:
        clock = 0.0
        for k, message in enumerate(messages[: last + 1]):
            clock = max(clock, message.ready_s) + seconds(k, bits[message.bucket])
        return clock

    # While a message is late, it or an earlier one gets the next fewer bits: the one with the least
    # added error per second saved. If fewer bits save no more time, the message stays late.
    for k, message in enumerate(messages):
        while (arrival := arrival_s(k, chosen)) > message.due_s:
            costs = list[tuple[float, int]]()
            for earlier in messages[: k + 1]:
                bits = chosen[earlier.bucket]
                fewer = FEWER.get(bits, bits)
                saved = arrival - arrival_s(k, chosen | {earlier.bucket: fewer})
                if saved > 0:
                    error = earlier.nbytes * (LOST[fewer] - LOST[bits])
                    costs.append((error / saved, earlier.bucket))
            if not costs:
                break
            cheapest = min(costs)[1]
            chosen[cheapest] = FEWER[chosen[cheapest]]
    return tuple(chosen[bucket] for bucket in sorted(chosen))
