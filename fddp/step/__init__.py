"""The core of a step: its options, its state, its first batch, and its calls.

A `Strategy` defines how replicas hold a state and compute a step; rooms above subclass it.
`schedules` makes a program of a step. This room imports losses, jaxpr, program, buckets, comm,
hooks, optim and runtime.
"""

from fddp.step.agreed import Agreed
from fddp.step.bucket_plan import provisional_plan
from fddp.step.call import accumulate_locally, compare, lower, ready, synchronize
from fddp.step.checks import check_arrays as check_arrays
from fddp.step.checks import check_filled as check_filled
from fddp.step.checks import check_no_sync as check_no_sync
from fddp.step.checks import check_rows as check_rows
from fddp.step.checks import check_step as check_step
from fddp.step.checks import params_checked as params_checked
from fddp.step.checks import refuse_transformations as refuse_transformations
from fddp.step.combinations import LOCAL, MEMORY, refuse
from fddp.step.initial_state import described_start, first_form, first_state, read_start
from fddp.step.inside import run_inside as run_inside
from fddp.step.options import OptionArguments as OptionArguments
from fddp.step.options import Options as Options
from fddp.step.options import Shared as Shared
from fddp.step.options import explained as explained
from fddp.step.options import name_of as name_of
from fddp.step.options import read_options as read_options
from fddp.step.options import with_some_new as with_some_new
from fddp.step.replica import Replica
from fddp.step.schedules import StateInFlight, finished
from fddp.step.settle import FinishStep, Settled
from fddp.step.state import Mean, StepInfo, Training, TrainState, check_no_state, check_state
from fddp.step.state_layout import first_hook_state, leaf_layouts, local_form, ranks_of_parts
from fddp.step.step_optimizer import Optimizer, StepOptimizer, read_optimizer
from fddp.step.strategy import WHOLE_STATE, Strategy, Trees, packing
