"""A multilayer perceptron for regression: the model whose gradients are easiest to count.

Legend: B batch, D width of a layer.

Source: Rumelhart, Hinton and Williams, "Learning representations by back-propagating errors"
(Nature 1986).
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float


class MLP(nn.Module):
    """Dense layers with a rectifier between each two.

    Attributes:
      widths: the width of the input, of every hidden layer, and of the output.
      use_bias: whether the layers add a bias.
      dtype: the dtype of the computation.
      param_dtype: the dtype of the parameters.
    """

    widths: tuple[int, ...]
    use_bias: bool = True
    dtype: DTypeLike = jnp.float32
    param_dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(self, x: Float[Array, "B D"]) -> Float[Array, "B D"]:
        dense = partial(
            nn.Dense,
            use_bias=self.use_bias,
            dtype=self.dtype,
            param_dtype=self.param_dtype,
            kernel_init=nn.initializers.he_normal(),
        )
        *hidden, output = self.widths[1:]
        for width in hidden:
            x = nn.relu(dense(width)(x))
        return dense(output)(x)


PRESETS: dict[str, MLP] = {
    "tiny": MLP((16, 32, 32, 8)),
    # Eight kernels of 4 MiB and nothing else: 32 MiB of float32 gradients, to the byte.
    "1024": MLP((1024,) * 9, use_bias=False),
}


def init(model: MLP, key: jax.Array, batch: dict[str, Any]) -> tuple[Any, None]:
    """Returns fresh parameters, and `None`: the model has no buffers."""
    shape = jax.ShapeDtypeStruct(batch["input"].shape, batch["input"].dtype)
    return model.lazy_init(key, shape)["params"], None


def loss_fn(model: MLP) -> Callable[..., tuple[jax.Array, dict[str, jax.Array]]]:
    """Returns the mean squared error of the model, and the mean absolute error."""

    def loss(params: Any, batch: dict[str, Any], *, rng: jax.Array | None = None):
        del rng  # nothing here is random
        error = jnp.asarray(model.apply({"params": params}, batch["input"])) - batch["target"]
        return jnp.mean(error**2), {"absolute_error": jnp.mean(jnp.abs(error))}

    return loss


def batch(model: MLP | str, rows: int, seed: int = 0) -> dict[str, np.ndarray]:
    """Returns normally distributed inputs (rows, D) and targets (rows, D)."""
    model = PRESETS[model] if isinstance(model, str) else model
    rng = np.random.default_rng(seed)
    return {
        "input": rng.standard_normal((rows, model.widths[0]), np.float32),
        "target": rng.standard_normal((rows, model.widths[-1]), np.float32),
    }
