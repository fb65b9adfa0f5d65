"""Brings the user's loss into one form, and says in the user's words what is wrong with it."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from fddp.losses.batches import Joined, Undivided
from fddp.wording import check_switch


class Weighted(NamedTuple):
    """A mean loss with its weight, the number of its tokens or rows; `fddp.evaluate` takes metrics in the same form.

    Return it in a loss's place. Σ w·g / Σ w over replicas and micro-batches is then the gradient of the mean over all
    tokens, however unevenly they lie. A loss without a weight weighs as many as its rows. The weight may be zero where
    the loss is finite; w·g must fit the parameters' dtype.
    """

    value: Float[Array, ""]
    """The mean."""
    weight: Any
    """A number of 0 or more, a constant for the gradient."""


class Value(NamedTuple):
    """A loss with its weight, buffers and metrics."""

    loss: Float[Array, ""]
    weight: Float[Array, ""]
    """w in Σ w·g."""
    divisor: Float[Array, ""]
    """w in Σ w: the same number, but for a rank that has run out of data."""
    unit: Int[Array, ""]
    """Rows per unit of weight; 1 where the loss gives its weight."""
    model_state: Any
    aux: Any


# (params, model_state, rng, batch, unit=None) -> (w·loss, its Value); unit: rows per unit of weight, None: the batch's
Objective = Callable[..., tuple[Array, Value]]


def make_objective(loss_fn: Callable[..., Any], *, has_aux: bool) -> Objective:
    """Brings a loss into the form (params, model_state, rng, batch, unit=None) → (w·loss, `Value`).

    A loss that gives no weight is a mean over its rows and weighs as many: ranks may bring different numbers of them.
    Rows are counted in units, say of the first batch's rows: in most steps the weight is then 1, which rounds nothing.
    A batch that is taken as it is weighs 1.

    Args:
      loss_fn: `loss_fn(params, batch)`; called with `model_state=` or `rng=` where the state has them. Returns a loss,
        `(loss, aux)` with `has_aux`, or `(loss, (model_state, aux))` with a model state; the loss may be `Weighted`.
      has_aux: whether the loss returns metrics too.

    Returns:
      The objective; it raises ValueError or TypeError when it is traced and the loss returns something else.
    """
    check_switch("has_aux", has_aux)

    def objective(params: Any, model_state: Any, rng: Any, batch: Any, unit: int | None = None) -> tuple[Array, Value]:
        batch, share, divisor, _ = batch if isinstance(batch, Joined) else Joined(batch, 1, 1)
        rows = _rows(batch)  # 1, where a row is a whole batch
        batch = jax.tree.map(lambda x: x[0], batch.rows) if isinstance(batch, Undivided) else batch
        extra = {"model_state": model_state, "rng": rng}
        value = loss_fn(params, batch, **{name: x for name, x in extra.items() if x is not None})
        aux = None
        if has_aux or model_state is not None:
            value, aux = _pair(value, "(loss, (model_state, aux))" if model_state is not None else "(loss, aux)")
        if model_state is not None:
            given = model_state
            model_state, aux = _pair(aux, "(loss, (model_state, aux))")
            _check_alike(given, model_state)
        unit = 1 if isinstance(value, Weighted) else unit or rows
        value, weight = value if isinstance(value, Weighted) else (value, rows / unit)
        loss = _exact(_scalar(value))
        weight = jax.lax.stop_gradient(_weight(weight, loss.dtype))
        share, divisor = (weight * jnp.mean(jnp.asarray(x, loss.dtype)) for x in (share, divisor))
        return share * loss, Value(loss, share, divisor, jnp.int32(unit), model_state, _floats(aux))

    return objective


def check_callable(call: str, name: str, value: Any) -> Callable[..., Any]:
    """Returns a function as it is, and refuses all else, also a module, which DDP takes and which can be called."""
    kind = value if isinstance(value, type) else type(value)
    modules = [f"{parent.__module__}.{parent.__name__}" for parent in kind.__mro__]
    for module, adapter in (("flax.linen.module.Module", "from_linen"), ("flax.nnx.module.Module", "from_nnx")):
        if module in modules:
            raise TypeError(
                f"fddp.{call}: {name} must be a loss, a function of parameters and batch, got the module "
                f"{kind.__name__}; fddp.{adapter}(module, loss) makes one of it."
            )
    if not callable(value):
        raise TypeError(f"fddp.{call}: {name} must be a function, got {type(value).__name__}.")
    return value


def _pair(value: Any, form: str) -> tuple[Any, Any]:
    if not isinstance(value, tuple) or isinstance(value, Weighted) or len(value) != 2:
        raise TypeError(f"the loss must return {form}, got {_shown(value)}.")
    return value


def _check_alike(given: Any, returned: Any) -> None:
    if jax.tree.structure(returned) != jax.tree.structure(given):
        raise ValueError(
            f"the loss must return a model_state of the structure it was given, {jax.tree.structure(given)}, "
            f"got {jax.tree.structure(returned)}."
        )
    for (path, old), new in zip(jax.tree_util.tree_leaves_with_path(given), jax.tree.leaves(returned)):
        if _shown(old) != _shown(new):
            name = jax.tree_util.keystr(path)
            raise ValueError(
                f"the loss must return model_state{name} as it was given, {_shown(old)}, got {_shown(new)}."
            )


def _rows(batch: Any) -> int:
    return jnp.shape(jax.tree.leaves(batch)[0])[0]


def _scalar(value: Any) -> Array:
    if isinstance(value, tuple):
        raise TypeError(f"the loss must return one number, got a tuple {_shown(value)}; metrics need has_aux=True.")
    if not hasattr(value, "dtype"):
        raise TypeError(f"the loss must be an array computed from params, got {_shown(value)}.")
    if not jnp.issubdtype(value.dtype, jnp.floating):
        raise TypeError(f"the loss must be a float, got {_shown(value)}.")
    if value.shape != ():
        raise ValueError(f"the loss must be a scalar, got {_shown(value)}; take its mean over the rows.")
    return value


def _weight(weight: Any, dtype: Any) -> Array:
    if not _is_array(weight) or jnp.shape(weight) != () or not jnp.issubdtype(jnp.result_type(weight), jnp.number):
        raise TypeError(f"the weight of a loss must be one number, its tokens or rows, got {_shown(weight)}.")
    return jnp.asarray(weight, dtype)


def _floats(aux: Any) -> Any:
    for path, x in jax.tree_util.tree_leaves_with_path(aux):
        if not _is_array(x) or not jnp.issubdtype(jnp.result_type(x), jnp.floating):
            name = jax.tree_util.keystr(path)
            raise TypeError(
                f"aux{name} must be a float to be averaged over replicas, got {_shown(x)}; cast it, or leave it out."
            )
    return jax.tree.map(_exact, aux)


def _is_array(x: Any) -> bool:
    return hasattr(x, "dtype") or isinstance(x, int | float | complex)


def _exact(x: Any) -> Array:
    """Widens to float32 at least: sums over many replicas and micro-batches outgrow 16 bits."""
    return jnp.asarray(x, jnp.promote_types(jnp.result_type(x), jnp.float32))


def _shown(value: Any) -> str:
    if isinstance(value, tuple):
        name = "Weighted" if isinstance(value, Weighted) else ""
        return f"{name}({', '.join(map(_shown, value))})"
    if hasattr(value, "dtype"):
        return f"{value.dtype}{list(value.shape)}"
    return type(value).__name__
