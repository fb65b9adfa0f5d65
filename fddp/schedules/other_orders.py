"""Schedules of one program whose messages leave in another order, for some targets."""

from fddp.schedules.one_program import one_program_schedule
from fddp.schedules.values import Value


def until_the_last(sums: list[Value], waited: int, last: bool) -> list[Value]:
    """Lets messages leave one after the other, and uses no sum before the last message leaves.

    On GPUs before Hopper, XLA puts updates that are ready early where the backward pass would hide
    a message.
    """
    if last:
        return sums
    return sums[waited:]


def at_any_time(sums: list[Value], waited: int, last: bool) -> list[Value]:
    """Lets XLA choose when a message leaves."""
    del sums, waited, last
    return []


held = one_program_schedule("held", until_the_last)
unordered = one_program_schedule("unordered", at_any_time)
