"""A state may hold one array at several places: each place is donated memory of its own."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tiers import crossed
from trees import same_bits

import fddp

pytestmark = pytest.mark.steps
X = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)
W = np.random.default_rng(1).normal(size=(4, 2)).astype(np.float32)
OPTIMIZER = optax.chain(optax.sgd(0.1, momentum=0.9), optax.ema(0.5))


def loss(p: Any, x: Any, *, model_state: Any) -> Any:
    target = jnp.tanh(x @ model_state["a"]) + x @ model_state["b"]
    return jnp.mean((jnp.tanh(x @ p["a"]) + x @ p["b"] - target) ** 2), (model_state, {})


def as_target(state: fddp.TrainState, copy: Callable[[Any], Any]) -> fddp.TrainState:
    return state._replace(model_state=jax.tree.map(copy, state.params))


def tied(state: fddp.TrainState, copy: Callable[[Any], Any]) -> fddp.TrainState:
    return state._replace(params={"a": state.params["a"], "b": copy(state.params["a"])})


def as_moments(state: fddp.TrainState, copy: Callable[[Any], Any]) -> fddp.TrainState:
    leaves, treedef = jax.tree.flatten(state.opt_state)
    params = iter([state.params["a"], state.params["b"]] * 2)
    moments = [copy(next(params)) if jnp.ndim(x) else x for x in leaves]
    return state._replace(opt_state=treedef.unflatten(moments))


@crossed(
    again={f.__name__: f for f in (as_target, tied, as_moments)},
    same={"object": lambda x: x, "memory": jax.device_put},
    replicas=[4, 1],
)
def test_an_array_put_at_a_second_place_trains_as_its_copy(
    group: Callable[[int], fddp.Group], replicas: int, same: Any, again: Any
):
    def trained(copy: Callable[[Any], Any]) -> fddp.TrainState:
        step = fddp.train_step(
            loss,
            OPTIMIZER,
            group=group(replicas),
            has_aux=True,
            bucket_cap_mb=1e-5,
        )
        state = step.init({"a": W, "b": -W}, model_state={"a": W + 1, "b": W})
        for _ in range(2):
            state, _ = step(state, X)
            state = again(state, copy)
        state, _ = step(state, X)
        return step(state, X)[0]

    same_bits(trained(same), trained(jnp.copy))


def alias(x: jax.Array) -> jax.Array:
    parts = [shard.data for shard in x.addressable_shards]
    return jax.make_array_from_single_device_arrays(x.shape, x.sharding, parts)


@pytest.mark.quick("4")
@pytest.mark.parametrize("replicas", [1, 4])
def test_memory_is_compared_though_the_last_step_still_runs(
    group: Callable[[int], fddp.Group], replicas: int
):
    def slow(p: Any, x: Any, *, model_state: Any) -> Any:
        start = jnp.eye(100) * p["a"][0, 0]
        values = jax.lax.fori_loop(0, 200, lambda _, y: jnp.tanh(y @ y), start)
        value, aux = loss(p, x, model_state=model_state)
        return value + values.mean(), aux

    def trained(copy: Callable[[Any], Any]) -> fddp.TrainState:
        step = fddp.train_step(slow, OPTIMIZER, group=group(replicas), has_aux=True)
        state = step.init({"a": W, "b": -W}, model_state={"a": W + 1, "b": W})
        for _ in range(2):
            state, _ = step(state, X)
            state = as_target(state, copy)
        return step(state, X)[0]

    same_bits(trained(alias), trained(jnp.copy))
