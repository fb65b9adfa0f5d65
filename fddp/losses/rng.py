"""Random keys of a loss: new for each step and micro-batch, and per replica unless shared.

Source: `seed + rank` in PyTorch's scripts; LayerDrop (Fan et al. 2020) for a draw that all replicas
must share.
"""

from functools import reduce
from typing import Any, NamedTuple

import jax
from jaxtyping import ArrayLike, Int, PyTree


class Shared(NamedTuple):
    """A random key that is equal on all replicas, for example to drop the same layers on each.

    Example:
      >>> import fddp, jax, jax.numpy as jnp, optax
      >>> loss = lambda w, x, rng: jnp.mean(w * x) * jax.random.bernoulli(rng["layers"])
      >>> step = fddp.train_step(loss, optax.sgd(0.1))
      >>> rng = {"noise": jax.random.key(0), "layers": fddp.Shared(jax.random.key(1))}
      >>> state = step.init(jnp.ones(()), rng=rng)
      >>> state, info = step(state, jnp.ones(8))
    """

    key: Any
    """The key, from `jax.random.key`."""


def folded(
    rng: PyTree,
    step: Int[ArrayLike, ""],
    micro_batch: Int[ArrayLike, ""],
    replica: Int[ArrayLike, ""],
) -> Any:
    """Returns the plain keys of one micro-batch of one replica, from a tree of keys or None."""

    def fold(key: Any) -> Any:
        if isinstance(key, Shared):
            return reduce(jax.random.fold_in, (step, micro_batch), key.key)
        return reduce(jax.random.fold_in, (step, micro_batch, replica), key)

    return jax.tree.map(fold, rng, is_leaf=lambda x: isinstance(x, Shared))
