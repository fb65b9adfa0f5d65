"""BatchNorm over the rows of all replicas, however many each of them has.

Flax's own averages the replicas' means, which is right where all have equally many rows. This one sums rows and their
number, so rows that are padding may count for nothing, and a replica may have none that count.

Source: Ioffe & Szegedy, "Batch Normalization" (2015); `SyncBatchNorm` in PyTorch, which weighs by counts as well
(`torch/nn/modules/_functions.py`).
"""

from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.linen.dtypes import canonicalize_dtype
from flax.typing import Dtype, Initializer
from jaxtyping import Array, Bool, Float


class BatchNorm(nn.Module):
    """Batch normalization over all replicas; takes the place of `flax.linen.BatchNorm`, with its names and its state.

    Mean and variance are those of all counting elements of all replicas, found in two passes: one small all-reduce of
    counts and sums, one of squared deviations, which does not lose digits where the mean is large. Running averages
    stay as they are when nothing counts anywhere. A rank that has run out of data (`fddp.join`) goes on with its last
    batch, whose rows count here unless a mask in the batch says otherwise.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from fddp import BatchNorm
      >>> norm, x = BatchNorm(use_running_average=False), jnp.array([[1.0], [3.0], [99.0]])
      >>> variables = norm.init(jax.random.key(0), x)
      >>> y, _ = norm.apply(variables, x, mask=jnp.array([[True], [True], [False]]), mutable=["batch_stats"])
      >>> y[:2, 0].round(3).tolist()
      [-1.0, 1.0]
    """

    use_running_average: bool | None = None
    """Whether to normalize by the running averages (evaluation) and not by the batch; here or in the call."""
    axis: int = -1
    """The dim of the features; means are over all others."""
    momentum: float = 0.99
    """The share of the running averages that stays in each step."""
    epsilon: float = 1e-5
    """Added to the variance."""
    dtype: Dtype | None = None
    """The dtype of the result; None: that of input and parameters."""
    param_dtype: Dtype = jnp.float32
    """The dtype of scale and bias."""
    use_bias: bool = True
    """Whether a bias is added."""
    use_scale: bool = True
    """Whether the normalized values are multiplied by a scale."""
    bias_init: Initializer = nn.initializers.zeros
    """Makes the first bias."""
    scale_init: Initializer = nn.initializers.ones
    """Makes the first scale."""
    axis_name: str | None = None
    """The replicas' axis, `group.axis_name`; None: this replica's rows alone."""

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "..."],
        use_running_average: bool | None = None,
        *,
        mask: Bool[Array, "..."] | None = None,
    ) -> Float[Array, "..."]:
        """Normalizes each feature.

        Args:
          x: rows of features; float.
          use_running_average: as the field, which it must not contradict.
          mask: of a shape that broadcasts to x's; where it is False elements do not count, and are taken as zeros.

        Returns:
          Normalized x, of its shape.
        """
        frozen = nn.merge_param("use_running_average", self.use_running_average, use_running_average)
        wide = partial(jnp.promote_types, jnp.float32)
        features = x.shape[self.axis]
        others = [i for i in range(x.ndim) if i != self.axis % x.ndim]
        average_mean = self.variable("batch_stats", "mean", jnp.zeros, features, wide(self.param_dtype))
        average_var = self.variable("batch_stats", "var", jnp.ones, features, wide(self.param_dtype))

        if mask is not None:
            x = jnp.where(mask, x, 0)  # also where x is NaN, which would reach the gradients through a product
        if frozen:
            mean = average_mean.value
            var = average_var.value
        else:
            axis_name = None if self.is_initializing() else self.axis_name
            count, mean, var = _moments(x.astype(wide(self.dtype or x.dtype)), mask, others, axis_name)
            if not self.is_initializing():
                for average, value in ((average_mean, mean), (average_var, var)):
                    new = self.momentum * average.value + (1 - self.momentum) * value
                    average.value = jnp.where(count > 0, new, average.value).astype(average.value.dtype)

        scale, bias = (
            self.param(name, init, (features,), self.param_dtype) if used else None
            for name, init, used in (
                ("scale", self.scale_init, self.use_scale),
                ("bias", self.bias_init, self.use_bias),
            )
        )
        factor = jax.lax.rsqrt(var + self.epsilon)
        factor = factor if scale is None else factor * scale
        y = (x - jnp.expand_dims(mean, others)) * jnp.expand_dims(factor, others)
        y = y if bias is None else y + jnp.expand_dims(bias, others)
        return y.astype(canonicalize_dtype(x, scale, bias, dtype=self.dtype))


def _moments(
    x: Float[Array, "..."], mask: Any, axes: list[int], axis_name: str | None
) -> tuple[Float[Array, " n"], Float[Array, " n"], Float[Array, " n"]]:
    """The number of elements that count over all replicas, their mean and their variance, for each feature."""
    counts = jnp.ones_like(x) if mask is None else jnp.broadcast_to(mask, x.shape).astype(x.dtype)
    total = (lambda x: jax.lax.psum(x, axis_name)) if axis_name else (lambda x: x)
    count, sums = total(jnp.stack([counts.sum(axes), (counts * x).sum(axes)]))
    divisor = jnp.maximum(jax.lax.stop_gradient(count), 1)
    mean = sums / divisor
    # The derivative of this sum by the mean is zero; not taking it saves the backward pass a sum over replicas.
    deviations = counts * (x - jnp.expand_dims(jax.lax.stop_gradient(mean), axes))
    return count, mean, total((deviations**2).sum(axes)) / divisor
