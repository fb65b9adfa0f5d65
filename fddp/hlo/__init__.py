"""Parses the text of a compiled program: its instructions and its collectives.

A step compares the collectives of all ranks' programs; an audit compares them with the plan.
This room imports no other.
"""

from fddp.hlo.collectives import Collective as Collective
from fddp.hlo.collectives import find_collectives as find_collectives
from fddp.hlo.collectives import heavy_operations as heavy_operations
from fddp.hlo.module import Module as Module
from fddp.hlo.module import parse as parse
