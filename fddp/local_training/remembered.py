"""The memory of hooks where replicas train alone: of gradients and of pseudo-gradients, each for itself.

What a message loses belongs to that message, and comes back when the next one of the same numbers is sent: of a
fragment's pseudo-gradient when this fragment is sent again. Gradients that replicas average before they train alone, or
inside of an island, have other units, so what these lose is never added to a pseudo-gradient.
"""

from typing import Any

import jax
import jax.numpy as jnp

from fddp.buckets import BucketPlan, at_least, depth_of, own_part
from fddp.comm import drop_replica_dim
from fddp.hooks import Hook, Memory, by_message
from fddp.step import Replica

GRADIENT = "gradient"
CHANGE = "pseudo-gradient"


def first_memory(hook: Hook, forms: Any, parts: int, least: Any, averages: bool) -> Any:
    """Makes the first memory of one replica.

    Args:
      hook: sums gradients and pseudo-gradients.
      forms: the forms of trained leaves.
      parts: number of parts of a leaf of which each replica of an island sends one.
      least: floats of a pseudo-gradient are summed in a dtype that holds the numbers of this one.
      averages: whether gradients are averaged, too, now and then or inside of an island.

    Returns:
      A tree like `forms`, with a memory for each kind in place of a leaf; () for what nothing is remembered of.
    """

    def of_leaf(leaf: jax.ShapeDtypeStruct) -> dict[str, Any]:
        depth = depth_of(leaf.size, leaf.shape, parts)
        part = jax.eval_shape(lambda x: own_part(x, parts, jnp.int32(0), depth), leaf)
        change = jax.ShapeDtypeStruct(part.shape, at_least(leaf.dtype, least))
        return {GRADIENT: hook.init(leaf) if averages else (), CHANGE: hook.init(change)}

    return jax.tree.map(of_leaf, forms)


def memory_forms(replica: Replica, plan: BucketPlan) -> Memory:
    """The forms of one replica's memory, by the places that messages have in it."""
    params = plan.treedef.unflatten([jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in plan.leaves])
    memory = jax.eval_shape(lambda: drop_replica_dim(replica.remembered(params)))
    return in_places(by_message(plan, memory)) if jax.tree.leaves(memory) else ()


def in_places(memory: Memory) -> Memory:
    """Arranges memory by the places that messages have in it.

    Args:
      memory: for each message of the plan, for each leaf, a memory for each kind.

    Returns:
      For each message what it remembers of gradients, and behind these for each what it remembers of pseudo-gradients.
    """
    return tuple(tuple(leaf[kind] for leaf in leaves) for kind in (GRADIENT, CHANGE) for leaves in memory)


def by_kind(places: Memory) -> Memory:
    """Arranges memory by messages and leaves: the inverse of `in_places`."""
    count = len(places) // 2
    return tuple(
        tuple({GRADIENT: gradient, CHANGE: change} for gradient, change in zip(gradients, changes))
        for gradients, changes in zip(places[:count], places[count:])
    )
