"""Losses and steps that many tests train, small enough for paper."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import fddp

RATE = 0.5


def rows(*values: float) -> np.ndarray:
    """A batch of so many rows of one number each."""
    return np.array(values, np.float32)


def square(w: Any, x: Any) -> jax.Array:
    """The mean of (w − x)², whose gradient is twice the distance of w from the mean of the x."""
    return jnp.mean((w - x) ** 2)


def towards_the_mean(group: fddp.Group, **options: Any) -> fddp.TrainStep:
    """A step that takes w to the mean of the x, wherever it was."""
    return fddp.train_step(square, optax.sgd(RATE), group=group, **options)


def product(w: Any, x: Any) -> jax.Array:
    """The mean of w·x, whose gradient is the mean of the x."""
    return jnp.mean(w * x)


def pull(group: fddp.Group, loss: Any = product, **options: Any) -> fddp.TrainStep:
    """A step that takes the mean of the x off w."""
    return fddp.train_step(loss, optax.sgd(1.0), group=group, **options)


def layer(params: Any, x: Any) -> jax.Array:
    """The mean of (tanh(x·w) − b)²."""
    return jnp.mean((jnp.tanh(x @ params["w"]) - params["b"]) ** 2)


def two_layers(params: Any, x: Any) -> jax.Array:
    """Towards 1, without a bias."""
    return jnp.mean((jnp.tanh(x @ params["w"]) @ params["head"] - 1) ** 2)


def first_column(params: Any, x: Any) -> jax.Array:
    """Two layers that are to give back the first number of a row."""
    return jnp.mean((jnp.tanh(x @ params["w"] + params["b"]) @ params["head"] - x[:, 0]) ** 2)


def with_dropout(params: Any, x: Any, *, model_state: Any, rng: Any) -> Any:
    """Dropout, buffers that enter the loss, and a metric."""
    mean = 0.9 * model_state + jnp.mean(x, axis=0)
    x = x * jax.random.bernoulli(rng, 0.7, x.shape) - mean
    return jnp.mean((jnp.tanh(x @ params["w"]) + params["b"]) ** 2), (mean, jnp.mean(x))


def of_fast_params(lookahead: optax.GradientTransformation) -> optax.GradientTransformation:
    """Lookahead, which expects gradients of the fast parameters alone, for those of all
    parameters."""

    def fast(grads: Any, _: Any) -> Any:
        return grads.fast

    return optax.chain(optax.stateless(fast), lookahead)
