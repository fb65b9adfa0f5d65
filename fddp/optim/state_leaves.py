"""Maps functions over the leaves of an optimizer's state, by the parameters they belong to."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec
from jaxtyping import PyTree


def optimizer_laid_out(
    axes: tuple[str, ...], opt_state: PyTree, params: PyTree, param_specs: Any
) -> Any:
    """Constrains the layout of an optimizer's state along the mesh axes inside a replica."""
    if not axes:
        return opt_state

    def put(x: Any, param: Any, spec: PartitionSpec) -> Any:
        if masked(x):
            return x
        if jnp.shape(x) != jnp.shape(param):
            spec = PartitionSpec()
        return jax.lax.with_sharding_constraint(x, spec)

    return map_state(
        lambda subtree: jax.tree.map(put, subtree, params, param_specs, is_leaf=masked),
        lambda x: jax.lax.with_sharding_constraint(x, PartitionSpec()),
        params,
        opt_state,
    )


def map_state(
    map_params: Callable[..., Any], map_leaf: Callable[..., Any], params: PyTree, *states: Any
) -> Any:
    """Maps a function over the states' subtrees like `params`, another over their other leaves."""
    # `optax.tree_map_params` calls the optimizer with placeholders, which break functions that
    # label parameters by their path. So subtrees are recognized by structure.

    def like_params(subtree: Any) -> bool:
        leaves, treedef = jax.tree.flatten(subtree, is_leaf=masked)
        try:
            matches = treedef.flatten_up_to(params)
        except ValueError:
            return False
        alike = all(
            masked(x) or jax.tree_util.all_leaves([param]) for x, param in zip(leaves, matches)
        )
        # If the parameters are a single array, every leaf has their structure, even a step count.
        return alike and (
            subtree is not leaves[0]
            or masked(subtree)
            or jnp.issubdtype(subtree.dtype, jnp.inexact)
        )

    def map_subtree(*subtrees: Any) -> Any:
        if like_params(subtrees[0]):
            return map_params(*subtrees)
        return map_leaf(*subtrees)

    return jax.tree.map(map_subtree, *states, is_leaf=like_params)


def masked(x: Any) -> bool:
    """True for a node of an optimizer's state in place of parameters it does not train."""
    return isinstance(x, optax.MaskedNode)


def nodes_of(kind: Any, tree: PyTree) -> list[Any]:
    """Lists the outer nodes of a type in a tree."""
    nodes = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, kind))
    return [x for x in nodes if isinstance(x, kind)]
