"""A state that replicas hold apart, put together."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import NamedSharding

from fddp.buckets import Shard, is_shard, of_rows
from fddp.comm import REPLICATED, Group
from fddp.runtime import group_of


def whole(tree: Any, *, group: Group | None = None) -> Any:
    """Puts together what replicas hold apart; every rank calls it, as the parts are sent.

    Of what each replica has a copy of its own, under `fddp.local_steps`, it is the mean; of whole numbers the first
    replica's.

    On a mesh it may also be called inside `jax.jit`, where XLA gathers.

    Args:
      tree: a state, or anything else with a `Shard` in it.
      group: the replicas; None: those of `fddp.init()`.

    Returns:
      The tree with whole arrays, equal on all replicas, and nothing else changed.

    Raises:
      TypeError: under MPI, inside `jax.jit`.

    Example:
      >>> import fddp, jax.numpy as jnp, optax
      >>> step = fddp.train_step(lambda w, x: jnp.mean((x - w) ** 2), optax.adam(0.1), shard="optimizer")
      >>> state = step.init(jnp.zeros(3))
      >>> state.opt_state[0].mu, fddp.whole(state).opt_state[0].mu.shape
      (Shard of float32[3], (3,))
    """
    if not any(is_shard(x) for x in jax.tree.leaves(tree, is_leaf=is_shard)):
        return tree
    own = group_of("whole", group)
    leaves, treedef = jax.tree.flatten(tree, is_leaf=is_shard)
    whole = iter(_whole(own, [x for x in leaves if is_shard(x)]))
    return treedef.unflatten([next(whole) if is_shard(x) else x for x in leaves])


def cut(group: Group, x: np.ndarray, like: Shard) -> Shard:
    """A whole array of the host in parts, each where it belongs.

    Args:
      group: the replicas.
      x: the same on every rank.
      like: a shard of such an array.

    Returns:
      The shard.
    """
    count = group.placement.replicas_in_array
    flat = np.zeros(like.parts.size * (group.size // count), x.dtype)
    flat[: x.size] = x.reshape(-1)
    mine = flat if count > 1 else flat.reshape(group.size, -1)[group.rank]
    return replace(like, parts=jax.make_array_from_callback(mine.shape, like.parts.sharding, mine.__getitem__))


def _whole(group: Group, shards: Sequence[Shard]) -> Sequence[Any]:
    parts, forms = [x.parts for x in shards], tuple((x.shape, x.copies) for x in shards)
    if isinstance(parts[0], jax.ShapeDtypeStruct):
        return [jax.ShapeDtypeStruct(x.shape, x.parts.dtype) for x in shards]
    traced = isinstance(parts[0], Tracer)
    if traced and group.axis_name is None:
        raise TypeError("backend 'mpi' has no mesh, over which XLA could gather: call fddp.whole outside of jax.jit.")
    if traced:
        return _joined(parts, forms)
    parts = group.placement.place(parts, group.placement.per_replica)
    if group.axis_name is None:
        rows = [jnp.asarray(group.all_gather(np.asarray(x))) for x in parts]
        return group.placement.place(_joined(rows, forms), REPLICATED)
    # In one program: several at once, on devices that share cores, would wait for each other.
    return jax.block_until_ready(_gathering(parts[0].sharding.mesh)(parts, forms))


def _joined(parts: Sequence[jax.Array], forms: Sequence[tuple[tuple[int, ...], bool]]) -> list[jax.Array]:
    return [_mean(x, shape) if copies else of_rows(x, shape) for x, (shape, copies) in zip(parts, forms)]


def _mean(parts: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Of copies; of whole numbers the first."""
    size = prod(shape)
    each = parts.reshape(parts.size // size, *shape) if size else jnp.zeros((1, *shape), parts.dtype)
    return jnp.mean(each, axis=0).astype(each.dtype) if jnp.issubdtype(each.dtype, jnp.inexact) else each[0]


@cache
def _gathering(mesh: Any) -> Any:
    """A program for each mesh, not for each call."""
    return jax.jit(_joined, static_argnums=1, out_shardings=NamedSharding(mesh, REPLICATED))
