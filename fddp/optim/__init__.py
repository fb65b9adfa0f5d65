"""Optimizers: the update with averaged gradients, the layout of their state, and dynamic loss
scaling.

This room imports losses and jaxpr.
"""

from fddp.optim.loss_scale import (
    DynamicScaleState,
    dynamic_scale,
    gradients_finite,
    scale_of,
    scaled,
)
from fddp.optim.parts import divided, kinds_of_state
from fddp.optim.recorded import recorded, skipped
from fddp.optim.state_leaves import nodes_of, optimizer_laid_out
from fddp.optim.updates import check_needs, update
