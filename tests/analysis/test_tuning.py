"""The best bucket cap, measured on small networks."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from trees import close

import fddp

pytestmark = pytest.mark.steps


def two_layers(params, batch):
    return jnp.mean((jnp.tanh(batch @ params["a"]) @ params["b"]) ** 2)


PARAMS = {"a": np.ones((4, 8), np.float32), "b": np.ones((8, 1), np.float32)}
ROWS = np.ones((8, 4), np.float32)


Make = Callable[..., tuple[fddp.TrainStep, fddp.TrainState]]


@pytest.fixture
def step_and_state(group) -> Make:
    """Makes a step with some options, and its first state."""

    def make(replicas: int = 2, **options: Any) -> tuple[fddp.TrainStep, fddp.TrainState]:
        step = fddp.train_step(two_layers, optax.sgd(0.1), group=group(replicas), **options)
        return step, step.init(PARAMS)

    return make


def test_each_different_plan_is_measured_once_and_the_shortest_step_is_the_best(
    step_and_state: Make,
):
    step, state = step_and_state()
    tuning = fddp.tune(step, state, ROWS, caps_mb=[0, 0.25, 25], steps=1)
    # 160 bytes are one bucket under any cap but 0: of all these caps the smallest is named.
    assert [(x.bucket_cap_mb, x.buckets) for x in tuning.candidates] == [(0, 2), (0.25, 1)]
    assert 0 < tuning.best.seconds == min(candidate.seconds for candidate in tuning.candidates)
    assert str(tuning).count("best\n") == 1
    assert str(tuning).endswith(f"bucket_cap_mb={tuning.bucket_cap_mb}")


@pytest.mark.parametrize("options", [{"shard": "state"}, {"virtual_replicas": 4}], ids=str)
def test_the_tuned_step_has_the_best_cap_and_goes_on_from_the_state(step_and_state: Make, options):
    step, state = step_and_state(donate=False, **options)
    state, _ = step(state, ROWS)
    tuning = fddp.tune(step, state, ROWS, caps_mb=[(0,)], steps=1)
    assert tuning.step.options.bucket_cap_mb == tuning.bucket_cap_mb == (0,)
    results = [fddp.whole(trainer(state, ROWS)[0].params) for trainer in (step, tuning.step)]
    close(*results, rtol=1e-6, atol=1e-7)


def test_a_search_over_nothing_is_refused(step_and_state: Make):
    with pytest.raises(ValueError, match="caps_mb must hold at least one cap"):
        fddp.tune(*step_and_state(), ROWS, caps_mb=[])
    number: Any = 3
    with pytest.raises(ValueError, match=r"caps_mb must hold at least one cap .*got 3"):
        fddp.tune(*step_and_state(), ROWS, caps_mb=number)
    with pytest.raises(ValueError, match="steps must be a whole number of 1 or more, got 0"):
        fddp.tune(*step_and_state(), ROWS, steps=0)
    with pytest.raises(ValueError, match="bucket_cap_mb must be 0 or more"):
        fddp.tune(*step_and_state(), ROWS, caps_mb=[4, -1])
