"""A net whose forward order is not the reverse of its ready order, and its training in plain
JAX."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from truth import by_plain_jax

TOKENS = np.random.default_rng(9).integers(0, 7, size=(12, 5), dtype=np.int32)
ADAM = optax.adam(0.05)


def tied_params(layers: int) -> Any:
    """The embedding is used first, and ready last, for it is used at the end too; and the skipped
    layer's gradient is ready early, though it is used early."""
    return {
        "embedding": np.random.default_rng(0).normal(size=(7, 4)),
        "skipped": np.random.default_rng(1).normal(size=(4, 4)),
        "layers": [np.random.default_rng(2 + k).normal(size=(4, 4)) for k in range(layers)],
        "unused": np.ones(3),
    }


def tied_net(params: Any, tokens: Any) -> jax.Array:
    x = params["embedding"][tokens]
    aside = x @ params["skipped"]
    for w in params["layers"]:
        x = jnp.tanh(x @ w)
    scores = (x + aside) @ params["embedding"].T
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(scores, tokens))


def plain(first: Any, steps: int) -> Any:
    """The parameters after so many steps of Adam, step k on the tokens rolled by k."""
    batches = [np.roll(TOKENS, k, axis=0) for k in range(steps)]
    return by_plain_jax(tied_net, ADAM, first, batches).params
