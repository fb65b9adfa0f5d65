"""The contributions of micro-batches to a step, and their sum: Σ w·g / Σ w.

A step is a sum of contributions over micro-batches, over calls since the last synchronization and over replicas,
followed by one division. Everything that is summed (gradients, loss, metrics, the weights themselves) has the same
algebra, so accumulation, `no_sync` and replicas need no formulas of their own.

Source: `no_sync` in PyTorch's `distributed.py`, paper section 3.2.4; here one call accumulates, where DDP needs k.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from fddp.jaxpr import merge, split, statically_used, tracked
from fddp.losses.objective import Objective, Value


class Sums(NamedTuple):
    """Weighted sums of the contributions of micro-batches."""

    grads: Any
    """Σ w·g for each trained leaf of the parameters, in the order of the leaves; (): none, or they were sent."""
    weight: Float[Array, ""]
    """Σ w."""
    loss: Float[Array, ""]
    """Σ w·loss."""
    aux: Any
    """Σ w·aux."""
    used: Float[Array, " leaves"] | None = None
    """Number of replicas that used each trained leaf; 0 or 1 for one replica. None where nobody asks."""


class Pending(NamedTuple):
    """The sums of a replica since the last synchronization, and its buffers."""

    sums: Any
    """`Sums`, or None at the start: nothing yet."""
    model_state: Any
    """Buffers as this replica's last forward pass left them."""
    micro_batches: Int[Array, ""]
    """Number of micro-batches since the last synchronization."""
    unit: Int[Array, ""]
    """Rows per unit of weight in the sums; 1 where the loss gives its weight."""


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
      chosen: numbers of the leaves of the parameters to take gradients of.
      params: parameters.
      pending: the sums so far.
      key: random key of this step, micro-batch and replica, or None.
      batch: rows of one micro-batch.
      find_unused: whether to find which of these leaves the loss used.

    Returns:
      The sums with this micro-batch's.
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
        # A rank without data only keeps step with the others: its results do not count.
        used=None if used is None else jnp.where(weight > 0, used, False).astype(jnp.float32),
    )
    return Pending(plus(pending.sums, sums), value.model_state, pending.micro_batches + 1, value.unit)


def accumulate(add: Callable[[Pending, Any], Pending], pending: Pending, rows: Any, steps: int) -> Pending:
    """Adds a replica's rows to what is pending, in equal micro-batches.

    The first k − 1 micro-batches run in a loop. The last stands outside it, because traffic overlaps with its backward
    pass, and inside a loop an all-reduce would run in each round.

    Args:
      add: adds one micro-batch.
      pending: the start, its `sums` None.
      rows: tree of arrays whose first dim is divisible by `steps`.
      steps: number of micro-batches k, at least 1.

    Returns:
      The sums of these rows, and the buffers and the count after them.
    """
    parts = in_parts(rows, steps)
    first = jax.tree.map(lambda x: x[:-1], parts)
    last = jax.tree.map(lambda x: x[-1], parts)
    if steps > 1:
        start = _from_zero(add, pending, last)
        pending, _ = jax.lax.scan(lambda carried, part: (add(carried, part), None), start, first)
    return add(pending, last)


def in_parts(rows: Any, steps: int) -> Any:
    """Cuts a replica's rows into equal micro-batches, along a first dim."""
    return jax.tree.map(lambda x: x.reshape(steps, x.shape[0] // steps, *x.shape[1:]), rows)


def reached(
    objective: Objective, chosen: Sequence[int], params: Any, pending: Pending, key: Any, batch: Any
) -> tuple[bool, ...]:
    """Finds the chosen leaves that have a path to the loss in any branch; takes the arguments of `contribute`."""
    loss, trainable = _of_leaves(objective, chosen, params, pending, key, batch)
    return statically_used(loss, trainable)


def plus(a: Sums | None, b: Sums) -> Sums:
    """Adds contributions of one replica: None is neutral, as are gradients of (); a leaf used in either is used."""
    if a is None:
        return b
    grads = added(a.grads, b.grads) if a.grads else b.grads
    sums = added(a._replace(grads=()), b._replace(grads=()))
    return sums._replace(grads=grads, used=jax.tree.map(jnp.maximum, a.used, b.used))


def added(a: Any, b: Any) -> Any:
    """Adds two trees of sums, array by array: wherever contributions meet, in a loop, a list or a tree."""
    return jax.tree.map(jnp.add, a, b)


def in_unit(pending: Pending, unit: Int[Array, ""]) -> Sums | None:
    """Converts pending sums to `unit` rows per unit of weight: they may come from batches of another size."""
    if pending.sums is None:
        return None
    factor = pending.unit.astype(float) / unit  # two int32 would be divided in float32, also under x64
    sums = jax.tree.map(lambda x: x * factor.astype(x.dtype), pending.sums._replace(used=None))
    return sums._replace(used=pending.sums.used)


def mean(sums: Sums) -> Sums:
    """Divides contributions by their weight; where nothing has weight the mean is zero.

    A hook may have added what it remembered of steps that had weight: without any it counts for nothing.
    """
    weight = jnp.where(sums.weight == 0, 1, sums.weight)
    or_infinite = jnp.where(sums.weight == 0, jnp.inf, sums.weight)

    def divided(x: Array) -> Array:
        # 16 bits do not do: the weight, the count of all tokens say, may be more than float16 holds.
        wide = x.dtype if x.dtype.itemsize >= 4 else jnp.float32
        divisor = or_infinite if jnp.issubdtype(wide, jnp.floating) else weight
        return (x.astype(wide) / divisor.astype(wide)).astype(x.dtype)

    return jax.tree.map(divided, sums)._replace(used=sums.used)


def _of_leaves(
    objective: Objective, chosen: Sequence[int], params: Any, pending: Pending, key: Any, batch: Any
) -> tuple[Callable[[Sequence[Array]], tuple[Array, Value]], list[Array]]:
    """Makes the objective a function of the chosen leaves alone; gives it and these leaves."""
    leaves, treedef = jax.tree.flatten(params)
    trainable, fixed = split(chosen, leaves)

    def loss(trainable: Sequence[Array]) -> tuple[Array, Value]:
        return objective(treedef.unflatten(merge(chosen, trainable, fixed)), pending.model_state, key, batch)

    return loss, list(trainable)


def _from_zero(add: Callable[[Pending, Any], Pending], pending: Pending, part: Any) -> Pending:
    """Puts zeros in place of sums that are None: a loop needs arrays from its start on."""
    shapes = jax.eval_shape(add, pending, part)
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes.sums)
    return pending._replace(sums=zeros)
