"""Whether a loss is a mean over its rows, tried before a training.

Replicas divide the rows of a batch. The mean of their gradients is the gradient of the whole batch if the loss is a
mean over rows, or says what it is a mean over (`fddp.Weighted`). A loss that is neither trains to other parameters on
each number of replicas, and nothing else would tell.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fddp.comm import AXIS
from fddp.jax_internals import rows_here
from fddp.jaxpr import differentiable
from fddp.losses import Pending, check_callable, contribute, make_objective
from fddp.step import check_arrays, check_rows
from fddp.wording import leaf_name

SHOWN = 6
NOISE = 3.0  # up to so many times the difference between two keys, random numbers may be why halves and whole differ
CAUSES = """The usual causes, and what to do:
- a sum over the rows: take the mean;
- a mean over the rows that a mask leaves: return fddp.Weighted(mean, mask.sum());
- numbers normalized over the batch (advantages, say): normalize them before the step, or over all replicas' rows, with
  jax.lax.pmean over group.axis_name;
- BatchNorm over the rows of each replica, as DDP has it: fddp.BatchNorm(axis_name=group.axis_name) takes all rows;
- contrast among the rows: jax.lax.all_gather over group.axis_name brings everybody's."""


class Checked(NamedTuple):
    """The findings of `check`; `print(it)` says what to do."""

    equal: bool
    """Whether halves of the rows, averaged by their weights, have the gradients of the whole batch."""
    rows: int
    """The number of rows that were looked at."""
    leaves: tuple[tuple[str, float], ...]
    """The leaves whose gradients differ, and by which share of their size; the largest first."""
    factor: float | None = None
    """The factor by which all gradients of the whole are larger, where it is one number."""
    random: bool = False
    """Whether another random key gives other gradients: differences as small as that prove nothing."""

    def __str__(self) -> str:
        if self.equal:
            random = ", as far as its random numbers let see" if self.random else ""
            return f"The loss is a mean over its rows{random}: halves of {self.rows} rows have the whole's gradients."
        shown = [f"  {name or 'params'}: by {share:.2g} of its size" for name, share in self.leaves[:SHOWN]]
        more = [f"  and {len(self.leaves) - SHOWN} more leaves"] if len(self.leaves) > SHOWN else []
        head = f"The loss is no mean over its rows: halves of {self.rows} rows have other gradients than the whole."
        if self.factor:
            times = f"Those of the whole are {self.factor:.3g} times as large"
            return "\n".join([head, *shown, *more, f"{times}: the loss is a sum over its rows; take the mean."])
        return "\n".join([head, *shown, *more, CAUSES])


