"""The memory of hooks under local steps, separate for gradients and pseudo-gradients.

A hook adds the error of a message to the next message of the same leaves: of a pseudo-gradient, at
the next exchange of its fragment. Gradients, which replicas average at first or within an island,
have other units than pseudo-gradients, so the errors of one are never added to the other.
"""

from typing import Any

import jax

from fddp.buckets import BucketPlan, at_least, leaf_layout
from fddp.comm import drop_replica_dim
from fddp.hooks import Hook, Memory, by_message
from fddp.step import Replica, first_hook_state

GRADIENT = "gradient"
CHANGE = "pseudo-gradient"


def first_memory(hook: Hook, leaves: Any, num_parts: int, min_dtype: Any, averages: bool) -> Any:
    """Initializes the memory of one replica for each trained leaf, by kind; () where unused.

    Each replica of an island sends one of `num_parts` parts of a pseudo-gradient, in a dtype that
    holds the range of `min_dtype`. Gradients need memory if `averages` is true: if replicas average
    them, at first or within an island.
    """

    def of_leaf(leaf: jax.ShapeDtypeStruct) -> dict[str, Any]:
        part_dims = leaf_layout(leaf.shape, num_parts).dims
        change = jax.ShapeDtypeStruct(part_dims, at_least(leaf.dtype, min_dtype))
        return {GRADIENT: hook.init(leaf) if averages else (), CHANGE: hook.init(change)}

    return jax.tree.map(of_leaf, leaves)


def memory_forms(replica: Replica, plan: BucketPlan) -> Memory:
    """Shapes and dtypes of one replica's memory, in the order of `in_places`."""
    params = plan.treedef.unflatten(
        [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in plan.leaves]
    )
    memory = jax.eval_shape(lambda: drop_replica_dim(first_hook_state(replica, params)))
    if not jax.tree.leaves(memory):
        return ()
    return in_places(by_message(plan, memory))


def in_places(memory: Memory) -> Memory:
    """Rearranges memory by message, leaf and kind: first all gradients' messages, then all
    pseudo-gradients'."""
    return tuple(
        tuple(leaf[kind] for leaf in leaves) for kind in (GRADIENT, CHANGE) for leaves in memory
    )


def by_messages_and_leaves(memory: Memory) -> Memory:
    """Arranges memory by messages and leaves: the inverse of `in_places`."""
    count = len(memory) // 2
    return tuple(
        tuple({GRADIENT: gradient, CHANGE: change} for gradient, change in zip(gradients, changes))
        for gradients, changes in zip(memory[:count], memory[count:])
    )
