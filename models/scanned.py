"""The language model of `models/gpt.py` with its layers under `nn.scan`: one layer is compiled, for
all of them.

The parameters of the layers are stacked along a first dim. Their gradients come from a loop, and
fddp sends each layer inside the loop.
"""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from models import gpt
from models.gpt import GPT, Layer, batch, ends, head, init, layer, loss_fn

__all__ = ["PRESETS", "ScannedGPT", "batch", "init", "loss_fn", "scanned", "stacked"]


class ScannedGPT(GPT):
    """The same model; it leaves no layers out."""

    @nn.compact
    def __call__(self, tokens: Int[Array, "B T"]) -> Float[Array, "B T V"]:
        drop = nn.Dropout(self.dropout, deterministic=not self.has_rng("dropout"))
        embed, norm = ends(self)
        through = nn.scan(
            _round,
            variable_axes={"params": 0},
            split_rngs={"params": True, "dropout": True},
            length=self.layers,
        )
        x, _ = through(layer(self, "layers"), drop(embed(tokens)), None)
        return head(embed, norm, x)


def scanned(model: GPT) -> ScannedGPT:
    """The same model with its layers under `nn.scan`."""
    fields = {
        name: getattr(model, name)
        for name in model.__dataclass_fields__
        if name not in ("parent", "name")
    }
    return ScannedGPT(**fields)


PRESETS = {name: scanned(model) for name, model in gpt.PRESETS.items()}


def stacked(params: dict[str, Any]) -> dict[str, Any]:
    """Stacks the parameters of layers that are written out."""
    layers = [name for name in params if name.startswith("layer_")]
    of_each = [params[f"layer_{i}"] for i in range(len(layers))]
    unstacked = {name: value for name, value in params.items() if name not in layers}
    return unstacked | {"layers": jax.tree.map(lambda *each: jnp.stack(each), *of_each)}


def _round(layer: Layer, x: Any, nothing: None) -> tuple[Any, None]:
    return layer(x), nothing
