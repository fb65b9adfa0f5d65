"""Trainings for measuring traffic: their gradients take about as long to send as to compute."""

import time
from collections.abc import Callable
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import fddp
from models import gpt, mlp, resnet, scanned

# 9.5 million parameters, 36 MiB of gradients.
GPT_36MIB = gpt.GPT(
    vocabulary=256, layers=6, width=384, heads=6, kv_heads=2, hidden=1024, context=128
)
RESNET_18 = resnet.PRESETS["18"].clone(conv_general_dilated=fddp.conv_general_dilated)

# The network that waits.
LAYERS = 4
ELEMENTS = 65536  # of a layer's parameters: 0.25 MiB
FORWARD_S = 0.04
BACKWARD_S = 0.08


class Problem(NamedTuple):
    """A network, its loss and one rank's batch."""

    loss_fn: Any
    params: Any
    model_state: Any
    batch: Any


def problem(name: str, seed: int) -> Problem:
    """Makes a problem by name, with a rank's own rows; "waiting:N" has layers of N parameters."""
    if name == "words":
        return words(seed)
    if name.startswith("waiting:"):
        return waiting(seed, int(name.partition(":")[2]))
    module, model, make = {
        "mlp": (mlp, mlp.PRESETS["1024"], lambda m: mlp.batch(m, 1024, seed)),
        "mlp640": (mlp, mlp.PRESETS["1024"], lambda m: mlp.batch(m, 640, seed)),
        "resnet18": (resnet, RESNET_18, lambda m: resnet.batch(m, 2, seed, size=64)),
        "gpt": (gpt, GPT_36MIB, lambda m: gpt.batch(m, 5, seed, length=96)),
        "scanned": (gpt, scanned.scanned(GPT_36MIB), lambda m: gpt.batch(m, 5, seed, length=96)),
    }[name]
    batch = make(model)
    params, model_state = module.init(model, jax.random.key(0), batch)
    return Problem(module.loss_fn(model), params, model_state, batch)


def words(seed: int, *, vocabulary: int = 32768, width: int = 64, tokens: int = 512) -> Problem:
    """A table of words, of which a batch looks up few, and a network of 5 MiB behind it."""
    random = np.random.default_rng(seed)
    start = np.random.default_rng(0)
    sizes = {"table": (vocabulary, width), "in": (width, 1024)}
    sizes |= {"hidden": (1024, 1024), "out": (1024, width)}
    draw = lambda size: start.normal(size=size, scale=0.05).astype(np.float32)  # noqa: E731
    params = {name: draw(size) for name, size in sizes.items()}
    ids = random.integers(vocabulary, size=tokens).astype(np.int32)
    batch = {"ids": ids, "y": random.normal(size=(tokens, width)).astype(np.float32)}

    def loss_fn(p: Any, batch: Any) -> Any:
        x = jnp.tanh(p["table"][batch["ids"]] @ p["in"])
        x = jnp.tanh(x @ p["hidden"]) @ p["out"]
        return jnp.mean((x - batch["y"]) ** 2), {}

    return Problem(loss_fn, params, None, batch)


def waiting(
    seed: int,
    elements: int = ELEMENTS,
    *,
    forward_s: float = FORWARD_S,
    backward_s: float = BACKWARD_S,
) -> Problem:
    """A network whose computing is a wait: as long as a computation would take, and hardly any work
    for the core.

    Its layers add the mean of their parameters to each row, and wait in both passes.
    """
    layer = _layer(forward_s, backward_s)

    def loss_fn(params: Any, rows: jax.Array) -> tuple[jax.Array, dict[str, Any]]:
        for k in range(LAYERS):
            rows = layer(rows, params[f"layer {k}"])
        return jnp.mean((rows - 1.0) ** 2), {}

    params = {f"layer {k}": jnp.zeros(elements) for k in range(LAYERS)}
    return Problem(loss_fn, params, None, jax.random.normal(jax.random.key(seed), (4,)))


def _layer(forward_s: float, backward_s: float) -> Callable[[jax.Array, jax.Array], jax.Array]:
    def forward(rows: jax.Array, weights: jax.Array) -> tuple[jax.Array, tuple[int, ...]]:
        return _after(forward_s, rows + jnp.mean(weights)), weights.shape

    def backward(shape: tuple[int, ...], cotangent: jax.Array) -> tuple[jax.Array, jax.Array]:
        cotangent = _after(backward_s, cotangent)
        return cotangent, jnp.full(shape, jnp.sum(cotangent) / prod(shape))

    layer = jax.custom_vjp(lambda rows, weights: forward(rows, weights)[0])
    layer.defvjp(forward, backward)
    return layer


def _after(seconds: float, x: jax.Array) -> jax.Array:
    """The same values, after a delay."""

    def wait(x: Any) -> np.ndarray:
        time.sleep(seconds)
        return np.asarray(x)

    return jax.pure_callback(wait, jax.ShapeDtypeStruct(x.shape, x.dtype), x)
