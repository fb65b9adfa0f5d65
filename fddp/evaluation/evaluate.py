"""Metrics of a state over all rows of all ranks, however unequally they lie; the ranks meet once, at the end.

Source: `Metric.sync` in torchmetrics; `pad_shard_unpad` in flax.jax_utils, which pads what is not padded here.
"""

import json
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
    gather_bytes,
    mesh_placement,
    nothing_to_compare,
    verify,
)
from fddp.jax_internals import on_mesh, rows_here, without_context_mesh
from fddp.jaxpr import refuse_deleted
from fddp.losses import Stacked, Weighted, check_callable, count_rows
from fddp.runtime import group_of
from fddp.sharding import whole
from fddp.step import TrainState, check_filled, check_no_state, refuse_transformations


def evaluate(metric_fn: Callable[..., Any], state: Any, batches: Iterable[Any], *, group: Group | None = None) -> Any:
    """Means of metrics over all rows of all ranks, which may have unequally many batches and rows; every rank calls it.

    Nothing is padded and no row counts twice: a rank brings the rows that it has, none if need be. The ranks meet when
    all are through, so that a rank whose metric fails fails on all of them, then.

    Args:
      metric_fn: `metric_fn(params, batch)` → a tree of floats, each a mean over the rows of the batch: numbers, or
        arrays of one shape for all batches. One that is a mean over something else, tokens or the rows of each class,
        says over how many: `fddp.Weighted(mean, number)`; what weighs nothing may be no number. With a model state it
        is called with `model_state=` too; random keys it is not given. It is compiled once for each form of a batch:
        give the same function each time. A loss will do.
      state: a `TrainState`, of any step; or whatever is to stand in the place of its parameters: parameters that you
        keep yourself, a Flax module (`net.module(state)` of `from_nnx`). It is left as it is. Parameters and buffers
        in shards are put together for as long as this takes: a metric computes with whole ones.
      batches: this process's batches; each a tree of arrays with equal first dims. If the rows of one can be dealt out
        among this process's devices they are. Any other tree is taken as it is and counts as one row, and so does each
        of `fddp.Stacked` ones.
      group: the replicas; None: those of `fddp.init()`.

    Returns:
      The tree of means: floats, and NumPy's arrays of float64, summed in float64; the same bits on every rank. Where
      all weigh nothing it is NaN.

    Raises:
      ValueError: no rank has a batch, or rows do not fit, or ranks have other metrics; on every rank.
      TypeError: a metric is no float, batches cannot be iterated; on every rank. Called under a transformation.
      Exception: what `metric_fn` or `batches` raised, on every rank: as it is where all ranks agree, else its words by
        rank.

    Example:
      >>> import fddp, jax.numpy as jnp, optax
      >>> step = fddp.train_step(lambda w, x: jnp.mean((x - w) ** 2), optax.sgd(0.5))
      >>> state = step.init(jnp.zeros(()))
      >>> fddp.evaluate(lambda w, x: {"error": jnp.mean(abs(x - w))}, state, [jnp.ones(8), jnp.full(2, 6.0)])
      {'error': 2.0}
    """
    refuse_transformations()
    group = group_of("evaluate", group)
    held = (state.params, state.model_state) if isinstance(state, TrainState) else (state, None)
    verify(group, "metric_fn or state", lambda: _described(metric_fn, held))
    params, model_state = whole(held, group=group)
    own = verify(group, "evaluation", lambda: _sums(metric_fn, params, model_state, batches, group), nothing_to_compare)
    every = [json.loads(words) for words in gather_bytes(group, _written(own))]
    found = _read(own, every)
    verify(group, "metrics", lambda: described("metric", found[0] if own is None else own))
    return jax.tree.map(_mean, _total(found), is_leaf=_is_weighted)


