"""Optimizers: the update with averaged gradients, the layout of their state, the options of local
steps, and dynamic loss scaling.

This room imports losses and jaxpr.
"""

from fddp.optim.layout import optimizer_laid_out as optimizer_laid_out
from fddp.optim.local import IslandState as IslandState
from fddp.optim.local import LocalState as LocalState
from fddp.optim.local import LocalSteps as LocalSteps
from fddp.optim.local import Met as Met
from fddp.optim.local import Optimizer as Optimizer
from fddp.optim.local import local_steps as local_steps
from fddp.optim.loss_scale import DynamicScaleState as DynamicScaleState
from fddp.optim.loss_scale import dynamic_scale as dynamic_scale
from fddp.optim.loss_scale import gradients_finite as gradients_finite
from fddp.optim.loss_scale import scale_of as scale_of
from fddp.optim.loss_scale import scaled as scaled
from fddp.optim.parts import divided as divided
from fddp.optim.parts import kinds_of_state as kinds_of_state
from fddp.optim.periods import NODE as NODE
from fddp.optim.periods import check_fields as check_fields
from fddp.optim.periods import fields_of as fields_of
from fddp.optim.quorum import Arrival as Arrival
from fddp.optim.quorum import Quorum as Quorum
from fddp.optim.quorum import due_at as due_at
from fddp.optim.recorded import recorded as recorded
from fddp.optim.recorded import skipped as skipped
from fddp.optim.updates import check_needs as check_needs
from fddp.optim.updates import update as update
