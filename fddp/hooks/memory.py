"""The memory of a hook: kept for each leaf of the parameters, used for each message."""

from typing import Any

from fddp.buckets import BucketPlan

# The memory for each message of a plan; empty without a hook.
Memory = tuple[Any, ...]


def by_message(plan: BucketPlan, hook_state: Any) -> Memory:
    """Arranges a hook's memory by messages.

    Args:
      plan: the plan of the messages.
      hook_state: a tree like the parameters, with the memory for a leaf in its place.

    Returns:
      For each message the memory for its leaves, in their order.
    """
    leaves = plan.treedef.flatten_up_to(hook_state)
    places = [() if message.bucket is None else plan.buckets[message.bucket].leaves for message in plan.messages]
    return tuple(tuple(leaves[i] for i in place) for place in places)


def by_leaf(plan: BucketPlan, hook_state: Any, memory: Memory) -> Any:
    """Arranges a hook's memory by leaves: the inverse of `by_message`; leaves that do not travel keep their memory."""
    leaves = plan.treedef.flatten_up_to(hook_state)
    for message, remembered in zip(plan.messages, memory):
        if message.bucket is not None:
            for i, new in zip(plan.buckets[message.bucket].leaves, remembered):
                leaves[i] = new
    return plan.treedef.unflatten(leaves)
