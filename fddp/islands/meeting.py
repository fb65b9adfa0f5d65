"""Synchronizes asynchronous islands."""

from fddp.jax_internals import without_context_mesh
from fddp.step import TrainState, check_state, check_step
from fddp.training import TrainStep


def meet(step: TrainStep, state: TrainState) -> TrainState:
    """Synchronizes asynchronous islands (`fddp.local_steps(quorum=)`). Collective.

    It merges the progress of all islands and gives them equal parameters and an equal state of the
    outer optimizer. Call it before a collective action such as `evaluate` or a checkpoint, and at
    the end of the training. The states of other steps are returned unchanged.

    Args:
      step: the step.
      state: from the last step.

    Returns:
      The synchronized state.

    Raises:
      ValueError: the step has not been run.
      RuntimeError: the server of the shared parameters has stopped.

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
