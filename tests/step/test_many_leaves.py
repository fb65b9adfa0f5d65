"""A net of equal layers, whose buckets hold many leaves of one shape, trains as by plain JAX."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import first_replicas
from trees import close
from truth import by_plain_jax

import fddp

pytestmark = pytest.mark.steps
LAYERS = 24
BATCHES = np.random.default_rng(0).normal(size=(3, 8, 6)).astype(np.float32)
WAYS = [
    {"bucket_cap_mb": 2.0},
    {"schedule": "after"},
    {"shard": "optimizer"},
    {"shard": "state"},
]


def loss(params: Any, rows: Any) -> jax.Array:
    for weights, bias in params:
        rows = jnp.tanh(rows @ weights + bias)
    return jnp.mean((rows - 1) ** 2)


def layers() -> list[tuple[np.ndarray, np.ndarray]]:
    draw = np.random.default_rng(1)
    return [
        (draw.normal(size=(6, 6)).astype(np.float32) / 2, draw.normal(size=6).astype(np.float32))
        for _ in range(LAYERS)
    ]


@pytest.mark.parametrize("ways", WAYS, ids=lambda ways: ", ".join(map(str, ways.values())))
def test_a_net_of_equal_layers_trains_as_plain_jax_does(ways: dict[str, Any]):
    expected = by_plain_jax(loss, optax.adam(0.01), layers(), BATCHES)
    group = first_replicas(4)
    step = fddp.train_step(loss, optax.adam(0.01), group=group, **ways)
    state = step.init(layers())
    for rows in BATCHES:
        state, _ = step(state, rows)
    close(fddp.whole(state.params), expected.params, rtol=2e-4, atol=1e-5)
