"""Tests before training if a loss is a mean over its rows.

Replicas divide the rows of a batch. The mean of their gradients is the gradient of the full batch
if the loss is a mean over rows or returns its weight (`fddp.Weighted`). Any other loss trains to
different parameters on each number of replicas, and no other check detects that.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from fddp.comm import AXIS
from fddp.jax_internals import rows_here
from fddp.jaxpr import differentiable
from fddp.losses import Evaluated, Pending, check_callable, contribute, folded, make_objective
from fddp.step import check_arrays, check_rows
from fddp.wording import leaf_name

SHOWN = 6
# Random numbers may explain a difference up to this multiple of the difference between two keys.
NOISE = 3.0
CAUSES = """The usual causes, and what to do:
- a sum over the rows: take the mean;
- a mean over the rows of a mask: return fddp.Weighted(mean, mask.sum());
- numbers normalized over the batch (such as advantages): normalize them before the step, or over \
all replicas' rows, with
  jax.lax.pmean over group.axis_name;
- BatchNorm over the rows of each replica, as DDP has it: \
fddp.BatchNorm (Linen) or nnx.BatchNorm with axis_name=group.axis_name takes all rows;
- a maximum over the rows (amax of FP8): jax.lax.pmax over group.axis_name;
- contrast among the rows: jax.lax.all_gather over group.axis_name collects all rows."""


UNCOUNTED = (
    "Rows of weight 0 in fddp.Weighted do not count, and their loss is not 0: divide the plain sum "
    "over the rows by jax.lax.pmean(number, group.axis_name), or use max(number, 1e-6) both as "
    "divisor and as weight."
)


class Checked(NamedTuple):
    """The findings of `check`; `print` shows them with advice."""

    equal: bool
    """True if the weighted mean of the gradients of halves is the gradient of the full batch."""
    rows: int
    """Number of rows in the comparison."""
    leaves: tuple[tuple[str, float], ...]
    """Leaves with different gradients, and the relative differences; the largest first."""
    factor: float | None = None
    """The full batch's gradients divided by those of halves, if one number for all leaves."""
    random: bool = False
    """True if gradients depend on the random key: differences of that size prove nothing."""
    uncounted: bool = False
    """True if rows of weight 0 have a loss that is not 0, in `fddp.Weighted`."""

    def __bool__(self) -> bool:
        """True if the loss is a mean over its rows, for `assert fddp.check(…)`."""
        return self.equal

    def __str__(self) -> str:
        if self.equal:
            words = "The loss is a mean over its rows"
            if self.random:
                words += ", as far as its random numbers let see"
            return f"{words}: halves of {self.rows} rows have the whole's gradients."
        lines = [
            f"The loss is not a mean over its rows: halves of {self.rows} rows and the whole have "
            "different gradients."
        ]
        for name, share in self.leaves[:SHOWN]:
            lines.append(f"  {name or 'params'}: by {share:.2g} of its size")
        if len(self.leaves) > SHOWN:
            lines.append(f"  and {len(self.leaves) - SHOWN} more leaves")
        advice = CAUSES
        if self.uncounted:
            advice = UNCOUNTED
        elif self.factor:
            advice = (
                f"Those of the whole are {self.factor:.3g} times as large: the loss is a sum over "
                "its rows; take the mean."
            )
        return "\n".join([*lines, advice])


