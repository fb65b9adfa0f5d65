"""Flax modules on several ranks."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from on_ranks.claims import claim, schedules
from problems import RATE, rows
from trees import close

import fddp


@claim()
def one_rank_alone_evaluates_the_module_of_a_state(group: fddp.Group):
    from flax import nnx

    net = fddp.from_nnx(
        nnx.Linear(1, 1, rngs=nnx.Rngs(0)), lambda model, x: jnp.mean((model(x) - 1) ** 2)
    )
    step = fddp.train_step(net.loss_fn, optax.sgd(RATE), group=group)
    state, _ = step(step.init(net.params), rows(group.rank)[None])
    want = 2 * np.array(state.params["kernel"]) + np.array(state.params["bias"])
    models = [net.module(state)] if group.rank == group.processes - 1 else []
    step(state, rows(group.rank)[None])
    for model in models:
        np.testing.assert_allclose(model(rows(2)[None]), want, rtol=1e-6)


@claim(quick=("gloo",))
def batchnorm_over_all_ranks_is_that_of_the_joined_rows(group: fddp.Group):
    import flax.linen as nn

    class Small(nn.Module):
        axis_name: str | None = None

        @nn.compact
        def __call__(self, x: Any) -> Any:
            x = nn.Dense(4, param_dtype=jnp.float64)(x)
            x = fddp.BatchNorm(False, axis_name=self.axis_name, param_dtype=jnp.float64)(x)
            return nn.Dense(1, param_dtype=jnp.float64)(jnp.tanh(x))

    def pieces(axis_name: str | None) -> Any:
        return fddp.from_linen(Small(axis_name), lambda model, x: jnp.mean((model(x) - 1) ** 2))

    with jax.enable_x64(True):
        step_rows = np.random.default_rng(4).normal(
            size=(3, group.size, 4, 3)
        )  # batches, ranks, rows, features
        params, first = pieces(None).init(jax.random.key(0), step_rows[0, 0])

        @jax.jit
        def by_hand(params: Any, model_state: Any, x: Any) -> Any:
            gradient = jax.value_and_grad(pieces(None).loss_fn, has_aux=True)
            (_, (model_state, _)), grads = gradient(params, x, model_state=model_state)
            return jax.tree.map(lambda p, g: p - RATE * g, params, grads), model_state

        for schedule in schedules(group):
            step = fddp.train_step(
                pieces(group.axis_name).loss_fn,
                optax.sgd(RATE),
                group=group,
                schedule=schedule,
                bucket_cap_mb=0,
            )
            state = step.init(params, model_state=first)
            expected = params, first
            for x in step_rows:
                state, _ = step(state, x[group.rank])
                expected = by_hand(*expected, x.reshape(-1, 3))
            close((state.params, state.model_state), expected)
