"""`fddp.check` recognizes, before a training, losses that are not a mean over their rows."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fddp

ROWS = 16
DRAW = np.random.default_rng(0)
BATCH = {
    "x": DRAW.normal(size=(ROWS, 4)).astype(np.float32),
    "adv": DRAW.normal(size=ROWS).astype(np.float32),
}
W = np.full(4, 0.5, np.float32)


def masked(b: Any) -> Any:
    return b["adv"] > 0


def normalized(w: Any, b: Any) -> Any:
    adv = (b["adv"] - b["adv"].mean()) / (b["adv"].std() + 1e-8)
    return -jnp.mean(adv * jnp.tanh(b["x"] @ w))


def contrast(w: Any, b: Any) -> Any:
    z = jnp.tanh(b["x"] * w)
    return -jnp.mean(jnp.diag(jax.nn.log_softmax(z @ z.T)))


def contrast_with_all(w: Any, b: Any) -> Any:
    z = jnp.tanh(b["x"] * w)
    all_rows = jax.lax.all_gather(z, "replica", tiled=True)
    labels = jax.lax.axis_index("replica") * len(z) + jnp.arange(len(z))
    return -jnp.mean(jax.nn.log_softmax(z @ all_rows.T)[jnp.arange(len(z)), labels])


def normalized_over_all(w: Any, b: Any) -> Any:
    mean = jax.lax.pmean(b["adv"].mean(), "replica")
    std = jnp.sqrt(jax.lax.pmean(jnp.mean((b["adv"] - mean) ** 2), "replica"))
    return -jnp.mean((b["adv"] - mean) / (std + 1e-8) * jnp.tanh(b["x"] @ w))


LOSSES: dict[str, tuple[Callable[..., Any], bool]] = {
    "mean": (lambda w, b: jnp.mean((b["x"] @ w) ** 2), True),
    "weighted by its mask": (
        lambda w, b: fddp.Weighted(
            jnp.sum((b["x"] @ w) ** 2 * masked(b)) / masked(b).sum(), masked(b).sum()
        ),
        True,
    ),
    "normalized over all": (normalized_over_all, True),
    "contrast with all": (contrast_with_all, True),
    "sum": (lambda w, b: jnp.sum((b["x"] @ w) ** 2), False),
    "masked mean": (lambda w, b: jnp.sum((b["x"] @ w) ** 2 * masked(b)) / masked(b).sum(), False),
    "normalized": (normalized, False),
    "contrast": (contrast, False),
}


@pytest.mark.steps
@pytest.mark.parametrize("name", LOSSES)
def test_what_replicas_compute_is_what_the_check_foretells(
    group: Callable[[int], fddp.Group], name: str
):
    """The truth: the gradient of a step on one replica and on four."""
    loss_fn, equal = LOSSES[name]
    grads = [fddp.value_and_grad(loss_fn, group=group(n))(W, BATCH)[1] for n in (1, 4)]
    assert np.allclose(grads[0], grads[1], atol=1e-5) == equal
    verdict = fddp.check(loss_fn, W, BATCH)
    assert verdict.equal == equal == bool(verdict)


def test_a_sum_is_named_and_other_causes_are_listed():
    verdict = fddp.check(LOSSES["sum"][0], W, BATCH)
    assert (
        verdict.factor == pytest.approx(2)
        and "take the mean" in str(verdict)
        and "BatchNorm" not in str(verdict)
    )
    verdict = fddp.check(LOSSES["masked mean"][0], W, BATCH)
    assert verdict.factor is None and all(
        word in str(verdict) for word in ("Weighted", "BatchNorm", "all_gather", "pmean")
    )


def focal(w: Any, b: Any, least: float) -> fddp.Weighted:
    """A sum over all rows, divided by the number of positive ones."""
    number = jnp.maximum(jnp.sum(masked(b)), least)
    return fddp.Weighted(jnp.sum((b["x"] @ w) ** 2) / jnp.maximum(number, 1 - (least > 0)), number)


@pytest.mark.parametrize("penalty", [0.0, 1.0])
def test_rows_without_weight_and_with_a_loss_are_named(penalty: float):
    assert fddp.check(lambda w, b: focal(w, b, 1e-6), W, BATCH)
    for adv in (BATCH["adv"], np.sort(BATCH["adv"])):  # a half without positive rows, too
        checked = fddp.check(lambda w, b: focal(w, b, 0), W, BATCH | {"adv": adv})
        assert not checked and "Rows of weight 0 in fddp.Weighted do not count" in str(checked)

    def penalized(w: Any, b: Any) -> fddp.Weighted:  # the penalty is in every replica's loss
        known = jnp.sum((b["x"] @ w) ** 2 * masked(b)) / jnp.maximum(masked(b).sum(), 1)
        return fddp.Weighted(known + penalty * jnp.sum(w**2), masked(b).sum())

    assert fddp.check(penalized, W, BATCH)


def test_the_leaves_that_differ_are_named_the_largest_first():
    def loss_fn(p: Any, b: Any) -> Any:
        return jnp.mean((b["x"] @ p["right"]) ** 2) + jnp.sum(p["wrong"] * b["adv"][:, None] ** 2)

    verdict = fddp.check(loss_fn, {"right": W, "wrong": np.ones(1, np.float32)}, BATCH)
    assert [name for name, _ in verdict.leaves] == ["wrong"]
    assert verdict.leaves[0][1] == pytest.approx(0.5)


@pytest.mark.parametrize("make", [jax.random.key, jax.random.PRNGKey])
@pytest.mark.parametrize("kind", [lambda key: key, fddp.Shared], ids=["alone", "shared"])
def test_random_numbers_are_no_reason_and_hide_no_sum(kind: Any, make: Callable[[int], Any]):
    def loss_fn(w: Any, b: Any, rng: Any) -> Any:
        return jnp.mean((b["x"] @ w) ** 2 * jax.random.bernoulli(rng, 0.5, (len(b["x"]),)))

    verdict = fddp.check(loss_fn, W, BATCH, rng=kind(make(0)))
    assert (
        verdict.equal and verdict.random and "as far as its random numbers let see" in str(verdict)
    )
    shared = fddp.check(
        lambda w, b, rng: loss_fn(w, b, jax.random.key(1)) * ROWS**2,
        W,
        BATCH,
        rng=kind(make(0)),
    )
    assert not shared.random


def test_batch_norm_of_each_replica_is_found_in_a_loss_with_a_model_state():
    def loss_fn(w: Any, b: Any, *, model_state: Any) -> Any:
        z = b["x"] @ w
        z = (z - z.mean()) / (z.std() + 1e-5)
        return jnp.mean((z - b["adv"]) ** 2), (model_state * 0.9 + 0.1 * z.mean(), {"z": z.mean()})

    verdict = fddp.check(loss_fn, W, BATCH, has_aux=True, model_state=jnp.zeros(()))
    assert not verdict.equal


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({"x": np.ones((1, 4)), "adv": np.ones(1)}, "two rows at least, got 1"),
        ({"x": np.ones((4, 4)), "adv": np.ones(())}, "equally many rows.*cannot be divided"),
        ({}, "the batch is empty"),
    ],
)
def test_what_cannot_be_halved_is_refused(batch: Any, message: str):
    with pytest.raises(ValueError, match=message):
        fddp.check(LOSSES["mean"][0], W, batch)
