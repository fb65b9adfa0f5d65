"""Joins the arrays that replicas hold in parts."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jaxtyping import PyTree

from fddp.buckets import Shard, map_shards, shards_of
from fddp.comm import REPLICATED, Group, device_cache, from_hosted, hosted
from fddp.jax_internals import resharded, without_context_mesh
from fddp.runtime import group_of
from fddp.step import finished


def whole(tree: PyTree, *, group: Group | None = None) -> Any:
    """Joins the arrays that replicas hold in parts; every rank calls it, since parts are sent.

    On a mesh the function also works inside `jax.jit`, where XLA gathers the parts.

    Args:
      tree: a state, or any tree with leaves of type `Shard`.
      group: the replicas that hold the parts. None: those named by the shards, or, for parts that
        are NumPy arrays, the group of `fddp.init`.

    Returns:
      The tree with whole arrays, equal on all replicas, in place of the shards.

    Raises:
      TypeError: under MPI, inside `jax.jit`.
      ValueError: another group holds the parts.

    Example:
      >>> import fddp, jax.numpy as jnp, optax
      >>> loss = lambda w, x: jnp.mean((x - w) ** 2)
      >>> step = fddp.train_step(loss, optax.adam(0.1), shard="optimizer")
      >>> state = step.init(jnp.zeros(3))
      >>> state.opt_state[0].mu, fddp.whole(state).opt_state[0].mu.shape
      (Shard of float32[3], (3,))
    """
    if group is not None:
        group = group_of("whole", group)
    tree = finished(tree)
    arrays = iter(_whole(shards_of(tree), group))
    return map_shards(lambda x: next(arrays), tree)


@without_context_mesh
def _whole(shards: Sequence[Shard], group: Group | None) -> Sequence[Any]:
    if not shards:
        return []
    shard_parts = [x.parts for x in shards]
    forms = tuple(replace(x, parts=None) for x in shards)
    if isinstance(shard_parts[0], jax.ShapeDtypeStruct):
        return [jax.ShapeDtypeStruct(x.shape, x.parts.dtype) for x in shards]
    if isinstance(shard_parts[0], Tracer):
        if shards[0].layout.ranks is not None:
            raise TypeError(
                "backend 'mpi' has no mesh over which XLA could gather: call fddp.whole outside "
                "of jax.jit."
            )
        return _joined(shard_parts, forms)
    if shards[0].layout.ranks is not None:
        # One leaf at a time, so that the gathered rows of only one leaf use memory.
        return [_of_all_ranks(x, form, group) for x, form in zip(shards, forms)]
    shardings = [
        x.sharding
        for x in shard_parts
        if isinstance(x, jax.Array) and isinstance(x.sharding, NamedSharding)
    ]
    if group is not None or len(shardings) < len(shard_parts):
        group = group_of("whole", group)
        devices = group.placement.place(np.zeros(()), REPLICATED).sharding.device_set
        holders = next((x.device_set for x in shardings), devices)
        _check(holders == devices, f"{len(holders)} devices hold", group)
        shard_parts = group.placement.place(shard_parts, group.placement.per_replica)
    # A single program: several at once would wait for each other on devices that share cores.
    mesh = shard_parts[0].sharding.mesh
    with _recorded(mesh, group):
        return jax.block_until_ready(_gathering(mesh, forms)(shard_parts))


def _recorded(mesh: Mesh, group: Group | None) -> AbstractContextManager[Any]:
    """Records the gather of several processes in the journal."""
    processes = len({device.process_index for device in mesh.devices.flat})
    if processes == 1:
        return nullcontext()
    journal = group_of("whole", group).journal
    with journal.inside("fddp.whole"):
        return journal.call("gather", processes)


def _of_all_ranks(x: Shard, form: Shard, group: Group | None) -> jax.Array:
    """Gathers an array from the ranks that hold its parts: the group's, or others of the job."""
    ranks = x.layout.ranks or ()
    if group is None:
        group = _of_ranks(ranks)
    _check(ranks == group.global_ranks, f"ranks {list(ranks)} of the job hold", group)
    with group.journal.inside("fddp.whole"):
        rows = from_hosted(group.all_gather(hosted(x.parts)), x.parts)
    return group.placement.place(_joined([jnp.asarray(rows)], [form])[0], REPLICATED)


def _check(fits: bool, holders: str, group: Group) -> None:
    """Refuses a group that does not hold the parts."""
    if not fits:
        raise ValueError(
            f"fddp.whole: {holders} the parts, and the group is another, of {group.size} replicas: "
            "leave group= out, because shards know their replicas."
        )


@device_cache
def _of_ranks(ranks: tuple[int, ...]) -> Group:
    """The group of these processes of the job; cached, since a group holds communicators."""
    world = group_of("whole", None)
    return world if world.global_ranks == ranks else world.subgroup(ranks)


def _joined(shard_parts: Sequence[jax.Array], forms: Sequence[Shard]) -> list[jax.Array]:
    # JAX cannot reshape a dim that lies along an Explicit axis.
    shard_parts = [resharded(x, REPLICATED) for x in shard_parts]
    return [form.layout.join(x) for x, form in zip(shard_parts, forms)]


@device_cache
def _gathering(mesh: Mesh | AbstractMesh, forms: tuple[Shard, ...]) -> Any:
    """Makes the program that joins parts."""
    return jax.jit(partial(_joined, forms=forms), out_shardings=NamedSharding(mesh, REPLICATED))
