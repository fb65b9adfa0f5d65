"""The user's side: `train_step` and `value_and_grad`, their options and their state.

The first batch settles a step: the order of readiness, the plan, the programs. This room imports all others but data
and analysis.
"""

from fddp.step.evaluate import evaluate as evaluate
from fddp.step.gradients import value_and_grad as value_and_grad
from fddp.step.options import Options as Options
from fddp.step.state import StepInfo as StepInfo
from fddp.step.state import TrainState as TrainState
from fddp.step.train import TrainStep as TrainStep
from fddp.step.train import train_step as train_step
from fddp.step.whole import whole as whole
