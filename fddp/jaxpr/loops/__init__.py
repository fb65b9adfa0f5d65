"""Splits and fuses the loops of a program, and runs them with other layers.

`lax.scan` over stacked layers is a single equation, but its outputs become ready, and its inputs
are read, layer by layer. This room imports `equations`, `flow` and `interpreter` of `fddp.jaxpr`.
"""

from fddp.jaxpr.loops.in_rounds import in_rounds as in_rounds
from fddp.jaxpr.loops.loop_fusion import fused_loops as fused_loops
from fddp.jaxpr.loops.readings import in_readings as in_readings
from fddp.jaxpr.loops.readings import run_in_readings as run_in_readings
from fddp.jaxpr.loops.rounds import Stack as Stack
from fddp.jaxpr.loops.rounds import in_slices as in_slices
from fddp.jaxpr.loops.rounds import stacks as stacks
from fddp.jaxpr.loops.row_origins import made_row_by_row as made_row_by_row
from fddp.jaxpr.loops.row_origins import places as places
from fddp.jaxpr.loops.scan import run_scan as run_scan
from fddp.jaxpr.loops.weight_rows import LayerWeights as LayerWeights
from fddp.jaxpr.loops.weight_rows import read_by_rows as read_by_rows
