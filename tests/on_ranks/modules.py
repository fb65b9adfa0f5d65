"""Flax modules on several ranks."""

import jax.numpy as jnp
import numpy as np
import optax
from on_ranks.claims import claim
from problems import RATE, rows

import fddp


@claim()
def one_rank_alone_evaluates_the_module_of_a_state(group: fddp.Group):
    from flax import nnx

    net = fddp.from_nnx(nnx.Linear(1, 1, rngs=nnx.Rngs(0)), lambda model, x: jnp.mean((model(x) - 1) ** 2))
    step = fddp.train_step(net.loss_fn, optax.sgd(RATE), group=group)
    state, _ = step(step.init(net.params), rows(group.rank)[None])
    want = 2 * np.array(state.params["kernel"]) + np.array(state.params["bias"])
    models = [net.module(state)] if group.rank == group.processes - 1 else []
    step(state, rows(group.rank)[None])
    for model in models:
        np.testing.assert_allclose(model(rows(2)[None]), want, rtol=1e-6)
