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
