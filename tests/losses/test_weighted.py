"""A loss that reports its weight is averaged over tokens, for any distribution of them: Σ w·g / Σ
w."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from every_schedule import SCHEDULES
from trees import close

import fddp

RNG = np.random.default_rng(0)
ROWS = {
    "x": RNG.standard_normal((8, 5, 3)),
    "y": RNG.standard_normal((8, 5)),
    # Of five tokens a row so many count: one row has none.
    "mask": np.arange(5) < np.array([5, 1, 2, 5, 0, 4, 3, 1])[:, None],
}
PARAMS = {"w": RNG.standard_normal(3), "b": np.zeros(())}


def errors(p: Any, batch: Any) -> Any:
    return (batch["x"] @ p["w"] + p["b"] - batch["y"]) ** 2


def weighted(p: Any, batch: Any) -> tuple[fddp.Weighted, dict[str, Any]]:
    """The mean over this part's tokens, with their number; finite for zero tokens."""
    tokens = jnp.sum(batch["mask"])
    mean = lambda x: jnp.sum(jnp.where(batch["mask"], x, 0)) / jnp.maximum(tokens, 1)  # noqa: E731
    return fddp.Weighted(mean(errors(p, batch)), tokens), {"target": mean(batch["y"])}


def joined(p: Any, batch: Any) -> Any:
    """The independent truth: the mean over all tokens at once."""
    return jnp.mean(errors(p, batch)[batch["mask"]])


@pytest.mark.steps
@SCHEDULES
@pytest.mark.parametrize(("n", "steps"), [(1, 8), (2, 2), (4, 1), (4, 2), (8, 1)])
def test_unequal_numbers_of_tokens_give_the_gradient_over_all_tokens(
    group, x64, schedule, n, steps
):
    f = fddp.value_and_grad(
        weighted, group=group(n), has_aux=True, accumulation_steps=steps, schedule=schedule
    )
    (loss, aux), grads = f(PARAMS, ROWS)
    expected, truth = jax.value_and_grad(joined)(PARAMS, ROWS)
    np.testing.assert_allclose(loss, expected, rtol=1e-12)
    close(grads, truth, rtol=1e-12, atol=0)
    np.testing.assert_allclose(aux["target"], np.mean(ROWS["y"][ROWS["mask"]]), rtol=1e-12)


def test_the_weight_is_a_constant_for_the_gradient(group):
    loss = lambda w, x: fddp.Weighted(jnp.mean(w * x), w**2)  # noqa: E731
    _, grad = fddp.value_and_grad(loss, group=group(2))(
        jnp.float32(2), np.array([1, 3], np.float32)
    )
    np.testing.assert_allclose(grad, 2.0)


def test_a_step_without_any_token_changes_nothing(group):
    loss = lambda w, x: fddp.Weighted(jnp.mean(w * x), 0)  # noqa: E731
    step = fddp.train_step(loss, optax.sgd(1.0), group=group(2))
    state, info = step(step.init(jnp.float32(2)), np.ones(2, np.float32))
    assert (float(state.params), float(info.loss)) == (2.0, 0.0)


def test_a_weight_per_row_is_refused(group):
    loss = lambda w, x: fddp.Weighted(jnp.mean(w * x), x)  # noqa: E731
    with pytest.raises(TypeError, match=r"weight of a loss must be one number.*float32\[1\]"):
        fddp.value_and_grad(loss, group=group(2))(jnp.float32(2), np.ones(2, np.float32))


@pytest.mark.parametrize("count", [int, float])
def test_a_flax_module_with_buffers_may_weigh_its_loss(group, count):
    """A `Weighted` is a pair, as is (loss, aux): neither may be taken for the other."""

    class Scaled(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            calls = self.variable("batch_stats", "calls", lambda: jnp.zeros(()))
            calls.value += 1
            return x * self.param("w", nn.initializers.ones, ())

    def of_tokens(model: Any, batch: Any) -> Any:
        y = model(batch["x"])
        return fddp.Weighted(
            jnp.sum(y * batch["mask"]) / jnp.sum(batch["mask"]),
            jnp.sum(batch["mask"]).astype(count),
        )

    linen = fddp.from_linen(Scaled(), of_tokens)
    batch = {"x": np.arange(1, 5, dtype=np.float32), "mask": np.array([1, 0, 1, 1], np.float32)}
    params, model_state = linen.init(jax.random.key(0), batch)
    step = fddp.train_step(linen.loss_fn, optax.sgd(1.0), group=group(2))
    state, info = step(step.init(params, model_state=model_state), batch)
    assert (float(info.loss), info.aux) == (pytest.approx(8 / 3), None)
    assert float(state.params["w"]) == pytest.approx(1 - 8 / 3)


def test_a_weighted_loss_without_the_promised_aux_is_refused(group):
    step = fddp.train_step(
        lambda w, x: fddp.Weighted(jnp.mean(w * x), 2.0), optax.sgd(1.0), has_aux=True
    )
    with pytest.raises(
        TypeError, match=r"must return \(loss, aux\), got Weighted\(float32\[\], float\)"
    ):
        step(step.init(jnp.ones(())), np.ones(8, np.float32))
