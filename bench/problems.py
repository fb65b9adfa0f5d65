"""What is trained when traffic is measured: three networks whose gradients take about as long to send as to compute."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from models import gpt, mlp, resnet

# 9.5 million parameters, 36 MiB of gradients.
GPT_36MIB = gpt.GPT(vocabulary=256, layers=6, width=384, heads=6, kv_heads=2, hidden=1024, context=128)
# As many in twice as many layers.
GPT_12 = gpt.GPT(vocabulary=256, layers=12, width=256, heads=4, kv_heads=2, hidden=704, context=128)


class Problem(NamedTuple):
    """A network, its loss and one rank's batch."""

    loss_fn: Any
    params: Any
    model_state: Any
    batch: Any


def problem(name: str, seed: int) -> Problem:
    """Makes a problem by name, with a rank's own rows.

    Args:
      name: "mlp", "mlp640" (with fewer rows), "resnet18", "resnet50", "gpt", "gpt12" (of 12 layers) or "words".
      seed: of the rows.

    Returns:
      The problem.
    """
    if name == "words":
        return words(seed)
    module, model, make = {
        "mlp": (mlp, mlp.PRESETS["1024"], lambda m: mlp.batch(m, 1024, seed)),
        "mlp640": (mlp, mlp.PRESETS["1024"], lambda m: mlp.batch(m, 640, seed)),
        "resnet18": (resnet, resnet.PRESETS["18"], lambda m: resnet.batch(m, 2, seed, size=64)),
        "resnet50": (resnet, resnet.PRESETS["50"], lambda m: resnet.batch(m, 4, seed, size=64)),
        "gpt": (gpt, GPT_36MIB, lambda m: gpt.batch(m, 5, seed, length=96)),
        "gpt12": (gpt, GPT_12, lambda m: gpt.batch(m, 5, seed, length=96)),
    }[name]
    batch = make(model)
    params, model_state = module.init(model, jax.random.key(0), batch)
    return Problem(module.loss_fn(model), params, model_state, batch)


def words(seed: int, *, vocabulary: int = 32768, width: int = 64, tokens: int = 512) -> Problem:
    """A table of words, of which a batch looks up few, and a network of 5 MiB behind it."""
    random, start = np.random.default_rng(seed), np.random.default_rng(0)
    sizes = {"table": (vocabulary, width), "in": (width, 1024), "hidden": (1024, 1024), "out": (1024, width)}
    params = {name: start.normal(size=size, scale=0.05).astype(np.float32) for name, size in sizes.items()}
    batch = {"ids": random.integers(vocabulary, size=tokens), "y": random.normal(size=(tokens, width))}

    def loss_fn(p: Any, batch: Any) -> Any:
        x = jnp.tanh(p["table"][batch["ids"]] @ p["in"])
        x = jnp.tanh(x @ p["hidden"]) @ p["out"]
        return jnp.mean((x - batch["y"]) ** 2), {}

    return Problem(
        loss_fn, params, None, jax.tree.map(lambda x: x.astype(np.float32 if x.ndim > 1 else np.int32), batch)
    )
