"""A step as a list of tasks, and the launchers that run it: as one program, on threads, in order.

A list says which tasks compute, which send, and which wait for others; a launcher runs them; a
schedule is both. The mathematics is in the pieces. The room also holds the spans of a step that
ran. This room imports jaxpr, buckets, comm and hooks.
"""

from fddp.schedules.ahead_of_time import compiled as compiled
from fddp.schedules.compiling import compiling as compiling
from fddp.schedules.compiling import first_call as first_call
from fddp.schedules.eager import eager as eager
from fddp.schedules.exchange_tasks import described_exchanges as described_exchanges
from fddp.schedules.lists import forms_of as forms_of
from fddp.schedules.lists import in_one_piece as in_one_piece
from fddp.schedules.lists import in_stages as in_stages
from fddp.schedules.named import SCHEDULES as SCHEDULES
from fddp.schedules.named import NamedSchedule as NamedSchedule
from fddp.schedules.one_program import fused as fused
from fddp.schedules.one_program import in_one_program as in_one_program
from fddp.schedules.one_program import scope as scope
from fddp.schedules.pieces import Pieces as Pieces
from fddp.schedules.pieces import Round as Round
from fddp.schedules.pieces import Runner as Runner
from fddp.schedules.pieces import Schedule as Schedule
from fddp.schedules.pieces import StepInputs as StepInputs
from fddp.schedules.pieces import StepOutputs as StepOutputs
from fddp.schedules.programs import on_each_device as on_each_device
from fddp.schedules.send import by_bucket as by_bucket
from fddp.schedules.send import more_sent as more_sent
from fddp.schedules.staged import after as after
from fddp.schedules.staged import in_order as in_order
from fddp.schedules.staged import on_threads as on_threads
from fddp.schedules.staged import staged as staged
from fddp.schedules.tasks import Communicate as Communicate
from fddp.schedules.tasks import Compute as Compute
from fddp.schedules.tasks import TaskList as TaskList
from fddp.schedules.timeline import Span as Span
from fddp.schedules.timeline import Timeline as Timeline
from fddp.schedules.uncut import shorter_loops as shorter_loops
