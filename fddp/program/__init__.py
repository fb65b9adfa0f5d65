"""A step's program: where its messages start and end, and its text when it is compiled.

A message is an equation of `exchange`; a `Carrier` has the calls that start and end it. A step
compares the collectives of all ranks' compiled programs; an audit compares them with the plan.
This room imports jaxpr.
"""

from fddp.program.collectives import KINDS as KINDS
from fddp.program.collectives import Collective as Collective
from fddp.program.collectives import find_collectives as find_collectives
from fddp.program.collectives import heavy_operations as heavy_operations
from fddp.program.exchange import NUMBER as NUMBER
from fddp.program.exchange import TOKEN as TOKEN
from fddp.program.exchange import Carrier as Carrier
from fddp.program.exchange import Kind as Kind
from fddp.program.exchange import exchange as exchange
from fddp.program.late import SplitProgram as SplitProgram
from fddp.program.late import split_late as split_late
from fddp.program.loop_messages import received_behind_loops as received_behind_loops
from fddp.program.module import Module as Module
from fddp.program.module import parse as parse
from fddp.program.overlap import overlapped as overlapped
from fddp.program.timeline import MessageTimes as MessageTimes
from fddp.program.timeline import Span as Span
from fddp.program.timeline import Timeline as Timeline
from fddp.program.timeline import timeline_of as timeline_of
