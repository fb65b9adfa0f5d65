"""Runs a program of whole arrays, such as an optimizer's update, on parts of them.

The equations decide which results are parts, and which need collectives or whole arrays. This room
imports `cost`, `equations` and `interpreter` of `fddp.jaxpr`.
"""

from fddp.jaxpr.parts.part_kinds import Follows as Follows
from fddp.jaxpr.parts.part_kinds import Kind as Kind
from fddp.jaxpr.parts.part_kinds import Same as Same
from fddp.jaxpr.parts.part_kinds import Whole as Whole
from fddp.jaxpr.parts.part_passes import Stay as Stay
from fddp.jaxpr.parts.part_passes import result_kinds as result_kinds
from fddp.jaxpr.parts.part_passes import stays as stays
from fddp.jaxpr.parts.part_program import AtHome as AtHome
from fddp.jaxpr.parts.part_program import Ranks as Ranks
from fddp.jaxpr.parts.part_program import on_parts as on_parts
from fddp.jaxpr.parts.part_program import spread as spread