def _described(metric_fn: Any, held: Any) -> list[str]:
    """The form of what is to be evaluated, or what is wrong with it."""
    check_callable("evaluate", "metric_fn", metric_fn)
    check_no_state("fddp.evaluate: state", held)
    leaves = jax.tree.leaves(held)
    refuse_deleted(leaves)
    for x in leaves:
        if not hasattr(x, "shape") and not isinstance(x, int | float | complex):
            raise TypeError(
                "fddp.evaluate: state must be a TrainState, or a tree of arrays, such as parameters or an nnx module; "
                f"it holds {type(x).__name__}."
            )
    return described("state", held)


def _sums(metric_fn: Callable[..., Any], params: Any, model_state: Any, batches: Iterable[Any], group: Group) -> Any:
    """Σ w·x and Σ w of each metric over this process's batches, in float64; None without a batch."""
    if not isinstance(batches, Iterable):
        raise TypeError(
            f"fddp.evaluate: batches must be an iterable of this process's batches, got {type(batches).__name__}."
        )
    here = _alone(group)
    sums = None
    flying = deque[Any]()
    params, model_state = _own(group, here, (params, model_state))
    for batch, rows in _counted(batches):
        group.journal.between()
        flying.append(_measured(here, metric_fn, params, model_state, _dealt(group, here, batch, rows), rows))
        # The host adds up what one batch gave while the next is computed.
        if len(flying) > 1 or here.shares_cores:
            sums = _plus(sums, flying.popleft())
    return _plus(sums, *flying) if flying else sums


def _counted(batches: Iterable[Any]) -> Iterator[tuple[Any, int]]:
    """Each batch, and how many rows it counts as: a `Stacked` one as 1, even if its arrays have equally many rows."""
    for batch in batches:
        batch = jax.tree.map(rows_here, batch)
        if isinstance(batch, Stacked):
            yield from ((one, 1) for one in batch.batches)
        else:
            yield batch, count_rows(batch)


def _alone(group: Group) -> Placement:
    """The devices of this process, for programs of its own; under MPI all programs are."""
    if not group.placement.on_mesh:
        return group.placement
    local = group.make_subgroup([group.rank]).placement
    mesh = local.place(np.zeros(()), REPLICATED).sharding.mesh
    # A metric may cut any dim, which JAX refuses along an Explicit axis.
    return mesh_placement(Mesh(mesh.devices, mesh.axis_names), str(local.axis_name))


@without_context_mesh
def _own(group: Group, here: Placement, tree: Any) -> Any:
    """A tree that is equal on all replicas, on this process's own devices alone; nothing is copied or sent."""
    tree = group.placement.place(tree, REPLICATED)
    if not here.on_mesh:
        return tree
    mesh = here.place(np.zeros(()), REPLICATED).sharding.mesh
    return jax.tree.map(lambda x: on_mesh(x, mesh), tree)


