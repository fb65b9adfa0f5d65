"""Views of a settled step that run nothing: its program, its tasks."""

import jax

from fddp.jax_internals import without_context_mesh
from fddp.schedules import StepInputs, TaskList
from fddp.step.run import one_replica_arguments
from fddp.step.settle import Settled
from fddp.step.state import TrainState


@without_context_mesh
def lower(settled: Settled, inputs: StepInputs) -> jax.stages.Lowered:
    """Lowers a step that is one program."""
    if settled.runner.lower is None:
        raise ValueError(
            "this step runs several programs; a step that can be lowered has schedule='fused' and "
            "no virtual_replicas."
        )
    return settled.runner.lower(inputs)


@without_context_mesh
def tasks(settled: Settled, state: TrainState, inputs: StepInputs) -> TaskList:
    """Lists the tasks of a step."""
    return settled.runner.tasks(*one_replica_arguments(settled, state, inputs.rows))
