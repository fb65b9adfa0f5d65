"""Flax modules on several ranks."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from on_ranks.claims import claim, error_of
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


@claim(backends=("mpi",))
def under_mpi_cross_replica_batch_norm_is_an_error(group: fddp.Group):
    from workers.trainings import batch, linen

    from models import resnet

    model = linen("resnet-bn", "sgd", axis_name="replica")
    rows = batch("resnet-bn", 0)
    params, model_state = jax.tree.map(
        lambda x: np.zeros(x.shape, x.dtype),
        jax.eval_shape(lambda key: resnet.init(model, key, rows), jax.random.key(0)),
    )
    step = fddp.train_step(resnet.loss_fn(model), optax.sgd(RATE), group=group)
    state = step.init(params, model_state=model_state)
    assert "'mpi' has no mesh axis" in error_of(lambda: step(state, rows))
