"""Makes losses that compute in 16 bits, from parameters that stay in 32.

The parameters that the optimizer sees, its moments and the gradients keep their dtype; only the numbers with which the
loss computes are cast. A cast's derivative is the cast back, so gradients arrive in the dtype of the parameters.

Source: Micikevicius et al., "Mixed Precision Training" (2018), section 3.1; `_MixedPrecision(param_dtype)` in PyTorch's
`distributed.py`.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from fddp.losses.objective import check_callable


def mixed_precision(loss_fn: Callable[..., Any], dtype: DTypeLike = jnp.bfloat16) -> Callable[..., Any]:
    """Makes a loss that computes in fewer bits than its parameters have.

    The float leaves of the parameters and of the batch are cast. Integers and booleans are not: token counts and masks
    of these dtypes stay exact. Neither are buffers (`model_state=`), as BatchNorm's statistics need their bits.

    Args:
      loss_fn: a loss in any of the forms that `train_step` takes.
      dtype: the float dtype to compute in. float16 needs a scaled loss: see `dynamic_scale`.

    Returns:
      A loss of the same form. Loss, weight and aux come back in float32 at least, buffers in the dtype they were given.

    Raises:
      TypeError: the loss is no function.
      ValueError: the dtype is no float dtype.

    Example:
      >>> import fddp, jax, jax.numpy as jnp
      >>> loss_fn = fddp.mixed_precision(lambda w, x: jnp.mean(w * x))
      >>> loss, grad = jax.value_and_grad(loss_fn)(jnp.float32(1), jnp.full(8, 1.001))
      >>> float(grad), grad.dtype
      (1.0, dtype('float32'))
    """
    check_callable("mixed_precision", "loss_fn", loss_fn)
    if not _is_float_dtype(dtype):
        raise ValueError(f"fddp.mixed_precision: dtype must be a float dtype, got {getattr(dtype, '__name__', dtype)}.")

    @wraps(loss_fn)
    def cast_loss(params: Any, batch: Any, **extra: Any) -> Any:
        params, batch = jax.tree.map(lambda x: x.astype(dtype) if _float(x) else x, (params, batch))
        return _returned(loss_fn(params, batch, **extra), extra.get("model_state"))

    return cast_loss


def _is_float_dtype(dtype: Any) -> bool:
    try:
        return dtype is not None and jnp.issubdtype(dtype, jnp.floating)
    except TypeError:  # of NumPy, which knows no such dtype
        return False


def _returned(value: Any, model_state: Any) -> Any:
    """Widens a loss's results to float32 at least, and casts buffers to the dtype they were given in."""
    exact = jax.tree.map(lambda x: x.astype(jnp.promote_types(x.dtype, jnp.float32)) if _float(x) else x, value)
    match value, exact:
        case (_, (buffers, _)), (loss, (_, aux)) if model_state is not None:
            return loss, (_as_given(model_state, buffers), aux)
    return exact


def _as_given(given: Any, buffers: Any) -> Any:
    if jax.tree.structure(given) != jax.tree.structure(buffers):
        return buffers  # the step says what is wrong
    return jax.tree.map(lambda old, new: new.astype(jnp.result_type(old)) if _float(new) else new, given, buffers)


def _float(x: Any) -> bool:
    return hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.floating)
