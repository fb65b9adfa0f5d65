"""A step as one traced function, and the schedules that decide when its messages leave.

The mathematics is in the pieces. This room imports program, jaxpr, buckets, comm and hooks.
"""

from fddp.step.schedules.compile_reports import report_compiling as report_compiling
from fddp.step.schedules.compile_reports import report_first_call as report_first_call
from fddp.step.schedules.late_sums import StateInFlight as StateInFlight
from fddp.step.schedules.late_sums import eager as eager
from fddp.step.schedules.late_sums import finished as finished
from fddp.step.schedules.one_program import after as after
from fddp.step.schedules.one_program import overlap as overlap
from fddp.step.schedules.one_program import scope as scope
from fddp.step.schedules.pieces import Phase as Phase
from fddp.step.schedules.pieces import Pieces as Pieces
from fddp.step.schedules.pieces import Runner as Runner
from fddp.step.schedules.pieces import Schedule as Schedule
from fddp.step.schedules.pieces import StepInputs as StepInputs
from fddp.step.schedules.pieces import StepOutputs as StepOutputs
from fddp.step.schedules.sent_bytes import by_bucket as by_bucket
from fddp.step.schedules.sent_bytes import more_sent as more_sent
