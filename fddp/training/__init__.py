"""The user's side: `train_step` and `value_and_grad`, which choose the strategy of a step.

This room imports step, sharding, and the rooms below step.
"""

from fddp.training.make import train_step
from fddp.training.train_step import TrainStep
from fddp.training.value_and_grad import value_and_grad
