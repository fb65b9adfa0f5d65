"""Losses that have collectives of their own."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from on_ranks.claims import claim, error_of
from problems import RATE, rows, square

import fddp


def centred(w: Any, x: Any) -> jax.Array:
    return square(w, x - jax.lax.pmean(jnp.mean(x), "replica"))


@claim(backends=("gloo",))
def a_loss_may_have_collectives_over_the_groups_axis(group: fddp.Group):
    step = fddp.train_step(centred, optax.sgd(RATE), group=group)
    _, info = step(step.init(jnp.zeros(())), rows(group.rank))
    assert float(info.loss) == np.arange(group.size).var()


@claim(backends=("gloo",))
def a_staged_loss_with_collectives_is_an_error(group: fddp.Group):
    step = fddp.train_step(centred, optax.sgd(RATE), group=group, schedule="staged")
    state = step.init(jnp.zeros(()))
    message = error_of(lambda: step(state, rows(group.rank)))
    assert "schedule='fused'" in message


@claim(backends=("mpi",))
def under_mpi_a_loss_with_collectives_is_an_error(group: fddp.Group):
    assert group.axis_name is None
    step = fddp.train_step(centred, optax.sgd(RATE), group=group)
    state = step.init(jnp.zeros(()))
    message = error_of(lambda: step(state, rows(group.rank)))
    assert "replica" in message
    assert "'mpi' has no mesh axis" in message
    assert "'gloo'" in message
