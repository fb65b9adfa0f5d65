"""A state that replicas hold apart, put together."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec

from fddp.buckets import Shard, is_shard, of_rows
from fddp.comm import REPLICATED, Group, from_hosted, hosted
from fddp.jax_internals import resharded, without_context_mesh
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
    group = None if group is None else group_of("whole", group)
    whole = iter(_whole(shards, group) if shards else ())
    return treedef.unflatten([next(whole) if is_shard(x) else x for x in leaves])


@without_context_mesh
def _whole(shards: Sequence[Shard], group: Group | None) -> Sequence[Any]:
    parts = [x.parts for x in shards]
    forms = tuple(replace(x, parts=None) for x in shards)
    if isinstance(parts[0], jax.ShapeDtypeStruct):
        return [jax.ShapeDtypeStruct(x.shape, x.parts.dtype) for x in shards]
    if isinstance(parts[0], Tracer):
        if shards[0].ranks is not None:
            raise TypeError(
                "backend 'mpi' has no mesh over which XLA could gather: call fddp.whole outside of jax.jit."
            )
        return _joined(parts, forms)
    if shards[0].ranks is not None:
        # One after another: the rows of a leaf are gone before those of the next come.
        return [_of_all_ranks(x, form, group) for x, form in zip(shards, forms)]
    known = [x.sharding for x in parts if isinstance(x, jax.Array) and isinstance(x.sharding, NamedSharding)]
    if group is not None or len(known) < len(parts):
        group = group_of("whole", group)
        own = group.placement.place(np.zeros(()), REPLICATED).sharding.device_set
        held = next((x.device_set for x in known), own)
        _check(held == own, f"{len(held)} devices hold", group)
        parts = group.placement.place(parts, group.placement.per_replica)
    # In one program: several at once, on devices that share cores, would wait for each other.
    axis = next((x.sharding.spec[0] for x in parts if x.sharding.spec), "")
    return jax.block_until_ready(_gathering(parts[0].sharding.mesh, axis, forms)(parts))


def _of_all_ranks(x: Shard, form: Shard, group: Group | None) -> jax.Array:
    """Gathers an array from the ranks that hold it: those of the group, or those of this one's node."""
    ranks = x.ranks or ()
    if group is None:
        group = _of_ranks(ranks)
    _check(ranks in (group.copy_ranks, group.shard_ranks), f"ranks {list(ranks)} of the job hold", group)
    among = group if ranks == group.global_ranks else _of_ranks(ranks)
    rows = from_hosted(among.all_gather(hosted(x.parts)), x.parts)
    return among.placement.place(_joined([jnp.asarray(rows)], [form])[0], REPLICATED)


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


def _joined(parts: Sequence[jax.Array], forms: Sequence[Shard]) -> list[jax.Array]:
    # JAX cuts and joins no dim that lies along an Explicit axis.
    parts = [resharded(x, REPLICATED) for x in parts]
    return [_mean(x, form) if form.copies else _of_first_node(x, form) for x, form in zip(parts, forms)]


def _of_first_node(parts: jax.Array, form: Shard) -> jax.Array:
    """An array of its parts, of which every node has all."""
    if form.nodes is not None:
        return _of_nodes(parts, form)[0]
    of_devices = (form.cut.parts, *form.cut.of_device(form.shape))
    return form.cut.joined(of_rows(parts, of_devices, form.depth), form.shape)


def _of_nodes(parts: jax.Array, form: Shard) -> jax.Array:
    """The array as each node has it, along a first dim."""
    nodes = np.array(form.nodes)
    width = parts.shape[-1] if form.depth > 1 else 1
    rows = parts.reshape(nodes.size, -1, width)[nodes]
    rows = rows.reshape(len(nodes), -1, *((width,) if form.depth > 1 else ()))
    return jax.vmap(partial(of_rows, shape=form.shape, depth=form.depth))(rows)


def _mean(parts: jax.Array, form: Shard) -> jax.Array:
    """The mean of copies; of whole numbers the first copy."""
    size = prod(form.shape)
    if form.nodes is not None:
        each = _of_nodes(parts, form)
    else:
        each = parts.reshape(parts.size // size, *form.shape) if size else jnp.zeros((1, *form.shape), parts.dtype)
    return jnp.mean(each, axis=0).astype(each.dtype) if jnp.issubdtype(each.dtype, jnp.inexact) else each[0]


@cache
def _gathering(mesh: Any, axis: str, forms: tuple[Shard, ...]) -> Any:
    """A program for each mesh and form, not for each call; what the devices of a replica hold in parts stays so."""
    if all(form.nodes is None or form.copies for form in forms):
        where = [NamedSharding(mesh, form.cut.spec) for form in forms]
        return jax.jit(partial(_joined, forms=forms), out_shardings=where)

    # XLA of JAX 0.11 ends the process where such a program has an array without elements.
    some = [form for form in forms if prod(form.shape)]

    def inside_of_nodes(parts: Sequence[jax.Array]) -> list[jax.Array]:
        def gathered(x: jax.Array, form: Shard) -> jax.Array:
            among = None if form.copies else form.nodes
            return jax.lax.all_gather(x, axis, axis_index_groups=among, tiled=True)

        rest = [form if form.copies else replace(form, nodes=None) for form in some]
        return _joined([*map(gathered, parts, some)], rest)

    own = PartitionSpec(axis)
    run = jax.shard_map(inside_of_nodes, mesh=mesh, in_specs=own, out_specs=REPLICATED, check_vma=False)

    def gather(parts: Sequence[jax.Array]) -> list[jax.Array]:
        made = iter(run([x for x in parts if x.size]))
        return [next(made) if x.size else jnp.zeros(form.shape, x.dtype) for x, form in zip(parts, forms)]

    return jax.jit(gather, out_shardings=NamedSharding(mesh, REPLICATED))
