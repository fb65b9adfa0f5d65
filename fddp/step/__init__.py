"""The core of a step: its options, its state, its first batch, and its calls.

A `Strategy` defines how replicas hold a state and compute a step; rooms above subclass it.
`schedules` makes a program of a step. This room imports losses, jaxpr, program, buckets, comm,
hooks, optim and runtime.
"""

from fddp.step.agreed import Agreed as Agreed
from fddp.step.bucket_plan import provisional_plan as provisional_plan
from fddp.step.buffers import average as average
from fddp.step.call import compare as compare
from fddp.step.call import lower as lower
from fddp.step.call import ready as ready
from fddp.step.call import synchronize as synchronize
from fddp.step.checks import check_arrays as check_arrays
from fddp.step.checks import check_filled as check_filled
from fddp.step.checks import check_no_sync as check_no_sync
from fddp.step.checks import check_rows as check_rows
from fddp.step.checks import check_step as check_step
from fddp.step.checks import refuse_transformations as refuse_transformations
from fddp.step.combinations import LOCAL as LOCAL
from fddp.step.combinations import MEMORY as MEMORY
from fddp.step.combinations import refuse as refuse
from fddp.step.initial_state import described_start as described_start
from fddp.step.initial_state import first_form as first_form
from fddp.step.initial_state import first_state as first_state
from fddp.step.initial_state import read_start as read_start
from fddp.step.inside_program import run_inside as run_inside
from fddp.step.no_sync import accumulate_locally as accumulate_locally
from fddp.step.options import OptionArguments as OptionArguments
from fddp.step.options import Options as Options
from fddp.step.options import ScheduleName as ScheduleName
from fddp.step.options import Shared as Shared
from fddp.step.options import explained as explained
from fddp.step.options import name_of as name_of
from fddp.step.options import read_options as read_options
from fddp.step.options import with_some_new as with_some_new
from fddp.step.replica import Replica as Replica
from fddp.step.schedules import StateInFlight as StateInFlight
from fddp.step.schedules import finished as finished
from fddp.step.settle import FinishStep as FinishStep
from fddp.step.settle import Settled as Settled
from fddp.step.state import Mean as Mean
from fddp.step.state import StepInfo as StepInfo
from fddp.step.state import Training as Training
from fddp.step.state import TrainState as TrainState
from fddp.step.state import check_no_state as check_no_state
from fddp.step.state import check_state as check_state
from fddp.step.state_layout import first_hook_state as first_hook_state
from fddp.step.state_layout import leaf_layouts as leaf_layouts
from fddp.step.state_layout import local_form as local_form
from fddp.step.state_layout import ranks_of_parts as ranks_of_parts
from fddp.step.step_optimizer import Optimizer as Optimizer
from fddp.step.step_optimizer import StepOptimizer as StepOptimizer
from fddp.step.step_optimizer import read_optimizer as read_optimizer
from fddp.step.strategy import WHOLE_STATE as WHOLE_STATE
from fddp.step.strategy import Strategy as Strategy
from fddp.step.strategy import Trees as Trees
from fddp.step.strategy import packing as packing
