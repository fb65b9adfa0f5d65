"""Parses the text of a compiled program: its instructions, their cost, and its collectives.

A step compares the collectives of all ranks' programs; an audit compares them with the plan.
This room imports no other.
"""

from fddp.hlo.collectives import Collective as Collective
from fddp.hlo.collectives import find_collectives as find_collectives
from fddp.hlo.collectives import sends as sends
from fddp.hlo.flops import total_flops as total_flops
from fddp.hlo.flops import traffic as traffic
from fddp.hlo.flops import work as work
from fddp.hlo.module import Computation as Computation
from fddp.hlo.module import Instruction as Instruction
from fddp.hlo.module import Module as Module
from fddp.hlo.module import parse as parse
