"""A net of residual layers under `lax.scan`."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp


def layer(x: Any, w: Any) -> tuple[Any, None]:
    return x + jnp.tanh(x @ w["kernel"] + w["bias"]), None


def scanned(x: Any, layers: Any, **options: Any) -> Any:
    return jax.lax.scan(layer, x, layers, **options)[0]


def with_rng(x: Any, p: Any) -> Any:
    """Layers with dropout, with a key in the carry."""

    def round_of_layer(carried: Any, w: Any) -> tuple[Any, None]:
        x, key = carried
        key, layer_key = jax.random.split(key)
        return (layer(x, w)[0] * jax.random.bernoulli(layer_key, 0.5, x.shape[-1:]), key), None

    return jax.lax.scan(round_of_layer, (x, jax.random.key(3)), p["layers"])[0][0]


def net(inner: Callable[[Any, Any], Any]) -> Callable[[Any, Any], jax.Array]:
    """The loss of a net with these inner layers."""
    return lambda p, rows: jnp.mean((inner(rows @ p["in"], p) @ p["out"]) ** 2)


def overlapping(group: Any) -> Any:
    """The same replicas, with programs that count as overlapping, like those of GPUs."""
    return replace(group, placement=group.placement._replace(overlaps=True))
