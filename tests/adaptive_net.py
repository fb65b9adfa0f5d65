"""A step of two buckets whose hook is adaptive."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import optax

import fddp
from fddp import hooks

DRAW = np.random.default_rng(9)
PARAMS = {name: np.zeros(512, np.float32) for name in "ab"}
ROWS = DRAW.normal(size=(4, 2, 512)).astype(np.float32)


def loss_fn(p: Any, x: Any) -> Any:
    return jnp.mean(x @ p["a"]) - 2 * jnp.mean(x @ p["b"])


def adaptive_step(group: fddp.Group, *bits: int, **options: Any) -> fddp.TrainStep:
    hook = hooks.adaptive(bits)
    return fddp.train_step(
        loss_fn, optax.sgd(1.0), group=group, bucket_cap_mb=0, hook=hook, **options
    )
