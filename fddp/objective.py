"""The user's loss in one form, whatever form it was written in, and what one micro-batch adds to a step.

A step is a sum of contributions over micro-batches, over calls since the last synchronization and over replicas,
followed by one division: Σ w·g / Σ w. Everything that is summed (gradients, loss, metrics, the weights themselves) has
the same algebra, so accumulation, `no_sync` and replicas need no formulas of their own.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Bool, Float, Int

from fddp.jaxpr import merge, split, statically_used, tracked


class Weighted(NamedTuple):
    """A loss that is a mean over so many tokens or rows: returned in a loss's place, it is averaged by their number.

    Σ w·g / Σ w over replicas and micro-batches is then the gradient of the mean over all tokens, however unevenly they
    lie. A loss without a weight counts with its rows. The weight may be zero where the loss is finite; w·g must fit the
    parameters' dtype.
    """

    value: Float[Array, ""]
    weight: Any
    """A number of 0 or more, a constant for the gradient."""


class Joined(NamedTuple):
    """A batch that counts only in part: what `fddp.join` yields."""

    rows: Any
    """The batch: a tree of arrays with equal first dims."""
    share: Float[ArrayLike, " rows"]
    """How much each row adds to gradients and loss: 1, or 0 when its rank has run out of data."""
    divisor: Float[ArrayLike, " rows"]
    """How much each row adds to what the sum is divided by."""
    leads: Bool[ArrayLike, " rows"] | None = None
    """Whose buffers all get: those of the replica with a row that leads; None: replica 0's, as without `join`."""


class Sums(NamedTuple):
    """Weighted sums of what micro-batches contribute."""

    grads: Any
    """Σ w·g for each trained leaf of the parameters, in the order of the leaves."""
    weight: Float[Array, ""]
    loss: Float[Array, ""]
    aux: Any
    used: Float[Array, " leaves"] | None = None
    """How many replicas used each trained leaf; of one replica 0 or 1. None where nobody asks."""


class Pending(NamedTuple):
    """What a replica has gathered since the last synchronization."""

    sums: Any
    """`Sums`, or None at the start: nothing yet."""
    model_state: Any
    """Buffers as this replica's last forward left them."""
    micro_batches: Int[Array, ""]
    """How many micro-batches came since the last synchronization."""
    unit: Int[Array, ""]
    """How many rows weigh 1 in the sums; 1 where the loss tells its weight."""


class Value(NamedTuple):
    """A loss and what comes with it."""

    loss: Float[Array, ""]
    weight: Float[Array, ""]
    """w in Σ w·g."""
    divisor: Float[Array, ""]
    """w in Σ w: the same number, but for a rank that has run out of data."""
    unit: Int[Array, ""]
    """How many rows weigh 1; 1 where the loss tells its weight."""
    model_state: Any
    aux: Any


# (params, model_state, rng, batch, unit=None) -> (w·loss, all of it); unit: how many rows weigh 1, None: any number
Objective = Callable[..., tuple[Array, Value]]


def make_objective(loss_fn: Callable[..., Any], *, has_aux: bool) -> Objective:
    """Brings a loss into the form (params, model_state, rng, batch, unit=None) → (w·loss, `Value`).

    A loss that tells no weight is a mean over its rows and weighs as many: ranks may bring different numbers of them.
    Rows are counted in units, of the first batch's rows say, so that in most steps the weight is 1 and costs no digit.

    Args:
      loss_fn: `loss_fn(params, batch)`; called with `model_state=` or `rng=` where the state has them. Returns a loss,
        `(loss, aux)` with `has_aux`, or `(loss, (model_state, aux))` with a model state; the loss may be `Weighted`.
      has_aux: whether the loss returns metrics too.

    Returns:
      The objective; it raises ValueError or TypeError when it is traced and the loss returns something else.
    """

    def objective(params: Any, model_state: Any, rng: Any, batch: Any, unit: int | None = None) -> tuple[Array, Value]:
        batch, share, divisor, _ = batch if isinstance(batch, Joined) else Joined(batch, 1, 1)
        extra = {"model_state": model_state, "rng": rng}
        value, aux = loss_fn(params, batch, **{name: x for name, x in extra.items() if x is not None}), None
        if has_aux or model_state is not None:
            value, aux = _pair(value, "(loss, (model_state, aux))" if model_state is not None else "(loss, aux)")
        if model_state is not None:
            given, (model_state, aux) = model_state, _pair(aux, "(loss, (model_state, aux))")
            _check_alike(given, model_state)
        unit = 1 if isinstance(value, Weighted) else unit or _rows(batch)
        value, weight = value if isinstance(value, Weighted) else (value, _rows(batch) / unit)
        loss = _exact(_scalar(value))
        weight = jax.lax.stop_gradient(_weight(weight, loss.dtype))
        share, divisor = (weight * jnp.mean(jnp.asarray(x, loss.dtype)) for x in (share, divisor))
        return share * loss, Value(loss, share, divisor, jnp.int32(unit), model_state, _floats(aux))

    return objective


