"""A step as one traced function, and the schedules that decide when its messages leave.

The mathematics is in the pieces. This room imports program, jaxpr, buckets, comm and hooks.
"""

from fddp.step.schedules.compile_reports import report_compiling, report_first_call
from fddp.step.schedules.late_sums import StateInFlight, eager, finished
from fddp.step.schedules.one_program import after, overlap, scope
from fddp.step.schedules.pieces import Pieces, Runner, Schedule, Send, StepInputs, StepOutputs
from fddp.step.schedules.timeline import Span, Timeline
