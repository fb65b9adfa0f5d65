"""Reads and rewrites programs, as lists of equations that are known before they run.

It finds the order in which gradients become ready and the parameters that a loss uses, and
rewrites programs: `loops` fuses their loops, and `parts` runs updates on parts of leaves.
This room imports no other.
"""

from fddp.jaxpr.dataflow import inputs_of_outputs as inputs_of_outputs
from fddp.jaxpr.equations import cheap as cheap
from fddp.jaxpr.equations import collectives as collectives
from fddp.jaxpr.equations import form_of as form_of
from fddp.jaxpr.equations import maker_positions as maker_positions
from fddp.jaxpr.equations import straighten as straighten
from fddp.jaxpr.equations import text_digest as text_digest
from fddp.jaxpr.equations import variables as variables
from fddp.jaxpr.gradient_rows import touched_rows as touched_rows
from fddp.jaxpr.interpreter import Read as Read
from fddp.jaxpr.interpreter import Values as Values
from fddp.jaxpr.interpreter import interpret as interpret
from fddp.jaxpr.leaves import differentiable as differentiable
from fddp.jaxpr.leaves import is_used_up as is_used_up
from fddp.jaxpr.leaves import join_leaves as join_leaves
from fddp.jaxpr.leaves import refuse_deleted as refuse_deleted
from fddp.jaxpr.leaves import split_leaves as split_leaves
from fddp.jaxpr.leaves import used_up as used_up
from fddp.jaxpr.leaves import with_trained as with_trained
from fddp.jaxpr.loops.fusible_loops import computed_by_layer as computed_by_layer
from fddp.jaxpr.loops.fusible_loops import places as places
from fddp.jaxpr.loops.loop_fusion import fused_loops as fused_loops
from fddp.jaxpr.loops.loop_fusion import run_scan as run_scan
from fddp.jaxpr.order import first_uses as first_uses
from fddp.jaxpr.order import grad_order as grad_order
from fddp.jaxpr.order import ready_order as ready_order
from fddp.jaxpr.order import wiring as wiring
from fddp.jaxpr.parts.part_kinds import Follows as Follows
from fddp.jaxpr.parts.part_kinds import Kind as Kind
from fddp.jaxpr.parts.part_kinds import Same as Same
from fddp.jaxpr.parts.part_kinds import Whole as Whole
from fddp.jaxpr.parts.part_passes import LeafWork as LeafWork
from fddp.jaxpr.parts.part_passes import result_kinds as result_kinds
from fddp.jaxpr.parts.part_passes import whole_leaves as whole_leaves
from fddp.jaxpr.parts.part_program import Ranks as Ranks
from fddp.jaxpr.parts.part_program import RunWhole as RunWhole
from fddp.jaxpr.parts.part_program import on_parts as on_parts
from fddp.jaxpr.parts.part_program import spread as spread
from fddp.jaxpr.used import statically_used as statically_used
from fddp.jaxpr.used_at_run_time import tracked as tracked