@without_context_mesh
def _dealt(group: Group, here: Placement, batch: Any, rows: int) -> Any:
    """A batch on this process's devices: dealt out among its replicas, or whole on each where that cannot be."""
    if rows < 2:
        check_filled(batch)
    dealt = rows > 1 and rows % (group.size // group.processes) == 0
    return here.place(batch, here.per_replica if dealt else REPLICATED)


@without_context_mesh
@partial(jax.jit, static_argnums=(0, 1))
def _measured(here: Placement, metric_fn: Callable[..., Any], *args: Any) -> Any:
    """A tree of `Weighted`, one for each metric."""
    whole_mesh = here._replace(on_mesh=False)  # the program is of all devices: it may hold jax.shard_map
    return as_program(whole_mesh, partial(_metrics, metric_fn))(*args)


def _metrics(metric_fn: Callable[..., Any], params: Any, model_state: Any, batch: Any, rows: int | Array) -> Any:
    metrics = metric_fn(params, batch, **({} if model_state is None else {"model_state": model_state}))
    if not jax.tree.leaves(metrics):
        raise TypeError(f"metric_fn must return metrics, floats in a tree, got {metrics!r}.")
    return jax.tree_util.tree_map_with_path(partial(_weighted, rows), metrics, is_leaf=_is_weighted)


def _weighted(rows: int | Array, path: Any, metric: Any) -> Weighted:
    value, weight = metric if isinstance(metric, Weighted) else (metric, rows)
    name = f"metric{jax.tree_util.keystr(path)}"
    if not jnp.issubdtype(getattr(value, "dtype", type(value)), jnp.floating):
        raise TypeError(
            f"{name} must be a float, the mean over the rows of a batch, got "
            f"{value.dtype if hasattr(value, 'dtype') else type(value).__name__}: divide a count by the rows, or "
            "return fddp.Weighted(mean, number)."
        )
    if jnp.shape(weight) not in ((), jnp.shape(value)):
        raise ValueError(
            f"{name} weighs {list(jnp.shape(weight))} and is {list(jnp.shape(value))}: give one number, or one for "
            "each element."
        )
    return Weighted(jnp.asarray(value), jnp.asarray(weight))


def _written(sums: Any) -> bytes:
    """Sums in words, with their tree: a rank without a batch has never seen what a metric is."""
    if sums is None:
        return b"null"
    leaves, tree = jax.tree.flatten(sums, is_leaf=_is_weighted)
    try:
        nodes = tree.serialize_using_proto().hex()
    except ValueError:  # a class of the user's
        nodes = None
    return json.dumps({"tree": nodes, "leaves": [[_words(x) for x in pair] for pair in leaves]}).encode()


def _read(own: Any, every: list[Any]) -> list[Any]:
    """The sums of all ranks that have some; what comes from another process is never run, as pickles are."""
    told = [one for one in every if one is not None]
    if not told:
        raise ValueError("fddp.evaluate: no rank has a batch; give one of them at least one.")
    if len(told) < len(every) and None in [one["tree"] for one in told]:
        raise ValueError(
            "fddp.evaluate: a rank has no batch, and the tree of the metrics has a class, or keys, that cannot be told "
            "to it: return them as a dict with strings for keys, a list or a tuple."
        )
    known = jax.tree.structure(own, is_leaf=_is_weighted)
    registry = jax.tree_util.default_registry
    found = list[Any]()
    for one in told:
        nodes = one["tree"] and bytes.fromhex(one["tree"])
        tree = jax.tree_util.PyTreeDef.deserialize_using_proto(registry, nodes) if nodes else known
        found.append(tree.unflatten([Weighted(*map(_array, pair)) for pair in one["leaves"]]))
    return found


def _words(x: np.ndarray) -> list[Any]:
    return [list(x.shape), x.tobytes().hex()]


def _array(words: list[Any]) -> Any:
    shape, data = words
    return np.frombuffer(bytes.fromhex(data), np.float64).reshape(shape)


def _plus(sums: Any, *measured: Any) -> Any:
    """Adds what batches gave to the sums, on the host."""
    exact = [jax.tree.map(_weighed, jax.device_get(one), is_leaf=_is_weighted) for one in measured]
    return _total([*([] if sums is None else [sums]), *exact])


def _weighed(metric: Weighted) -> Weighted:
    """Σ w·x and Σ w of one batch."""
    value, weight = (np.asarray(x, np.float64) for x in metric)
    total: Any = weight * np.where(weight == 0, 0, value)
    return Weighted(total, weight)


def _total(sums: list[Any]) -> Any:
    """The sum of trees, in their order."""
    return jax.tree_util.tree_map_with_path(_added, *sums)


def _added(path: Any, first: np.ndarray, *others: np.ndarray) -> np.ndarray:
    for x in others:
        if x.shape != first.shape:
            name = f"metric{jax.tree_util.keystr(path[:-1])}"
            raise ValueError(
                f"{name} must have one shape for all batches, got {list(first.shape)} and {list(x.shape)}: take its "
                "mean over the rows."
            )
    return sum(others, first)


def _mean(sums: Weighted) -> Any:
    mean = np.divide(sums.value, sums.weight, out=np.full(sums.value.shape, np.nan), where=sums.weight != 0)
    return mean if mean.shape else mean.item()


def _is_weighted(x: Any) -> bool:
    return isinstance(x, Weighted)