def contribute(
    objective: Objective,
    chosen: Sequence[int],
    params: Any,
    pending: Pending,
    key: Any,
    batch: Any,
    *,
    find_unused: bool = False,
) -> Pending:
    """Adds one micro-batch's gradients, loss and metrics to what is pending.

    Args:
      objective: the loss, from `make_objective`.
      chosen: which leaves of the parameters to take gradients of.
      params: parameters.
      pending: what was gathered so far.
      key: random key of this step, micro-batch and replica, or None.
      batch: rows of one micro-batch.
      find_unused: whether to tell which of these leaves the loss used.

    Returns:
      What is pending now.
    """
    loss, trainable = _of_leaves(objective, chosen, params, pending, key, batch)

    def untracked(trainable: Sequence[Array]) -> tuple[Array, tuple[Value, None]]:
        weighted, value = loss(trainable)
        return weighted, (value, None)

    f = tracked(loss) if find_unused else untracked
    (_, (value, used)), grads = jax.value_and_grad(f, has_aux=True)(trainable)
    weight = value.weight
    sums = Sums(
        grads=tuple(grads),
        weight=value.divisor,
        loss=weight * value.loss,
        aux=jax.tree.map(lambda x: weight.astype(x.dtype) * x, value.aux),
        # A rank without data shadows the others: what it computes counts for nothing.
        used=None if used is None else jnp.where(weight > 0, used, False).astype(jnp.float32),
    )
    return Pending(plus(pending.sums, sums), value.model_state, pending.micro_batches + 1, value.unit)


def reached(
    objective: Objective, chosen: Sequence[int], params: Any, pending: Pending, key: Any, batch: Any
) -> tuple[bool, ...]:
    """Which of the chosen leaves have any path to the loss, in any branch; arguments as of `contribute`."""
    loss, trainable = _of_leaves(objective, chosen, params, pending, key, batch)
    return statically_used(loss, trainable)


def plus(a: Sums | None, b: Sums) -> Sums:
    """Adds contributions of one replica; None is the neutral element. Used once is used."""
    if a is None:
        return b
    return jax.tree.map(jnp.add, a, b)._replace(used=jax.tree.map(jnp.maximum, a.used, b.used))


def in_unit(pending: Pending, unit: Int[Array, ""]) -> Sums | None:
    """What is pending, as it would be if so many rows weighed 1: it may come from a step that began otherwise."""
    if pending.sums is None:
        return None
    factor = pending.unit / unit
    sums = jax.tree.map(lambda x: x * factor.astype(x.dtype), pending.sums._replace(used=None))
    return sums._replace(used=pending.sums.used)


def mean(sums: Sums) -> Sums:
    """Divides contributions by their weight; where nothing has weight the mean is zero."""
    weight = jnp.where(sums.weight == 0, 1, sums.weight)

    def divided(x: Array) -> Array:
        # Not in 16 bits: the weight, of all tokens say, may be more than float16 holds.
        wide = x.dtype if x.dtype.itemsize >= 4 else jnp.float32
        return (x.astype(wide) / weight.astype(wide)).astype(x.dtype)

    return jax.tree.map(divided, sums)._replace(used=sums.used)


def _of_leaves(
    objective: Objective, chosen: Sequence[int], params: Any, pending: Pending, key: Any, batch: Any
) -> tuple[Callable[[Sequence[Array]], tuple[Array, Value]], list[Array]]:
    """The objective as a function of the chosen leaves alone, and these."""
    leaves, treedef = jax.tree.flatten(params)
    trainable, fixed = split(chosen, leaves)

    def loss(trainable: Sequence[Array]) -> tuple[Array, Value]:
        return objective(treedef.unflatten(merge(chosen, trainable, fixed)), pending.model_state, key, batch)

    return loss, list(trainable)


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
    """In float32 at least: sums over many replicas and micro-batches outgrow 16 bits."""
    return jnp.asarray(x, jnp.promote_types(jnp.result_type(x), jnp.float32))


def _shown(value: Any) -> str:
    if isinstance(value, tuple):
        name = "Weighted" if isinstance(value, Weighted) else ""
        return f"{name}({', '.join(map(_shown, value))})"
    if hasattr(value, "dtype"):
        return f"{value.dtype}{list(value.shape)}"
    return type(value).__name__