def check(
    loss_fn: Callable[..., Any],
    params: Any,
    batch: Any,
    *,
    has_aux: bool = False,
    model_state: Any = None,
    rng: Any = None,
    axis_name: str = AXIS,
) -> Checked:
    """Tells whether a loss is a mean over its rows, so that replicas may divide them; on this process alone.

    The gradient of the whole batch is compared with Σ w·g ÷ Σ w of its halves: of the first and the second half of the
    rows, and of every other row. Halves draw from the same random key.

    Args:
      loss_fn: as for `fddp.train_step`.
      params: a tree of arrays, the first parameters say; where all gradients are zero nothing can be told.
      batch: rows, two at least; of an odd number the last one is left out.
      has_aux: as for `fddp.train_step`.
      model_state: as for `step.init`.
      rng: a random key, or a tree of them.
      axis_name: the axis over which the loss has collectives: `group.axis_name`.

    Returns:
      What was found.

    Raises:
      ValueError: the batch is no rows, or there are fewer than two.
      TypeError: the loss returns something else than promised.

    Example:
      >>> import fddp, jax.numpy as jnp
      >>> rows = jnp.arange(1.0, 9.0)
      >>> print(fddp.check(lambda w, x: jnp.mean((w - x) ** 2), jnp.zeros(()), rows))
      The loss is a mean over its rows: halves of 8 rows have the whole's gradients.
      >>> print(fddp.check(lambda w, x: jnp.sum((w - x) ** 2), jnp.zeros(()), rows))
      The loss is no mean over its rows: halves of 8 rows have other gradients than the whole.
        params: by 0.5 of its size
      Those of the whole are 2 times as large: the loss is a sum over its rows; take the mean.
    """
    check_callable("check", "loss_fn", loss_fn)
    check_arrays(params)
    batch = jax.device_get(jax.tree.map(rows_here, batch))
    rows = check_rows(batch, "; of batches that are no rows nothing can be divided, and nothing is to be checked")
    if rows < 2:
        raise ValueError(f"fddp.check: the batch must have two rows at least, got {rows}.")
    chosen = differentiable(jax.tree.leaves(params))
    objective = partial(make_objective(loss_fn, has_aux=has_aux), unit=rows)
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(params)]
    names = [leaf_name(paths[i]) for i in chosen]

    @jax.jit
    def mean_of(parts: Any, key: Any) -> list[Any]:
        """The gradients of replicas that have a part of the rows each."""
        start = Pending(None, model_state, jnp.zeros((), jnp.int32), jnp.ones((), jnp.int32))
        one = lambda part: contribute(objective, chosen, params, start, key, part).sums  # noqa: E731
        each = jax.vmap(one, axis_name=axis_name)(parts)
        total = jax.tree.map(lambda x: jnp.sum(x, axis=0), each)
        return [g / jnp.where(total.weight == 0, 1, total.weight).astype(g.dtype) for g in total.grads]

    half = rows // 2
    even = jax.tree.map(lambda x: x[: 2 * half], batch)
    alone = jax.tree.map(lambda x: x[None], even)
    in_order = jax.tree.map(lambda x: x.reshape(2, half, *x.shape[1:]), even)
    in_turn = jax.tree.map(lambda x: jnp.swapaxes(x.reshape(half, 2, *x.shape[1:]), 0, 1), even)
    whole = mean_of(alone, rng)
    again = whole if rng is None else mean_of(alone, _another(rng))
    return _compared(names, 2 * half, whole, [mean_of(in_order, rng), mean_of(in_turn, rng)], again)


def _compared(names: list[str], rows: int, whole: list[Any], halves: list[list[Any]], again: list[Any]) -> Checked:
    most = max((float(jnp.max(jnp.abs(g), initial=0)) for g in whole), default=0.0)
    differing = list[tuple[str, float]]()
    noisy = False
    for k, name in enumerate(names):
        size = max(float(jnp.max(jnp.abs(whole[k]), initial=0)), 1e-3 * most) or 1.0
        least = float(jnp.finfo(whole[k].dtype).eps) ** 0.5
        noise = _apart(whole[k], again[k]) / size
        share = max(_apart(whole[k], half[k]) / size for half in halves)
        noisy |= noise > least
        if not share <= max(least, NOISE * noise):
            differing.append((name, share))
    differing.sort(key=lambda pair: -pair[1])
    return Checked(not differing, rows, tuple(differing), _factor(whole, halves) if differing else None, noisy)


def _apart(a: Any, b: Any) -> float:
    return float(jnp.max(jnp.abs(a - b), initial=0))


def _factor(whole: list[Any], halves: list[list[Any]]) -> float | None:
    """The factor by which the whole's gradients are larger than those of halves, if it is one number for all."""
    large = np.concatenate([np.asarray(g, complex).reshape(-1) for g in whole] * len(halves))
    small = np.concatenate([np.asarray(g, complex).reshape(-1) for half in halves for g in half])
    if not np.any(small):
        return None
    factor = float(np.real(np.vdot(small, large) / np.vdot(small, small)))
    one = np.allclose(large, factor * small, rtol=1e-3, atol=1e-3 * float(np.max(np.abs(large))))
    return factor if one and factor > 1.5 else None


def _another(rng: Any) -> Any:
    is_key = lambda x: jnp.issubdtype(jnp.result_type(x), jax.dtypes.prng_key)  # noqa: E731
    return jax.tree.map(lambda x: jax.random.fold_in(x, 1) if is_key(x) else x, rng)
