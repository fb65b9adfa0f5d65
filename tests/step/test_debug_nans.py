"""A step that makes a NaN raises with `jax_debug_nans`, and training goes on from the state before
it."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh
from tiers import crossed
from truth import by_plain_jax

import fddp

pytestmark = pytest.mark.steps

PARAMS = {"w": np.ones(4, np.float32), "b": np.ones(4, np.float32)}
ROWS = np.ones((8, 4), np.float32)
BAD = np.concatenate([ROWS[:7], -9 * ROWS[:1]])  # the last row, of the last replica alone
WAYS: list[dict[str, Any]] = [
    *({"schedule": schedule} for schedule in ("overlap", "after")),
    {"shard": "state"},
    {"accumulation_steps": 2},
]


def loss(params: Any, x: Any) -> Any:
    # A NaN of a branch that is not taken is not an error.
    unused = jnp.where(x > 0, jnp.log(jnp.abs(x) * 0 + jnp.sqrt(jnp.where(x > 0, x, 1))), 0)
    return jnp.mean(jnp.log(x @ params["w"] + 1)) + jnp.mean((params["b"] - unused) ** 2)


def make(group: fddp.Group, **options: Any) -> Any:
    return fddp.train_step(loss, optax.adam(0.01), group=group, bucket_cap_mb=0, **options)


@pytest.fixture
def group() -> fddp.Group:
    return fddp.mesh_group(Mesh(np.array(jax.devices()[:4]), "replica"))


@crossed(options=WAYS)
def test_a_step_with_a_nan_raises_and_training_goes_on(group: fddp.Group, options: dict[str, Any]):
    step = make(group, **options)
    state, _ = step(step.init(PARAMS), ROWS)
    with jax.debug_nans(True):
        for rows in (BAD, ROWS, BAD):
            if rows is BAD:
                with pytest.raises(
                    FloatingPointError, match=r"NaN in .*The input state of the step is unchanged"
                ):
                    step(state, rows)
            else:
                state, _ = step(state, rows)
    expected = by_plain_jax(loss, optax.adam(0.01), PARAMS, [ROWS] * 2).params
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), fddp.whole(state.params), expected
    )


CALLS: dict[str, Callable[[fddp.Group], Any]] = {
    "no_sync": lambda group: (step := make(group)).no_sync(step.init(PARAMS), BAD),
    "value_and_grad": lambda group: fddp.value_and_grad(loss, group=group)(PARAMS, BAD),
}


@pytest.mark.parametrize("call", CALLS)
def test_gradients_with_a_nan_raise(group: fddp.Group, call: str):
    with jax.debug_nans(True), pytest.raises(FloatingPointError, match="NaN in "):
        CALLS[call](group)


def test_no_sync_exchanges_nothing(group: fddp.Group, monkeypatch: pytest.MonkeyPatch):
    step = make(group)
    state, _ = step.no_sync(step.init(PARAMS), ROWS)
    monkeypatch.setattr(fddp.Group, "all_reduce", lambda *_, **__: pytest.fail("it exchanges"))
    with jax.debug_nans(True):
        step.no_sync(state, ROWS)


def test_a_gradient_of_a_single_array_is_named(group: fddp.Group):
    step = fddp.value_and_grad(lambda w, x: jnp.sum(jnp.sqrt(w)) * jnp.mean(x), group=group)
    with (
        jax.debug_infs(True),
        pytest.raises(FloatingPointError, match="inf in the gradient after"),
    ):
        step(np.zeros(2, np.float32), ROWS)


def test_an_infinite_loss_raises_where_only_infs_are_asked_for(group: fddp.Group):
    step = fddp.train_step(
        lambda w, x: jnp.mean(w * 1e38) * jnp.mean(x), optax.sgd(0.0), group=group
    )
    with jax.debug_infs(True), pytest.raises(FloatingPointError, match="inf in loss"):
        step(step.init(np.ones(4, np.float32)), 100 * ROWS)
