"""Chooses on paper the bits of each bucket: as many as come back in time, least error first."""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

# The mean square of what is lost of a normal number, by bits: a block's largest is about three standard deviations.
LOST = {32: 0.0, 16: 2.0**-18 / 3, 8: (3 / 127) ** 2 / 12, 4: (3 / 7) ** 2 / 12, 1: 1 - 2 / math.pi}
FEWER = dict(zip(LOST, [*LOST][1:]))


class Message(NamedTuple):
    """The sum of a bucket over replicas, on paper."""

    bucket: int
    """Its number."""
    ready_s: float
    """Seconds from a step's begin until it can leave."""
    due_s: float
    """Seconds until it is to be back."""
    nbytes: int
    """Bytes in 32 bits."""


def fitting_bits(messages: Sequence[Message], seconds: Callable[[int, int], float]) -> tuple[int, ...]:
    """Chooses the bits of each bucket with which all messages just come back in time, least error first.

    Messages leave one after the other, each when it is ready. As long as one comes back too late, it or one before it
    is given the next fewer bits: the one that costs the least error for each second that this saves.

    Args:
      messages: in the order in which they leave.
      seconds: (place of a message, its bits) → seconds that it takes.

    Returns:
      The bits of each bucket: 32, 16, 8, 4 or 1; the fewest that help, where nothing fits.

    Example:
      >>> two = lambda due: [Message(0, 1.0, due, 8), Message(1, 2.0, due, 8)]
      >>> [fitting_bits(two(due), lambda k, bits: bits / 32) for due in (3.0, 2.5, 2.25)]
      [(32, 32), (32, 16), (32, 8)]
    """
    chosen = {one.bucket: 32 for one in messages}

    def back_s(last: int, bits: dict[int, int]) -> float:
        now = 0.0
        for at, one in enumerate(messages[: last + 1]):
            now = max(now, one.ready_s) + seconds(at, bits[one.bucket])
        return now

    for at, one in enumerate(messages):
        while (late := back_s(at, chosen)) > one.due_s:
            found = list[tuple[float, int]]()
            for before in messages[: at + 1]:
                now = chosen[before.bucket]
                fewer = FEWER.get(now, now)
                saved = late - back_s(at, chosen | {before.bucket: fewer})
                if saved > 0:
                    found.append((before.nbytes * (LOST[fewer] - LOST[now]) / saved, before.bucket))
            if not found:
                break
            least = min(found)[1]
            chosen[least] = FEWER[chosen[least]]
    return tuple(chosen[bucket] for bucket in sorted(chosen))
