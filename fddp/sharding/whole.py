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

from fddp.buckets import Shard, is_shard, of_rows, part_dims
from fddp.comm import REPLICATED, Group
from fddp.runtime import group_of


def whole(tree: Any, *, group: Group | None = None) -> Any:
    """Puts together what replicas hold apart; every rank calls it, as the parts are sent.

    Of what each replica has a copy of its own, under `fddp.local_steps`, it is the mean; of whole numbers the first
    replica's.

    On a mesh it may also be called inside `jax.jit`, where XLA gathers.

    Args:
      tree: a state, or anything else with a `Shard` in it.
      group: the replicas that hold it; None: as the shards know. A group is needed for parts that are NumPy's arrays.

    Returns:
      The tree with whole arrays, equal on all replicas, and nothing else changed.

    Raises:
      TypeError: under MPI, inside `jax.jit`.
      ValueError: other replicas than those of the group hold it.

    Example:
      >>> import fddp, jax.numpy as jnp, optax
      >>> step = fddp.train_step(lambda w, x: jnp.mean((x - w) ** 2), optax.adam(0.1), shard="optimizer")
      >>> state = step.init(jnp.zeros(3))
      >>> state.opt_state[0].mu, fddp.whole(state).opt_state[0].mu.shape
      (Shard of float32[3], (3,))
    """
    leaves, treedef = jax.tree.flatten(tree, is_leaf=is_shard)
    shards = [x for x in leaves if is_shard(x)]
    whole = iter(_whole(shards, None if group is None else group_of("whole", group)) if shards else ())
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
    dims = part_dims(x.size, group.size, like.depth)
    layers = np.zeros((like.depth, group.size * dims[-1]), x.dtype)
    layers[:, : x.size // like.depth] = x.reshape(like.depth, -1) if x.size else 0
    parts = layers.reshape(like.depth, group.size, dims[-1]).swapaxes(0, 1)
    mine = parts.reshape(like.parts.shape) if count > 1 else parts[group.rank].reshape(dims)
    return replace(like, parts=jax.make_array_from_callback(mine.shape, like.parts.sharding, mine.__getitem__))


def _whole(shards: Sequence[Shard], group: Group | None) -> Sequence[Any]:
    parts = [x.parts for x in shards]
    forms = tuple((x.shape, x.depth, x.copies) for x in shards)
    ranks = shards[0].ranks
    if isinstance(parts[0], jax.ShapeDtypeStruct):
        return [jax.ShapeDtypeStruct(x.shape, x.parts.dtype) for x in shards]
    if isinstance(parts[0], Tracer):
        if ranks is not None:
            raise TypeError(
                "backend 'mpi' has no mesh over which XLA could gather: call fddp.whole outside of jax.jit."
            )
        return _joined(parts, forms)
    if ranks is not None:
        group = _of_ranks(ranks) if group is None else group
        _check(ranks == group.shard_ranks, f"ranks {list(ranks)} of the job hold", group)
        # One after another: the rows of a leaf are gone before those of the next come.
        each = (_joined([jnp.asarray(group.all_gather(np.asarray(x)))], [form]) for x, form in zip(parts, forms))
        return [group.placement.place(x, REPLICATED) for (x,) in each]
    known = [x.sharding for x in parts if isinstance(x, jax.Array) and isinstance(x.sharding, NamedSharding)]
    if group is not None or len(known) < len(parts):
        group = group_of("whole", group)
        own = group.placement.place(np.zeros(()), REPLICATED).sharding.device_set
        held = next((x.device_set for x in known), own)
        _check(held == own, f"{len(held)} devices hold", group)
        parts = group.placement.place(parts, group.placement.per_replica)
    # In one program: several at once, on devices that share cores, would wait for each other.
    return jax.block_until_ready(_gathering(parts[0].sharding.mesh)(parts, forms))


def _check(fits: bool, who: str, group: Group) -> None:
    """Refuses a group that does not hold what is to be put together."""
    if not fits:
        raise ValueError(
            f"fddp.whole: {who} the parts, and the group is another, of {group.size} replicas: leave group= out, for "
            "shards know who holds them."
        )


@cache
def _of_ranks(ranks: tuple[int, ...]) -> Group:
    """The group of some of the job's processes; made once, as a group keeps communicators."""
    world = group_of("whole", None)
    return world if world.global_ranks == ranks else world.subgroup(ranks)


def _joined(parts: Sequence[jax.Array], forms: Sequence[tuple[tuple[int, ...], int, bool]]) -> list[jax.Array]:
    each = zip(parts, forms)
    return [_mean(x, shape) if copies else of_rows(x, shape, depth) for x, (shape, depth, copies) in each]


def _mean(parts: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """The mean of copies; of whole numbers the first copy."""
    size = prod(shape)
    each = parts.reshape(parts.size // size, *shape) if size else jnp.zeros((1, *shape), parts.dtype)
    return jnp.mean(each, axis=0).astype(each.dtype) if jnp.issubdtype(each.dtype, jnp.inexact) else each[0]


@cache
def _gathering(mesh: Any) -> Any:
    """A program for each mesh, not for each call."""
    return jax.jit(_joined, static_argnums=1, out_shardings=NamedSharding(mesh, REPLICATED))
