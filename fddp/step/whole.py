"""A state that replicas hold apart, put together."""

from dataclasses import replace
from functools import cache
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
    return jax.tree.map(lambda x: _whole(own, x) if is_shard(x) else x, tree, is_leaf=is_shard)


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


def _whole(group: Group, shard: Shard) -> Any:
    parts: Any = shard.parts
    if isinstance(parts, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(shard.shape, parts.dtype)
    if isinstance(parts, Tracer) and group.axis_name is None:
        raise TypeError("backend 'mpi' has no mesh, over which XLA could gather: call fddp.whole outside of jax.jit.")
    if isinstance(parts, Tracer):
        return _joined(parts, shard.shape, shard.copies)
    parts = group.placement.place(parts, group.placement.per_replica)
    if group.axis_name is None:
        rows: Any = jnp.asarray(group.all_gather(np.asarray(parts)))
        return group.placement.place(_joined(rows, shard.shape, shard.copies), REPLICATED)
    return _gathering(parts.sharding.mesh)(parts, shard.shape, shard.copies)


def _joined(parts: jax.Array, shape: tuple[int, ...], copies: bool) -> jax.Array:
    if not copies:
        return of_rows(parts, shape)
    each = parts.reshape(-1, *shape)
    return jnp.mean(each, axis=0).astype(each.dtype) if jnp.issubdtype(each.dtype, jnp.inexact) else each[0]


@cache
def _gathering(mesh: Any) -> Any:
    """A program for each mesh, not for each call."""
    return jax.jit(_joined, static_argnums=(1, 2), out_shardings=NamedSharding(mesh, REPLICATED))
