"""BatchNorm over the rows of all replicas, for any number of rows per replica.

Flax's BatchNorm averages the means of replicas, which is correct for equal numbers of rows. This
module sums rows and counts. So a mask can exclude padding, and a replica may have no rows that
count.

Source: Ioffe & Szegedy, "Batch Normalization" (2015); `SyncBatchNorm` in PyTorch, which also
weights by counts (`torch/nn/modules/_functions.py`).
"""

from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.linen.dtypes import canonicalize_dtype
from jaxtyping import Array, Bool, Float


class BatchNorm(nn.BatchNorm):
    """Batch normalization over all replicas: `flax.linen.BatchNorm` with other statistics.

    Mean and variance are computed over all unmasked elements of all replicas, in two passes: one
    small all-reduce of counts and sums, and one of squared deviations, which keeps its precision if
    the mean is large. If all elements of all replicas are masked, the running averages do not
    change. A rank that has run out of data (`fddp.join`) repeats its last batch. Its rows count
    here, unless the batch has a mask that excludes them. The fields are Flax's: `axis_name` is the
    replicas' axis, `group.axis_name` (None: the statistics are those of this replica), and
    `use_fast_variance` and `force_float32_reductions` have no effect.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from fddp import BatchNorm
      >>> norm, x = BatchNorm(use_running_average=False), jnp.array([[1.0], [3.0], [99.0]])
      >>> variables = norm.init(jax.random.key(0), x)
      >>> mask = jnp.array([[True], [True], [False]])
      >>> y, _ = norm.apply(variables, x, mask=mask, mutable=["batch_stats"])
      >>> y[:2, 0].round(3).tolist()
      [-1.0, 1.0]
    """

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
          x: float array with a dim of features.
          use_running_average: as the field; give one of the two.
          mask: array that broadcasts to the shape of x. Elements where it is False do not count,
            and are replaced by zeros.

        Returns:
          The normalized array.

        Raises:
          ValueError: `axis_index_groups` is set.
        """
        if self.axis_index_groups is not None:
            raise ValueError(
                f"BatchNorm computes its statistics over all replicas of {self.axis_name!r}, got "
                "axis_index_groups: leave it out, or use flax.linen.BatchNorm."
            )
        frozen = nn.merge_param(
            "use_running_average", self.use_running_average, use_running_average
        )
        wide = partial(jnp.promote_types, jnp.float32)
        features = x.shape[self.axis]
        dims = [i for i in range(x.ndim) if i != self.axis % x.ndim]
        average_mean = self.variable(
            "batch_stats", "mean", jnp.zeros, features, wide(self.param_dtype)
        )
        average_var = self.variable(
            "batch_stats", "var", jnp.ones, features, wide(self.param_dtype)
        )

        if mask is not None:
            # Not a product: a masked NaN would reach the gradients.
            x = jnp.where(mask, x, 0)
        if frozen:
            mean = average_mean.value
            var = average_var.value
        else:
            axis_name = self.axis_name
            if self.is_initializing():
                axis_name = None
            wide_x = x.astype(wide(self.dtype or x.dtype))
            count, mean, var = _moments(wide_x, mask, dims, axis_name)
            if not self.is_initializing():
                for average, value in ((average_mean, mean), (average_var, var)):
                    old = average.value
                    new = self.momentum * old + (1 - self.momentum) * value
                    average.value = jnp.where(count > 0, new, old).astype(old.dtype)

        scale = bias = None
        if self.use_scale:
            scale = self.param("scale", self.scale_init, (features,), self.param_dtype)
        if self.use_bias:
            bias = self.param("bias", self.bias_init, (features,), self.param_dtype)
        factor = jax.lax.rsqrt(var + self.epsilon)
        if scale is not None:
            factor = factor * scale
        y = (x - jnp.expand_dims(mean, dims)) * jnp.expand_dims(factor, dims)
        if bias is not None:
            y = y + jnp.expand_dims(bias, dims)
        return y.astype(canonicalize_dtype(x, scale, bias, dtype=self.dtype))


def _moments(
    x: Float[Array, "..."], mask: Bool[Array, "..."] | None, dims: list[int], axis_name: str | None
) -> tuple[Float[Array, " n"], Float[Array, " n"], Float[Array, " n"]]:
    """Returns count, mean and variance of the unmasked elements of all replicas, per feature."""
    counts = jnp.ones_like(x) if mask is None else jnp.broadcast_to(mask, x.shape).astype(x.dtype)

    def total(x: Array) -> Array:
        if not axis_name:
            return x
        return jax.lax.psum(x, axis_name)

    count, sums = total(jnp.stack([counts.sum(dims), (counts * x).sum(dims)]))
    divisor = jnp.maximum(jax.lax.stop_gradient(count), 1)
    mean = sums / divisor
    # The derivative of the variance by the mean is zero: dropping it saves the backward pass a sum
    # over replicas.
    deviations = counts * (x - jnp.expand_dims(jax.lax.stop_gradient(mean), dims))
    return count, mean, total((deviations**2).sum(dims)) / divisor
