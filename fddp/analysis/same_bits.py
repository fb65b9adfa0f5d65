"""Tests if a compiled program gives equal bits at each call.

The promise of virtual replicas rests on it, and XLA:CPU does not promise it with more than one
thread (jax#39741).

Source: `bitwise reproducibility` in Levanter; thinking machines' count of distinct completions.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

CALLS = 50
ONE_THREAD = (
    "XLA:CPU may add in a different order with more than one thread (jax#39741): "
    "NPROC=1 gives it one."
)


def distinct(f: Callable[..., Any], *args: Any) -> int:
    """Counts the bitwise different results of `CALLS` calls of a function of arrays."""
    return len({np.asarray(f(*args)).tobytes() for _ in range(CALLS)})


def small_gradient() -> int:
    """Counts the bitwise different gradients of a net with products for several threads."""
    draw = np.random.default_rng(0).normal
    rows, hidden, out = (
        draw(size=shape).astype(np.float32) / 8 for shape in ((256, 64), (64, 128), (128, 64))
    )
    loss = lambda w: jnp.mean((jnp.tanh(rows @ w) @ out) ** 2)  # noqa: E731
    return distinct(jax.jit(jax.grad(loss)), hidden)
