"""The results of a user's loss: their forms, and checks of them."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, ArrayLike, Float, PyTree


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


def pair_of(value: Any, form: str) -> tuple[Any, Any]:
    """Returns a pair unchanged; raises TypeError for other values."""
    if not isinstance(value, tuple) or isinstance(value, Weighted) or len(value) != 2:
        raise TypeError(f"the loss must return {form}, got {_shown(value)}.")
    return value


def check_buffers(before: PyTree, after: PyTree) -> None:
    """Raises ValueError if a model state changes its structure, shapes or dtypes."""
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


def scalar_loss(value: Any) -> Array:
    """Widens a scalar float to float32 or more; raises TypeError or ValueError otherwise."""
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
    return _exact(value)


def scalar_weight(weight: Any, dtype: DTypeLike) -> Array:
    """Returns a weight as an array; raises TypeError if it is not a number."""
    if (
        not _is_array(weight)
        or jnp.shape(weight) != ()
        or not jnp.issubdtype(jnp.result_type(weight), jnp.number)
    ):
        raise TypeError(
            f"the weight of a loss must be one number, its tokens or rows, got {_shown(weight)}."
        )
    return jnp.asarray(weight, dtype)


def float_metrics(aux: PyTree) -> Any:
    """Returns metrics in float32 or more; raises TypeError if a metric is not a float."""
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


def check_callable(call: str, name: str, value: Any) -> None:
    """Raises TypeError for a value that is not a function, and for Flax modules."""
    kind = value if isinstance(value, type) else type(value)
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


def check_takes(
    loss_fn: Callable[..., Any], params: Any, batch: Any, extra: Mapping[str, Any]
) -> None:
    """Raises TypeError if a loss does not take the arguments of a step."""
    try:
        inspect.signature(loss_fn, follow_wrapped=False).bind(params, batch, **extra)
    except ValueError:  # a function in C
        return
    except TypeError as error:
        form = ", ".join(["params, batch", *(f"{name}=…" for name in extra)])
        raise TypeError(
            f"the loss must take ({form}): {error}. It gets model_state= and rng= exactly if "
            "step.init has them."
        ) from None
