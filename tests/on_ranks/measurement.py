"""Ranks that measure and tune arrive at the same result."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from on_ranks.claims import claim, error_of

import fddp

PARAMS = {"a": np.full((8, 32), 0.1, np.float32), "b": np.full((32, 1), 0.1, np.float32)}


def two_layers(params: Any, batch: Any) -> jax.Array:
    return jnp.mean((jnp.tanh(batch @ params["a"]) @ params["b"]) ** 2)


@claim(quick=("gloo",))
def all_ranks_pick_the_same_cap_from_the_same_numbers(group: fddp.Group):
    batch = np.full((2, 8), 1 + group.rank, np.float32)
    step = fddp.train_step(two_layers, optax.sgd(0.1), group=group)
    state = step.init(PARAMS)
    tuning = fddp.tune(step, state, batch, steps=1, caps_mb=(0, 1))
    text = str(tuning).ljust(2000).encode()
    gathered = group.all_gather(np.frombuffer(text, np.uint8))
    assert np.all(gathered == gathered[0])
    tuning.step(state, batch)


@claim()
def a_cap_that_only_one_rank_wants_to_try_is_named_on_every_rank(group: fddp.Group):
    step = fddp.train_step(two_layers, optax.sgd(0.1), group=group)
    caps = (0, 1 + group.rank)
    message = error_of(
        lambda: fddp.tune(step, step.init(PARAMS), np.ones((4, 8), np.float32), caps_mb=caps)
    )
    assert "caps [0, 1]" in message and "caps [0, 2]" in message


@claim()
def a_measured_step_of_processes_keeps_the_state_and_sends_each_bucket_once(group: fddp.Group):
    batch = np.full((2, 8), 1 + group.rank, np.float32)
    step = fddp.train_step(two_layers, optax.sgd(0.1), group=group, bucket_cap_mb=0)
    state = step.init(PARAMS)
    measurement = fddp.measure(step, state, [batch] * 2)
    assert measurement.all_reduces == 2
    assert np.all(np.asarray(state.params["a"]) == PARAMS["a"])
    step(state, batch)


@claim()
def unequally_many_batches_to_measure_are_an_error_on_every_rank(group: fddp.Group):
    step = fddp.train_step(two_layers, optax.sgd(0.1), group=group)
    state = step.init(PARAMS)
    batches = [np.ones((2, 8), np.float32)] * (1 + group.rank)
    message = error_of(lambda: fddp.measure(step, state, batches))
    assert "rank 0: 1 batches" in message
    assert "rank 1: 2 batches" in message
