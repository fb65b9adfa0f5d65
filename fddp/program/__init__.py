"""A step's program: where its messages start and end.

A message is an equation of `exchange`; a `Carrier` has the calls that start and end it.
This room imports jaxpr.
"""

from fddp.program.exchange import NUMBER, TOKEN, Carrier, Kind, exchange
from fddp.program.late import SplitProgram, split_late
from fddp.program.loop_messages import received_behind_loops
from fddp.program.overlap import overlapped
