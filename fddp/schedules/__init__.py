"""How the pieces of a step are launched: in one program, in stages beside their traffic, or one after the other.

A schedule says what shares a program and what waits for what; the mathematics is the pieces' own. Here are also the
spans of a step that ran, and a step on paper. This room imports jaxpr, buckets, comm and hooks.
"""

from fddp.schedules.in_order import after as after
from fddp.schedules.one_program import fused as fused
from fddp.schedules.pieces import Pieces as Pieces
from fddp.schedules.pieces import Runner as Runner
from fddp.schedules.pieces import Schedule as Schedule
from fddp.schedules.threads import staged as staged
from fddp.schedules.timeline import Pace as Pace
from fddp.schedules.timeline import Span as Span
from fddp.schedules.timeline import Timeline as Timeline
from fddp.schedules.timeline import observed_pace as observed_pace
from fddp.schedules.timeline import simulate as simulate
