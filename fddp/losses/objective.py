"""Converts the user's loss to one form, the objective, and checks its results."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, ArrayLike, Float, Int, PyTree

from fddp.losses.batches import Joined, Undivided
from fddp.wording import check_switch


class Weighted(NamedTuple):
    """A mean loss, or metric for `fddp.evaluate`, with its weight: the number of tokens or rows.

    Return it instead of a loss. Σ w·g / Σ w over replicas and micro-batches is then the gradient of
    the mean over all tokens, however unevenly they are distributed. A plain loss has the number of
    its rows as weight. The weight may be zero if the loss is finite; w·g must fit the dtype of the
    parameters.
    """

    value: Float[Array, ""]
    """The mean."""
    weight: Any
    """A number of 0 or more; the gradient treats it as a constant."""


class Evaluated(NamedTuple):
    """A loss with its weight, buffers and metrics."""

    loss: Float[Array, ""]
    weight: Float[Array, ""]
    """w in Σ w·g."""
    divisor: Float[Array, ""]
    """w in Σ w: equal to `weight`, except under `fddp.join`. There a rank without data has the
    weight 0, and the divisor that its rows would have, so that its gradients count as zeros."""
    unit: Int[Array, ""]
    """Rows per unit of weight; 1 if the loss returns its weight."""
    model_state: Any
    aux: Any


# (params, model_state, rng, batch, unit=None) → (w·loss, `Evaluated`); `unit`: rows per unit of
# weight, None: all of the batch
Objective = Callable[..., tuple[Array, Evaluated]]


def make_objective(loss_fn: Callable[..., Any], *, has_aux: bool) -> Objective:
    """Converts a loss to the form (params, model_state, rng, batch, unit=None) → (w·loss, values).

    `loss_fn(params, batch)` gets `model_state=` and `rng=` if the state has them. It returns a
    loss, `(loss, aux)` with `has_aux`, or `(loss, (model_state, aux))` with a model state. When it
    is traced, the objective raises ValueError or TypeError for other results.

    A loss may be `Weighted`. The weight of a plain loss is the number of its rows, since it is
    their mean, and ranks may have different numbers of rows. Rows are counted in units, such as the
    rows of the first batch: so most weights are 1, which rounds nothing. An undivided batch has the
    weight 1.
    """
    check_switch("has_aux", has_aux)

    def objective(
        params: PyTree, model_state: PyTree, rng: PyTree, batch: PyTree, unit: int | None = None
    ) -> tuple[Array, Evaluated]:
        if not isinstance(batch, Joined):
            batch = Joined(batch, 1, 1)
        batch, share, divisor, _ = batch
        rows = _rows(batch)  # 1 for an undivided batch
        if isinstance(batch, Undivided):
            batch = jax.tree.map(lambda x: x[0], batch.rows)
        extra = {"model_state": model_state, "rng": rng}
        value = loss_fn(params, batch, **{name: x for name, x in extra.items() if x is not None})
        aux = None
        if model_state is not None:
            before = model_state
            value, buffers_and_aux = _pair(value, "(loss, (model_state, aux))")
            model_state, aux = _pair(buffers_and_aux, "(loss, (model_state, aux))")
            _check_alike(before, model_state)
        elif has_aux:
            value, aux = _pair(value, "(loss, aux)")
        if isinstance(value, Weighted):
            unit = 1
            value, weight = value
        else:
            unit = unit or rows
            weight = rows / unit
        loss = _exact(_scalar(value))
        weight = jax.lax.stop_gradient(_weight(weight, loss.dtype))
        # The fractions of the rows that count in gradients, and in the divisor.
        counted = weight * jnp.mean(jnp.asarray(share, loss.dtype))
        divisor = weight * jnp.mean(jnp.asarray(divisor, loss.dtype))
        return counted * loss, Evaluated(
            loss, counted, divisor, jnp.int32(unit), model_state, _floats(aux)
        )

    return objective


def check_callable(call: str, name: str, value: Any) -> Callable[..., Any]:
    """Returns a function unchanged; raises TypeError for other values, and for Flax modules.

    Modules are callable, and PyTorch's DDP takes them.
    """
    kind = value
    if not isinstance(kind, type):
        kind = type(value)
    modules = [f"{parent.__module__}.{parent.__name__}" for parent in kind.__mro__]
    for module, adapter in (
        ("flax.linen.module.Module", "from_linen"),
        ("flax.nnx.module.Module", "from_nnx"),
    ):
        if module in modules:
            raise TypeError(
                f"fddp.{call}: {name} must be a loss, a function of parameters and batch, "
                f"got the module {kind.__name__}; fddp.{adapter}(module, loss) builds a loss from "
                "it."
            )
    if not callable(value):
        raise TypeError(f"fddp.{call}: {name} must be a function, got {type(value).__name__}.")
    return value


def _pair(value: Any, form: str) -> tuple[Any, Any]:
    if not isinstance(value, tuple) or isinstance(value, Weighted) or len(value) != 2:
        raise TypeError(f"the loss must return {form}, got {_shown(value)}.")
    return value


def _check_alike(before: PyTree, after: PyTree) -> None:
    if jax.tree.structure(after) != jax.tree.structure(before):
        raise ValueError(
            "the loss must return a model_state of the structure it was given, "
            f"{jax.tree.structure(before)}, got {jax.tree.structure(after)}."
        )
    for (path, old), new in zip(
        jax.tree_util.tree_leaves_with_path(before), jax.tree.leaves(after)
    ):
        if _shown(old) != _shown(new):
            name = jax.tree_util.keystr(path)
            raise ValueError(
                f"the loss must return model_state{name} as it was given, {_shown(old)}, "
                f"got {_shown(new)}."
            )


def _rows(batch: PyTree) -> int:
    return jnp.shape(jax.tree.leaves(batch)[0])[0]


def _scalar(value: Any) -> Array:
    if isinstance(value, tuple):
        raise TypeError(
            f"the loss must return one number, got a tuple {_shown(value)}; "
            "metrics need has_aux=True."
        )
    if not hasattr(value, "dtype"):
        raise TypeError(f"the loss must be an array computed from params, got {_shown(value)}.")
    if not jnp.issubdtype(value.dtype, jnp.floating):
        raise TypeError(f"the loss must be a float, got {_shown(value)}.")
    if value.shape != ():
        raise ValueError(
            f"the loss must be a scalar, got {_shown(value)}; take its mean over the rows."
        )
    return value


def _weight(weight: Any, dtype: DTypeLike) -> Array:
    if (
        not _is_array(weight)
        or jnp.shape(weight) != ()
        or not jnp.issubdtype(jnp.result_type(weight), jnp.number)
    ):
        raise TypeError(
            f"the weight of a loss must be one number, its tokens or rows, got {_shown(weight)}."
        )
    return jnp.asarray(weight, dtype)


def _floats(aux: PyTree) -> Any:
    for path, x in jax.tree_util.tree_leaves_with_path(aux):
        if not _is_array(x) or not jnp.issubdtype(jnp.result_type(x), jnp.floating):
            name = jax.tree_util.keystr(path)
            raise TypeError(
                f"aux{name} must be a float to be averaged over replicas, got {_shown(x)}; "
                "cast it, or leave it out."
            )
    return jax.tree.map(_exact, aux)


def _is_array(x: object) -> bool:
    return hasattr(x, "dtype") or isinstance(x, int | float | complex)


def _exact(x: ArrayLike) -> Array:
    """Widens to float32 or more: sums over many replicas and micro-batches outgrow 16 bits."""
    return jnp.asarray(x, jnp.promote_types(jnp.result_type(x), jnp.float32))


def _shown(value: Any) -> str:
    if isinstance(value, tuple):
        text = f"({', '.join(map(_shown, value))})"
        if isinstance(value, Weighted):
            return f"Weighted{text}"
        return text
    if hasattr(value, "dtype"):
        return f"{value.dtype}{list(value.shape)}"
    return type(value).__name__
