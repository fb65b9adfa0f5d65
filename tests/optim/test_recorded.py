"""A step reports the records of its optimizer: against plain JAX on the joined batch."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from every_schedule import SCHEDULES

import fddp

pytestmark = pytest.mark.steps

DRAW = np.random.default_rng(5)
PARAMS = {"first": DRAW.normal(size=(3, 4)), "second": DRAW.normal(size=4)}
ROWS = DRAW.normal(size=(8, 3))
RATE = optax.linear_schedule(0.1, 0.0, 10)


def loss(p: Any, x: Any) -> Any:
    return jnp.mean((jnp.tanh(x @ p["first"]) @ p["second"] - 1) ** 2)


def recording() -> Any:
    """Records the norm of its gradients, and its rate."""
    adam = optax.inject_hyperparams(optax.adamw)(learning_rate=RATE)
    return optax.chain(
        optax.snapshot("grad_norm", optax.tree.norm), optax.clip_by_global_norm(0.1), adam
    )


def norm(params: Any) -> float:
    grads = jax.grad(loss)(params, ROWS)
    return float(np.sqrt(sum(np.sum(np.square(x)) for x in grads.values())))


@pytest.mark.quick("state-overlap")
@SCHEDULES
@pytest.mark.parametrize(
    "shard", [None, pytest.param("optimizer", marks=pytest.mark.slow), "state"]
)
def test_a_step_tells_its_rate_and_norm_which_stay_when_training_goes_on(
    group, x64, schedule, shard
):
    options: Any = {"schedule": schedule, "shard": shard, "bucket_cap_mb": 0}
    step = fddp.train_step(loss, recording(), group=group(4), **options)
    state = step.init(PARAMS)
    infos = list[Any]()
    norms = []
    for _ in range(3):
        norms.append(norm(fddp.whole(state.params, group=group(4))))
        state, info = step(state, ROWS)
        infos.append(info)
    np.testing.assert_allclose([float(info.grad_norm) for info in infos], norms, rtol=1e-12)
    np.testing.assert_allclose(
        [float(info.learning_rate) for info in infos], [0.1, 0.09, 0.08], rtol=1e-6
    )


@pytest.mark.parametrize("schedule", ["overlap", "after"])
def test_a_rate_that_never_changes_stays_when_its_state_is_given_away(group, schedule):
    step = fddp.train_step(
        loss, optax.inject_hyperparams(optax.sgd)(0.25), group=group(1), schedule=schedule
    )
    state, first = step(step.init(PARAMS), ROWS)
    step(state, ROWS)
    assert float(first.learning_rate or 0) == 0.25


def test_a_step_that_is_skipped_tells_the_norm_that_it_was_skipped_for(group):
    step = fddp.train_step(loss, recording(), group=group(2), skip_nonfinite=True)
    state, _ = step(step.init(PARAMS), ROWS)
    recorded_norm = float(state.opt_state[0].measurement["grad_norm"])
    state, info = step(state, np.full_like(ROWS, np.nan))
    assert (
        np.isnan(np.asarray(info.grad_norm))
        and float(state.opt_state[0].measurement["grad_norm"]) == recorded_norm
    )


def test_what_is_not_written_down_or_twice_is_not_told(group):
    params = {"grad_norm": np.float32(1), "learning_rate": np.float32(2)}  # so is Adam's state
    twice = optax.multi_transform(
        {name: optax.inject_hyperparams(optax.sgd)(learning_rate=0.1) for name in params},
        {name: name for name in params},
    )
    for optimizer in (optax.adam(0.1), twice):
        step = fddp.train_step(
            lambda p, x: p["grad_norm"] * jnp.mean(p["learning_rate"] * x),
            optimizer,
            group=group(1),
        )
        _, info = step(step.init(params), np.ones(2))
        assert info.grad_norm is None and info.learning_rate is None
