"""Reads and rewrites programs, as lists of equations that are known before they run.

It finds the order in which gradients become ready and the parameters that a loss uses. It fuses
loops over layers, and runs updates on parts of leaves.
This room imports no other.
"""

from fddp.jaxpr.dataflow import flow, inputs_of_outputs
from fddp.jaxpr.equations import cheap as cheap
from fddp.jaxpr.equations import collectives as collectives
from fddp.jaxpr.equations import form_of as form_of
from fddp.jaxpr.equations import inner_equations as inner_equations
from fddp.jaxpr.equations import maker_positions as maker_positions
from fddp.jaxpr.equations import straighten as straighten
from fddp.jaxpr.equations import text_digest as text_digest
from fddp.jaxpr.equations import variables as variables
from fddp.jaxpr.fusible_loops import computed_by_layer, places
from fddp.jaxpr.gradient_rows import touched_rows
from fddp.jaxpr.interpreter import Read, Values, interpret, run_inner
from fddp.jaxpr.leaves import differentiable as differentiable
from fddp.jaxpr.leaves import is_used_up as is_used_up
from fddp.jaxpr.leaves import join_leaves as join_leaves
from fddp.jaxpr.leaves import refuse_deleted as refuse_deleted
from fddp.jaxpr.leaves import split_leaves as split_leaves
from fddp.jaxpr.leaves import with_trained as with_trained
from fddp.jaxpr.loop_fusion import fused_loops
from fddp.jaxpr.order import first_uses, grad_order, ready_order, wiring
from fddp.jaxpr.part_kinds import Follows, Kind, Same, Whole
from fddp.jaxpr.part_passes import LeafWork, result_kinds, whole_leaves
from fddp.jaxpr.part_program import Ranks, RunWhole, on_parts, spread
from fddp.jaxpr.used import statically_used
from fddp.jaxpr.used_at_run_time import tracked
