"""The contributions of micro-batches to a step, and their mean Σ w·g / Σ w.

A step adds contributions over micro-batches, over calls since the last synchronization and over
replicas, and divides once. Gradients, loss, metrics and weights are all added in the same way, so
accumulation, `no_sync` and replicas need no formulas of their own.

Source: `no_sync` in PyTorch's `distributed.py`, paper section 3.2.4; here one call accumulates,
where DDP needs k.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PyTree

from fddp.jaxpr import join_leaves, split_leaves, statically_used, tracked
from fddp.losses.objective import Evaluated, Objective


class Sums(NamedTuple):
    """Weighted sums of the contributions of micro-batches."""

    grads: Any
    """Σ w·g for each trained leaf, in leaf order; () if there are none, or if they were sent."""
    weight: Float[Array, ""]
    """Σ w."""
    loss: Float[Array, ""]
    """Σ w·loss."""
    aux: Any
    """Σ w·aux."""
    used: Float[Array, " leaves"] | None = None
    """Number of replicas that used each trained leaf; 0 or 1 for one replica. None: not tracked."""


class Pending(NamedTuple):
    """The sums of a replica since the last synchronization, and its buffers."""

    sums: Any
    """`Sums`, or None before the first micro-batch."""
    model_state: Any
    """Buffers after this replica's last forward pass."""
    micro_batches: Int[Array, ""]
    """Number of micro-batches since the last synchronization."""
    unit: Int[Array, ""]
    """Rows per unit of weight in the sums; 1 if the loss returns its weight."""


def contribute(
    objective: Objective,
    chosen: Sequence[int],
    params: PyTree,
    pending: Pending,
    key: PyTree,
    micro_batch: PyTree,
    *,
    find_unused: bool = False,
) -> Pending:
    """Adds one micro-batch's gradients, loss and metrics to the pending sums."""
    loss, trainable = _of_leaves(objective, chosen, params, pending, key, micro_batch)

    used = None
    if find_unused:
        graded = jax.value_and_grad(tracked(loss), has_aux=True)
        (_, (value, used)), grads = graded(trainable)
    else:
        (_, value), grads = jax.value_and_grad(loss, has_aux=True)(trainable)
    weight = value.weight
    sums = Sums(
        grads=tuple(grads),
        weight=value.divisor,
        loss=weight * value.loss,
        aux=jax.tree.map(lambda x: weight.astype(x.dtype) * x, value.aux),
    )
    if used is not None:
        # A rank without data only takes part in the collectives: its results do not count.
        used = jnp.where(weight > 0, used, False).astype(jnp.float32)
        sums = sums._replace(used=used)
    return Pending(
        plus(pending.sums, sums), value.model_state, pending.micro_batches + 1, value.unit
    )


def accumulate(
    add: Callable[[Pending, Any], Pending], pending: Pending, rows: PyTree, count: int
) -> Pending:
    """Adds a replica's rows to the pending sums, in `count` equal micro-batches; `add` adds one.

    All but the last run in a loop. The last runs after it, because communication overlaps with its
    backward pass, and an all-reduce inside the loop would run in each round. The `sums` of
    `pending` are None at the start.
    """
    micro_batches = split_rows(rows, count)
    before_last = jax.tree.map(lambda x: x[:-1], micro_batches)
    last = jax.tree.map(lambda x: x[-1], micro_batches)
    if count > 1:  # a loop carries arrays, zeros at the start
        shapes = jax.eval_shape(add, pending, last).sums
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        start = pending._replace(sums=zeros)
        pending, _ = jax.lax.scan(lambda carry, x: (add(carry, x), None), start, before_last)
    return add(pending, last)


def split_rows(rows: PyTree, count: int) -> Any:
    """Splits a replica's rows into equal micro-batches, along a new first dim."""
    return jax.tree.map(lambda x: x.reshape(count, x.shape[0] // count, *x.shape[1:]), rows)


def reached(
    objective: Objective,
    chosen: Sequence[int],
    params: PyTree,
    pending: Pending,
    key: PyTree,
    micro_batch: PyTree,
) -> tuple[bool, ...]:
    """Marks the chosen leaves with a path to the loss in any branch, on inputs of `contribute`."""
    loss, trainable = _of_leaves(objective, chosen, params, pending, key, micro_batch)
    return statically_used(loss, trainable)


def plus(a: Sums | None, b: Sums) -> Sums:
    """Adds the sums of one replica; None and gradients of () are neutral."""
    if a is None:
        return b
    grads = b.grads
    if a.grads:
        grads = add_trees(a.grads, b.grads)
    sums = add_trees(a._replace(grads=()), b._replace(grads=()))
    return sums._replace(grads=grads, used=jax.tree.map(jnp.maximum, a.used, b.used))


def add_trees(a: PyTree, b: PyTree) -> Any:
    """Adds two trees of arrays."""
    return jax.tree.map(jnp.add, a, b)


def in_unit(pending: Pending, unit: Int[Array, ""]) -> Sums | None:
    """Converts pending sums to `unit` rows per unit of weight."""
    if pending.sums is None:
        return None
    # In float64 under x64, where int32 / int32 would be float32.
    factor = jnp.asarray(pending.unit, float) / unit
    sums = jax.tree.map(lambda x: x * factor.astype(x.dtype), pending.sums._replace(used=None))
    return sums._replace(used=pending.sums.used)


def mean(sums: Sums) -> Sums:
    """Divides sums by their weight; without weight the mean is zero.

    A hook may have added a residual of earlier steps to the sums. Without weight it does not count.
    """
    # x / inf discards a residual. A complex number divided by infinity would be NaN.
    weight = jnp.where(sums.weight == 0, 1, sums.weight)
    or_infinite = jnp.where(sums.weight == 0, jnp.inf, sums.weight)

    def divided(x: Array) -> Array:
        # The weight, such as the number of all tokens, may exceed the largest float16.
        wide = x.dtype
        if x.dtype.itemsize < 4:
            wide = jnp.float32
        divisor = weight
        if jnp.issubdtype(wide, jnp.floating):
            divisor = or_infinite
        return (x.astype(wide) / divisor.astype(wide)).astype(x.dtype)

    return jax.tree.map(divided, sums)._replace(used=sums.used)


def _of_leaves(
    objective: Objective,
    chosen: Sequence[int],
    params: PyTree,
    pending: Pending,
    key: PyTree,
    micro_batch: PyTree,
) -> tuple[Callable[[Sequence[Array]], tuple[Array, Evaluated]], list[Array]]:
    """Returns the objective as a function of the chosen leaves, and these leaves."""
    leaves, treedef = jax.tree.flatten(params)
    trainable, fixed = split_leaves(chosen, leaves)

    def loss(trainable: Sequence[Array]) -> tuple[Array, Evaluated]:
        return objective(
            treedef.unflatten(join_leaves(chosen, trainable, fixed)),
            pending.model_state,
            key,
            micro_batch,
        )

    return loss, list(trainable)
