"""Random keys of a loss: new ones for every step and micro-batch, and for every replica unless they are shared.

Source: `seed + rank` in PyTorch's scripts; LayerDrop (Fan et al. 2020) for a draw that all replicas must share.
"""

from typing import Any, NamedTuple

import jax
from jaxtyping import Array, Int


class Shared(NamedTuple):
    """A random key from which all replicas draw alike: which layers a step drops, say.

    Example:
      >>> import fddp, jax, jax.numpy as jnp, optax
      >>> loss = lambda w, x, rng: jnp.mean(w * x) * jax.random.bernoulli(rng["layers"])
      >>> step = fddp.train_step(loss, optax.sgd(0.1))
      >>> state = step.init(jnp.ones(()), rng={"noise": jax.random.key(0), "layers": fddp.Shared(jax.random.key(1))})
      >>> state, info = step(state, jnp.ones(8))
    """

    key: Any
    """The key, from `jax.random.key`."""


def folded(rng: Any, step: Int[Array, ""], micro_batch: Int[Array, ""], replica: Int[Array, ""]) -> Any:
    """Makes the keys of one micro-batch of one replica.

    Args:
      rng: a tree of random keys, some of them `Shared`; None: none.
      step: synchronized steps so far.
      micro_batch: micro-batches since the last synchronization.
      replica: number of this replica.

    Returns:
      The tree, of plain keys.
    """

    def fold(key: Any) -> Any:
        numbers = (step, micro_batch) if isinstance(key, Shared) else (step, micro_batch, replica)
        key = key.key if isinstance(key, Shared) else key
        for number in numbers:
            key = jax.random.fold_in(key, number)
        return key

    return jax.tree.map(fold, rng, is_leaf=lambda x: isinstance(x, Shared))
