"""Two tiny workloads for the command line, in bare JAX: `mlp` and `transformer`."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

__all__ = ["mlp", "transformer"]


def mlp() -> tuple[Any, Any, Any]:
    """Returns the mean squared output of a net with one hidden layer, its parameters, and rows."""

    def loss_fn(params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
        hidden = jnp.tanh(x @ params["hidden"] + params["bias"])
        return jnp.mean((hidden @ params["out"]) ** 2)

    draw = np.random.default_rng(0)
    params = {
        "bias": np.zeros(128),
        "hidden": draw.normal(size=(64, 128)) / 8,
        "out": draw.normal(size=(128, 64)) / 11,
    }
    return loss_fn, jax.tree.map(np.float32, params), np.float32(draw.normal(size=(64, 64)))


def transformer() -> tuple[Any, Any, Any]:
    """Returns the loss of a language model with metrics, its parameters, and rows of tokens."""

    def loss_fn(params: dict[str, Any], tokens: jax.Array) -> tuple[jax.Array, dict[str, Any]]:
        x = params["tokens"][tokens[:, :-1]] + params["positions"]
        for layer in params["layers"]:
            # Causal attention with 4 heads of 16 numbers, then two dense layers.
            heads = (_normal(x) @ layer["mix"]).reshape(*x.shape[:2], 12, 16)
            mixed = jax.nn.dot_product_attention(*jnp.split(heads, 3, axis=2), is_causal=True)
            x = x + mixed.reshape(x.shape) @ layer["out"]
            x = x + jax.nn.gelu(_normal(x) @ layer["up"]) @ layer["down"]
        logits = jax.nn.log_softmax(_normal(x) @ params["tokens"].T)
        targets = tokens[:, 1:, None]
        loss = -jnp.mean(jnp.take_along_axis(logits, targets, axis=-1))
        return loss, {"accuracy": jnp.mean(logits.argmax(-1) == targets[..., 0])}

    draw = np.random.default_rng(0)

    def weights(*shape: int) -> Any:
        return np.float32(draw.normal(size=shape) / shape[0] ** 0.5)

    shapes = {"mix": (64, 192), "out": (64, 64), "up": (64, 256), "down": (256, 64)}
    layers = [{name: weights(*shape) for name, shape in shapes.items()} for _ in range(2)]
    params = {"tokens": weights(256, 64), "positions": weights(32, 64), "layers": layers}
    return loss_fn, params, draw.integers(256, size=(8, 33), dtype=np.int32)


def _normal(x: jax.Array) -> jax.Array:
    return jax.nn.standardize(x, axis=-1, epsilon=1e-5)
