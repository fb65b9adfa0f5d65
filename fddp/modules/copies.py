"""Copies of a state's arrays, for a module that outlives the state."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from fddp.buckets import is_shard
from fddp.jax_internals import context_mesh, replicated_over
from fddp.jaxpr import refuse_deleted
from fddp.sharding import whole


def copied(tree: Any) -> Any:
    """Copies arrays to one device, or to the current mesh, if all are replicated; else in place.

    `fddp.whole` joins shards, and averages copies that differ between replicas. Its results are new
    arrays, and are not copied again.
    """
    refuse_deleted(tree)
    is_new = [is_shard(x) for x in jax.tree.leaves(tree, is_leaf=is_shard)]
    leaves, treedef = jax.tree.flatten(jax.tree.map(jnp.asarray, whole(tree)))
    if all(x.is_fully_replicated for x in leaves):
        mesh = context_mesh()
        leaves = [x.addressable_data(0) for x in leaves]
        if not mesh.empty:
            leaves = [replicated_over(mesh, x) for x in leaves]
    places = [k for k, new in enumerate(is_new) if not new]
    copies = jax.jit(partial(jax.tree.map, jnp.copy))([leaves[k] for k in places])
    for k, copy in zip(places, copies):
        leaves[k] = copy
    return treedef.unflatten(leaves)
