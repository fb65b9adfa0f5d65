"""Ranks that measure and tune arrive at the same result."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from on_ranks.claims import claim, error_of, schedules

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
    assert tuning.replicas == group.size
    assert tuning.link is not None and tuning.link.seconds(2**20) > 0
    assert tuning.at_scale([4])[0].step_s > 0
    tuning.step(state, batch)


@claim(quick=())
def all_ranks_choose_the_same_for_gpus_that_are_not_here(group: fddp.Group):
    step = fddp.train_step(two_layers, optax.sgd(0.1), group=group, bucket_cap_mb=0)
    state = step.init(PARAMS)
    choice = fddp.tune(step, state, np.ones((4, 8), np.float32), target="h100:2", caps_mb=[25])
    text = str(choice).ljust(2000).encode()
    gathered = group.all_gather(np.frombuffer(text, np.uint8))
    assert np.all(gathered == gathered[0])
    # Each candidate was compiled by one rank, and all have its estimate.
    assert len(choice.candidates) == 6 and all(
        candidate.seconds > 0 for candidate in choice.candidates
    )
    choice.step(state, np.ones((2, 8), np.float32))


@claim()
def targets_that_no_rank_knows_are_named_on_every_rank(group: fddp.Group):
    step = fddp.train_step(two_layers, optax.sgd(0.1), group=group)
    state = step.init(PARAMS)
    batch = np.ones((4, 8), np.float32)
    target = "b300:2" if group.rank else "h100:x"
    message = error_of(lambda: fddp.tune(step, state, batch, target=target))
    assert "got 'h100:x'" in message and "got 'b300:2'" in message


@claim()
def a_measured_step_of_processes_keeps_the_state_and_sends_each_bucket_once(group: fddp.Group):
    batch = np.full((2, 8), 1 + group.rank, np.float32)
    for schedule in schedules(group, ("staged", "fused")):
        step = fddp.train_step(
            two_layers, optax.sgd(0.1), group=group, schedule=schedule, bucket_cap_mb=0
        )
        state = step.init(PARAMS)
        measurement = step.measure(state, [batch] * 2)
        assert measurement.all_reduces == 2, schedule
        assert np.all(np.asarray(state.params["a"]) == PARAMS["a"])
        step(state, batch)


@claim()
def unequally_many_batches_to_measure_are_an_error_on_every_rank(group: fddp.Group):
    step = fddp.train_step(two_layers, optax.sgd(0.1), group=group)
    state = step.init(PARAMS)
    batches = [np.ones((2, 8), np.float32)] * (1 + group.rank)
    message = error_of(lambda: step.measure(state, batches))
    assert "rank 0: 1 batches" in message
    assert "rank 1: 2 batches" in message
