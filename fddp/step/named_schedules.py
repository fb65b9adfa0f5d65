"""The schedules by their names in `schedule=`, and their kinds."""

from fddp.schedules import Schedule, after, eager, fused, held, staged, unordered

SCHEDULES: dict[str, Schedule] = {
    "fused": fused,
    "held": held,
    "unordered": unordered,
    "after": after,
    "staged": staged,
    "eager": eager,
}
ONE_PROGRAM = (fused, held, unordered)


def cuts(schedule: Schedule) -> bool:
    """Returns True if a schedule cuts the backward pass, to send messages before the pass ends."""
    return schedule not in (*ONE_PROGRAM, after)
