"""Clipping sees the mean gradient once a step, as on one replica with the joined batch.

DDP's users clip between backward and step; in fddp clipping is a part of the optimizer. Plain JAX
and optax on the joined batch are the truth.
"""

from functools import cache, partial
from typing import Any

import jax
import numpy as np
import optax
import pytest
import trees
from every_schedule import SCHEDULES
from problems import first_column
from truth import by_plain_jax

import fddp

close = partial(trees.close, rtol=1e-12, atol=1e-13)

REPLICAS = 4
STEPS = 4
RNG = np.random.default_rng(3)
PARAMS = {"w": RNG.normal(size=(3, 5)), "b": RNG.normal(size=5), "head": RNG.normal(size=5)}
# Steps and replicas have gradients of very different norms.
ROWS = (
    RNG.normal(size=(STEPS, 16, 3))
    * np.array([1, 4, 0.5, 2])[:, None, None]
    * np.linspace(0.2, 2, 16)[:, None]
)
CAP = 0.05
ADAM = optax.adam(1e-2)
RULES = {
    "by global norm": optax.clip_by_global_norm(CAP),
    "by value": optax.clip(CAP),
    "by block": optax.clip_by_block_rms(CAP),
    "by parameter": optax.adaptive_grad_clip(CAP),
}


def norm(tree: Any) -> float:
    return float(np.sqrt(sum(np.sum(np.square(x)) for x in jax.tree.leaves(tree))))


def by_one_replica(optimizer: optax.GradientTransformation) -> list[Any]:
    """Parameters after each step of one replica on the joined batches."""
    return by_plain_jax(first_column, optimizer, PARAMS, ROWS).history


@cache
def clipped(rule: str) -> list[Any]:
    return by_one_replica(optax.chain(RULES[rule], ADAM))


@pytest.mark.steps
@SCHEDULES
@pytest.mark.parametrize("rule", RULES)
def test_replicas_clip_what_one_on_the_joined_batch_clips(group, x64, schedule, rule):
    optimizer = optax.chain(RULES[rule], ADAM)
    step = fddp.train_step(
        first_column, optimizer, group=group(REPLICAS), schedule=schedule, bucket_cap_mb=0
    )
    state = step.init(PARAMS)
    for x, expected in zip(ROWS, clipped(rule)):
        state, _ = step(state, x)
        close(state.params, expected)


@SCHEDULES
def test_a_clipped_step_is_as_long_as_the_cap(group, x64, schedule):
    optimizer = optax.chain(optax.clip_by_global_norm(CAP), optax.sgd(1.0))
    step = fddp.train_step(
        first_column, optimizer, group=group(REPLICAS), schedule=schedule, bucket_cap_mb=0
    )
    state, _ = step(step.init(PARAMS), ROWS[0])
    moved = jax.tree.map(lambda a, b: np.asarray(a) - b, state.params, PARAMS)
    np.testing.assert_allclose(norm(moved), CAP, rtol=1e-12)


### Sensitivity of the tests above


@pytest.mark.parametrize("rule", RULES)
def test_clipping_acts_in_the_reference(x64, rule):
    free = by_one_replica(ADAM)[-1]
    difference = jax.tree.map(lambda a, b: np.max(np.abs(a - b)), clipped(rule)[-1], free)
    assert max(jax.tree.leaves(difference)) > 1e-4


def test_clipping_each_replicas_gradients_would_be_something_else(x64):
    gradient = jax.jit(jax.grad(first_column))
    local_grads = [gradient(PARAMS, part) for part in np.split(ROWS[0], REPLICAS)]
    clip = RULES["by global norm"]
    first = jax.tree.map(
        lambda *g: sum(g) / REPLICAS, *[clip.update(g, clip.init(PARAMS))[0] for g in local_grads]
    )
    assert min(map(norm, local_grads)) > CAP > 1.01 * norm(first)
