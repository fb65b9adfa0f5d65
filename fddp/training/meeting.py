"""A meeting of islands that do not wait for each other."""

from fddp.jax_internals import without_context_mesh
from fddp.step import TrainState, check_state, check_step
from fddp.training.train_step import TrainStep


def meet(step: TrainStep, state: TrainState) -> TrainState:
    """Lets islands meet that do not wait for each other (`fddp.local_steps(quorum=)`); every rank calls it.

    What each has learned is merged, and all go on with the same parameters and the outer optimizer's state. Call
    it before ranks do anything together, as to evaluate or to save, and when the training is over. The states of other
    steps are returned as they are.

    Args:
      step: the step.
      state: from the last step.

    Returns:
      The state to go on with.

    Raises:
      ValueError: the step has not been run.
      RuntimeError: the keeper of the shared parameters is gone.

    Example:
      >>> import fddp, jax.numpy as jnp, optax
      >>> step = fddp.train_step(lambda w, x: jnp.mean((x - w) ** 2), optax.sgd(0.5))
      >>> state, info = step(step.init(jnp.zeros(())), jnp.ones(8))
      >>> float(fddp.meet(step, state).params)
      1.0
    """
    check_step("fddp.meet", step)
    check_state(state)
    return without_context_mesh(step.settled.runner.meet)(state)
