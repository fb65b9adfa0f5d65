"""Averages the metrics of a state over all rows of all ranks, for any distribution of the rows.

Source: `Metric.sync` in torchmetrics; `pad_shard_unpad` in flax.jax_utils. Here nothing is padded.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh

from fddp.comm import (
    REPLICATED,
    Group,
    Placement,
    as_program,
    described,
    mesh_placement,
    nothing_to_compare,
    verify,
)
from fddp.jax_internals import on_mesh, rows_here, without_context_mesh
from fddp.jaxpr import refuse_deleted
from fddp.losses import Stacked, Weighted, check_callable, count_rows
from fddp.runtime import group_of
from fddp.sharding import whole
from fddp.step import TrainState, check_filled, check_no_state, finished, refuse_transformations
from fddp.wording import check_has


def evaluate(
    metric_fn: Callable[..., Any], state: Any, batches: Iterable[Any], *, group: Group | None = None
) -> Any:
    """Averages metrics over all rows of all ranks, for any number of batches and rows per rank.

    No row is padded or counted twice. The ranks synchronize after their last batches, and an error
    on one rank is then raised on all ranks. Every rank calls it.

    Args:
      metric_fn: `metric_fn(params, batch)` → a tree of floats, each a mean over the rows of the
        batch: numbers, or arrays of one shape for all batches. A mean over tokens, or over the rows
        of each class, is returned with their number, as `fddp.Weighted(mean, number)`; it may be
        NaN if its weight is 0. With a model state the function also receives `model_state=`, but no
        random keys. It is compiled once per form of a batch: pass the same function each time. A
        loss works as well.
      state: a `TrainState` of any step, or any tree in place of its parameters: your own
        parameters, or a Flax module (`net.module(state)` of `from_nnx`). It is not changed. Sharded
        parameters and buffers are gathered for the duration of the call.
      batches: this process's batches; each a tree of arrays with equal first dims. Its rows are
        split over the devices of this process if they divide evenly. Any other tree is passed
        unchanged and counts as one row, and so does each batch of `fddp.Stacked`.
      group: the replicas; None: those of `fddp.init()`.

    Returns:
      The tree of means: floats, and NumPy arrays of float64, summed in float64; the same bits on
      every rank. A mean is NaN if all its weights are 0.

    Raises:
      ValueError: no rank has a batch, a batch has no arrays, or metrics or their shapes differ; on
        every rank.
      TypeError: a metric is not a float, or `batches` is not iterable; on every rank. Also under a
        transformation.
      Exception: an error of `metric_fn` or `batches`, on every rank: unchanged if all ranks raise
        the same, else its message by rank.

    Example:
      >>> import fddp, jax.numpy as jnp, optax
      >>> step = fddp.train_step(lambda w, x: jnp.mean((x - w) ** 2), optax.sgd(0.5))
      >>> state = step.init(jnp.zeros(()))
      >>> metrics = lambda w, x: {"error": jnp.mean(abs(x - w))}
      >>> fddp.evaluate(metrics, state, [jnp.ones(8), jnp.full(2, 6.0)])
      {'error': 2.0}
    """
    refuse_transformations()
    group = group_of("evaluate", group)
    state = finished(state)
    trees = (state, None)
    if isinstance(state, TrainState):
        trees = (state.params, state.model_state)
    with group.journal.inside("fddp.evaluate"):
        verify(group, "metric_fn or state", lambda: _described(metric_fn, trees))
        params, model_state = whole(trees, group=group)
        compute = partial(_sums, metric_fn, params, model_state, batches, group)
        sums = verify(group, "evaluation", compute, nothing_to_compare)
        rank_sums = [x for x in group.all_gather_object(sums) if x is not None]
        if not rank_sums:
            raise ValueError("fddp.evaluate: no rank has a batch; give at least one.")
        sums = rank_sums[0] if sums is None else sums
        verify(group, "metrics", lambda: described("metric", sums))
    totals = jax.tree_util.tree_map_with_path(_added, *rank_sums)
    return jax.tree.map(_mean, totals, is_leaf=_is_weighted)


def _described(metric_fn: Callable[..., Any], trees: tuple[Any, Any]) -> list[str]:
    """Describes the parameters and the model state, or raises an error about an argument."""
    check_callable("evaluate", "metric_fn", metric_fn)
    check_no_state("fddp.evaluate: state", trees)
    leaves = jax.tree.leaves(trees)
    refuse_deleted(leaves)
    for x in leaves:
        if not hasattr(x, "shape") and not isinstance(x, int | float | complex):
            raise TypeError(
                "fddp.evaluate: state must be a TrainState, or a tree of arrays, such as "
                f"parameters or an nnx module; it holds {type(x).__name__}."
            )
    return described("state", trees)


def _sums(
    metric_fn: Callable[..., Any], params: Any, buffers: Any, batches: Iterable[Any], group: Group
) -> Any:
    """Returns each metric's Σ w·x and Σ w over this process's batches; None without a batch."""
    kind = "an iterable of this process's batches"
    check_has("__iter__", "fddp.evaluate: batches", batches, kind)
    local, (params, buffers) = _alone(group, (params, buffers))
    sums = None
    pending = deque[Any]()
    for batch, rows in _counted(batches):
        group.journal.between()
        placed = _dealt(group, local, batch, rows)
        pending.append(_measured(local, metric_fn, params, buffers, placed, rows))
        # The host adds up the metrics of one batch while the devices compute the next.
        if len(pending) > 1 or local.shares_cores:
            sums = _plus(sums, pending.popleft())
    for metrics in pending:
        sums = _plus(sums, metrics)
    return sums


def _counted(batches: Iterable[Any]) -> Iterator[tuple[Any, int]]:
    """Yields each batch with its number of rows; each of `Stacked` batches counts as one."""
    for batch in batches:
        batch = jax.tree.map(rows_here, batch)
        if isinstance(batch, Stacked):
            yield from ((member, 1) for member in batch.batches)
        else:
            yield batch, count_rows(batch)


@without_context_mesh
def _alone(group: Group, tree: Any) -> tuple[Placement, Any]:
    """Places a replicated tree on the devices of this process only, without copies."""
    tree = group.placement.place(tree, REPLICATED)
    if not group.placement.on_mesh:
        return group.placement, tree
    local = group.make_subgroup([group.rank]).placement
    explicit = local.place(np.zeros(()), REPLICATED).sharding.mesh
    # A metric may slice any dim; JAX refuses that along an Explicit axis.
    mesh = Mesh(explicit.devices, explicit.axis_names)
    placement = mesh_placement(mesh, str(local.axis_name))
    return placement, jax.tree.map(lambda x: on_mesh(x, mesh), tree)


@without_context_mesh
def _dealt(group: Group, local: Placement, batch: Any, rows: int) -> Any:
    """Places a batch on this process's devices: split by rows if they divide, else replicated."""
    check_filled(batch)
    divides = rows > 1 and rows % (group.size // group.processes) == 0
    return local.place(local.retained(batch), local.per_replica if divides else REPLICATED)


@without_context_mesh
@partial(jax.jit, static_argnums=(0, 1))
def _measured(local: Placement, metric_fn: Callable[..., Any], *args: Any) -> Any:
    """Computes a tree of `Weighted`, one for each metric."""
    # The program is of all devices, and may contain jax.shard_map.
    whole_mesh = local._replace(on_mesh=False)
    return as_program(whole_mesh, partial(_metrics, metric_fn))(*args)


def _metrics(
    metric_fn: Callable[..., Any], params: Any, model_state: Any, batch: Any, rows: int | Array
) -> Any:
    if model_state is not None:
        metric_fn = partial(metric_fn, model_state=model_state)
    metrics = metric_fn(params, batch)
    if not jax.tree.leaves(metrics):
        raise TypeError(f"metric_fn must return metrics, floats in a tree, got {metrics!r}.")
    return jax.tree_util.tree_map_with_path(partial(_weighted, rows), metrics, is_leaf=_is_weighted)


def _weighted(rows: int | Array, path: tuple[Any, ...], metric: Any) -> Weighted:
    if not isinstance(metric, Weighted):
        metric = Weighted(metric, rows)
    value, weight = metric
    name = f"metric{jax.tree_util.keystr(path)}"
    if not jnp.issubdtype(getattr(value, "dtype", type(value)), jnp.floating):
        raise TypeError(
            f"{name} must be a float, the mean over the rows of a batch, got "
            f"{getattr(value, 'dtype', type(value).__name__)}: divide a count by the rows, or "
            "return fddp.Weighted(mean, number)."
        )
    if jnp.shape(weight) not in ((), jnp.shape(value)):
        raise ValueError(
            f"{name} weighs {list(jnp.shape(weight))} and is {list(jnp.shape(value))}: give one "
            "number, or one for each element."
        )
    return Weighted(jnp.asarray(value), jnp.asarray(weight))


def _plus(sums: Any, metrics: Any) -> Any:
    """Adds the metrics of a batch to the sums, on the host."""
    exact = jax.tree.map(_weighed, jax.device_get(metrics), is_leaf=_is_weighted)
    if sums is None:
        return exact
    return jax.tree_util.tree_map_with_path(_added, sums, exact)


def _weighed(metric: Weighted) -> Weighted:
    """Returns Σ w·x and Σ w of one batch."""
    value, weight = (np.asarray(x, np.float64) for x in metric)
    total: Any = weight * np.where(weight == 0, 0, value)
    return Weighted(total, weight)


def _added(path: tuple[Any, ...], first: np.ndarray, *terms: np.ndarray) -> np.ndarray:
    """Adds the sums of a metric in order."""
    for x in terms:
        if x.shape != first.shape:
            name = f"metric{jax.tree_util.keystr(path[:-1])}"
            raise ValueError(
                f"{name} must have one shape for all batches, got {list(first.shape)} and "
                f"{list(x.shape)}: take its mean over the rows."
            )
    return sum(terms, first)


def _mean(sums: Weighted) -> Any:
    mean = np.divide(
        sums.value, sums.weight, out=np.full(sums.value.shape, np.nan), where=sums.weight != 0
    )
    if not mean.shape:
        return mean.item()
    return mean


def _is_weighted(x: Any) -> bool:
    return isinstance(x, Weighted)
