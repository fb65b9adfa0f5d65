"""The schedules by their names in `schedule=`."""

from typing import Literal, TypeAlias

from fddp.schedules.eager import eager
from fddp.schedules.one_program import fused
from fddp.schedules.other_orders import held, unordered
from fddp.schedules.pieces import Schedule
from fddp.schedules.staged import after, staged

NamedSchedule: TypeAlias = Literal["fused", "held", "unordered", "staged", "eager", "after"]
SCHEDULES: dict[NamedSchedule, Schedule] = {
    "fused": fused,
    "held": held,
    "unordered": unordered,
    "staged": staged,
    "eager": eager,
    "after": after,
}
