"""The schedules by their names in `schedule=`."""

from typing import Literal, TypeAlias

from fddp.schedules.eager import eager
from fddp.schedules.one_program import fused
from fddp.schedules.pieces import Schedule
from fddp.schedules.staged import after, staged

NamedSchedule: TypeAlias = Literal["fused", "staged", "eager", "after"]
SCHEDULES: dict[NamedSchedule, Schedule] = {
    "fused": fused,
    "staged": staged,
    "eager": eager,
    "after": after,
}
