"""Mixed precision: losses that compute in 16 bits, with parameters in 32.

Only the inputs of the loss are cast. The optimizer's parameters, its moments and the gradients keep
their dtype, since the derivative of a cast is the cast back.

Source: Micikevicius et al., "Mixed Precision Training" (2018), section 3.1;
`_MixedPrecision(param_dtype)` in PyTorch's `distributed.py`.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import PyTree

from fddp.losses.results import check_callable


def mixed_precision(
    loss_fn: Callable[..., Any], dtype: DTypeLike = jnp.bfloat16
) -> Callable[..., Any]:
    """Casts the inputs of a loss, so that it computes in fewer bits than its parameters have.

    The float leaves of parameters and batch are cast. Integers and booleans are not, so token
    counts and masks of these dtypes stay exact. Buffers (`model_state=`) are not cast either:
    BatchNorm's statistics need their precision.

    Args:
      loss_fn: a loss in any form of `train_step`.
      dtype: the float dtype to compute in. float16 needs a scaled loss: see `dynamic_scale`.

    Returns:
      A loss of the same form. It returns loss, weight and aux in float32 or wider, and each buffer
      in its input dtype.

    Raises:
      TypeError: the loss is not a function.
      ValueError: the dtype is not a float dtype.

    Example:
      >>> import fddp, jax, jax.numpy as jnp
      >>> loss_fn = fddp.mixed_precision(lambda w, x: jnp.mean(w * x))
      >>> loss, grad = jax.value_and_grad(loss_fn)(jnp.float32(1), jnp.full(8, 1.001))
      >>> float(grad), grad.dtype
      (1.0, dtype('float32'))
    """
    check_callable("mixed_precision", "loss_fn", loss_fn)
    if not _is_float_dtype(dtype):
        raise ValueError(
            "fddp.mixed_precision: dtype must be a float dtype, "
            f"got {getattr(dtype, '__name__', dtype)}."
        )

    @wraps(loss_fn)
    def cast_loss(params: PyTree, batch: PyTree, **extra: Any) -> Any:
        params, batch = _cast_floats(lambda x: dtype, (params, batch))
        value = loss_fn(params, batch, **extra)
        exact = _cast_floats(lambda x: jnp.promote_types(x.dtype, jnp.float32), value)
        before = extra.get("model_state")
        match value, exact:
            case (_, (buffers, _)), (loss, (_, aux)) if before is not None:
                if jax.tree.structure(buffers) == jax.tree.structure(before):  # else a step raises
                    dtype_of = lambda new, old: jnp.result_type(old)  # noqa: E731
                    buffers = _cast_floats(dtype_of, buffers, before)
                return loss, (buffers, aux)
        return exact

    return cast_loss


def _is_float_dtype(dtype: DTypeLike | None) -> bool:
    try:
        return dtype is not None and jnp.issubdtype(dtype, jnp.floating)
    except TypeError:  # raised by NumPy for a value that is not a dtype
        return False


def _cast_floats(dtype_of: Callable[..., DTypeLike], tree: PyTree, *more: PyTree) -> Any:
    """Casts float arrays to `dtype_of(x, *more)`, and returns other leaves unchanged."""

    def cast(x: Any, *more: Any) -> Any:
        if hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.floating):
            return x.astype(dtype_of(x, *more))
        return x

    return jax.tree.map(cast, tree, *more)