def check(
    loss_fn: Callable[..., Any],
    params: PyTree,
    batch: PyTree,
    *,
    has_aux: bool = False,
    model_state: PyTree = None,
    rng: PyTree = None,
    axis_name: str = AXIS,
) -> Checked:
    """Checks if a loss is a mean over its rows, so that replicas may divide them.

    It runs on this process only. It compares the gradient of the full batch with Σ w·g ÷ Σ w of two
    halves: the first and second half of the rows, then the even and odd rows. Both halves use the
    same random key.

    Args:
      loss_fn: as for `fddp.train_step`.
      params: a tree of arrays, such as the initial parameters. If all gradients are zero, the check
        is meaningless.
      batch: at least two rows; the last of an odd number is ignored.
      has_aux: as for `fddp.train_step`.
      model_state: as for `step.init`.
      rng: a random key, or a tree of keys.
      axis_name: the axis of the loss's collectives: `group.axis_name`.

    Returns:
      The findings.

    Raises:
      ValueError: the batch has no rows, or fewer than two.
      TypeError: the loss returns another structure than `has_aux` and `model_state` promise.

    Example:
      >>> import fddp, jax.numpy as jnp
      >>> rows = jnp.arange(1.0, 9.0)
      >>> print(fddp.check(lambda w, x: jnp.mean((w - x) ** 2), jnp.zeros(()), rows))
      The loss is a mean over its rows: halves of 8 rows have the whole's gradients.
      >>> print(fddp.check(lambda w, x: jnp.sum((w - x) ** 2), jnp.zeros(()), rows))
      The loss is not a mean over its rows: halves of 8 rows and the whole have different gradients.
        params: by 0.5 of its size
      Those of the whole are 2 times as large: the loss is a sum over its rows; take the mean.
    """
    check_callable("check", "loss_fn", loss_fn)
    check_arrays(params)
    batch = jax.device_get(jax.tree.map(rows_here, batch))
    rows = check_rows(
        batch, "; a batch that is not rows cannot be divided, so nothing can be checked"
    )
    if rows < 2:
        raise ValueError(f"fddp.check: the batch must have two rows at least, got {rows}.")
    chosen = differentiable(jax.tree.leaves(params))
    objective = partial(make_objective(loss_fn, has_aux=has_aux), unit=rows)
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(params)]
    names = [leaf_name(paths[i]) for i in chosen]

    @jax.jit
    def mean_of(shards: PyTree, key: Any) -> list[Any]:
        """Returns the mean gradients of replicas, from one shard of the rows per replica."""
        start = Pending(None, model_state, jnp.zeros((), jnp.int32), jnp.ones((), jnp.int32))
        sums_of = lambda x: contribute(objective, chosen, params, start, key, x).sums  # noqa: E731
        sums = jax.vmap(sums_of, axis_name=axis_name)(shards)
        total = jax.tree.map(lambda x: jnp.sum(x, axis=0), sums)
        return [
            g / jnp.where(total.weight == 0, 1, total.weight).astype(g.dtype) for g in total.grads
        ]

    def in_shards(count: int, order: Any) -> Any:
        return jax.tree.map(lambda x: x[order].reshape(count, -1, *x.shape[1:]), batch)

    def compared(*orders: np.ndarray) -> Checked:
        single = in_shards(1, orders[0])
        full = mean_of(single, key)
        redrawn = full if rng is None else mean_of(single, folded(rng, 1, 0, 0))
        halves = [mean_of(in_shards(2, order), key) for order in orders]
        return _compared(names, len(orders[0]), full, halves, redrawn)

    @jax.jit
    def evaluated(shards: PyTree) -> Evaluated:
        values = lambda x: objective(params, model_state, key, x)[1]  # noqa: E731
        return jax.vmap(values, axis_name=axis_name)(shards)

    key = folded(rng, 0, 0, 0)
    order = np.arange(rows // 2 * 2)
    found = compared(order, np.concatenate([order[::2], order[1::2]]))
    is_weighted = evaluated(in_shards(1, order)).unit[0] == 1  # else the rows, at least two
    if is_weighted:
        each = evaluated(in_shards(rows, np.arange(rows)))
        weighted, lossy = each.weight != 0, jnp.isfinite(each.loss) & (each.loss != 0)
        counted, uncounted = np.flatnonzero(weighted), np.flatnonzero(~weighted & lossy)
        count = min(len(counted), len(uncounted))
        if count:
            apart = compared(np.concatenate([uncounted[:count], counted[:count]]))
            found = found if apart else apart._replace(uncounted=True)
    return found


def _compared(
    names: list[str],
    rows: int,
    full: list[jax.Array],
    halves: list[list[jax.Array]],
    redrawn: list[jax.Array],
) -> Checked:
    """Compares gradients of the full batch with those of halves, and with those of another key."""
    sizes = [float(jnp.max(jnp.abs(g), initial=0)) for g in full]
    largest = max(sizes, default=0.0)
    differing = list[tuple[str, float]]()
    noisy = False
    for k, name in enumerate(names):
        size = max(sizes[k], 1e-3 * largest) or 1.0
        tolerance = float(jnp.finfo(full[k].dtype).eps) ** 0.5
        noise = _apart(full[k], redrawn[k]) / size
        share = max(_apart(full[k], half[k]) / size for half in halves)
        noisy |= noise > tolerance
        if not share <= max(tolerance, NOISE * noise):
            differing.append((name, share))
    if not differing:
        return Checked(True, rows, (), None, noisy)
    differing.sort(key=lambda pair: -pair[1])
    return Checked(False, rows, tuple(differing), _factor(full, halves), noisy)


def _apart(a: jax.Array, b: jax.Array) -> float:
    return float(jnp.max(jnp.abs(a - b), initial=0))


def _factor(full: list[jax.Array], halves: list[list[jax.Array]]) -> float | None:
    """Returns the full batch's gradients over those of halves, if one number above 1.5."""
    large = np.tile(_flat(full), len(halves))
    small = np.concatenate(list(map(_flat, halves)))
    if not np.any(small):
        return None
    factor = float(np.real(np.vdot(small, large) / np.vdot(small, small)))
    absolute = 1e-3 * float(np.max(np.abs(large)))
    if factor > 1.5 and np.allclose(large, factor * small, rtol=1e-3, atol=absolute):
        return factor
    return None


def _flat(grads: list[jax.Array]) -> np.ndarray:
    return np.concatenate([np.asarray(g, complex).reshape(-1) for g in grads])
