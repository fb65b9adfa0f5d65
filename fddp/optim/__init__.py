"""Optimizers: the update with averaged gradients, the layout of their state, and dynamic loss
scaling.

This room imports losses and jaxpr.
"""

from fddp.optim.loss_scale import DynamicScaleState as DynamicScaleState
from fddp.optim.loss_scale import dynamic_scale as dynamic_scale
from fddp.optim.loss_scale import gradients_finite as gradients_finite
from fddp.optim.loss_scale import scaled as scaled
from fddp.optim.parts import divided as divided
from fddp.optim.parts import kinds_of_state as kinds_of_state
from fddp.optim.recorded import recorded as recorded
from fddp.optim.recorded import skipped as skipped
from fddp.optim.state_leaves import optimizer_laid_out as optimizer_laid_out
from fddp.optim.updates import check_needs as check_needs
from fddp.optim.updates import update as update
