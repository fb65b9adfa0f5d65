"""What a hook remembers: kept for each leaf of the parameters, used for each message."""

from typing import Any

from fddp.buckets import BucketPlan

# What is remembered for each message of a plan; nothing at all without a hook.
Memory = tuple[Any, ...]


def by_message(plan: BucketPlan, hook_state: Any) -> Memory:
    """What is remembered for the leaves in each message.

    Args:
      plan: the messages.
      hook_state: a tree like the parameters, what a hook remembers in the place of each leaf.

    Returns:
      For each message what is remembered for its leaves, in their order.
    """
    leaves = plan.treedef.flatten_up_to(hook_state)
    places = [() if message.bucket is None else plan.buckets[message.bucket].leaves for message in plan.messages]
    return tuple(tuple(leaves[i] for i in place) for place in places)


def by_leaf(plan: BucketPlan, hook_state: Any, memory: Memory) -> Any:
    """The inverse of `by_message`; leaves that do not travel keep what `hook_state` has for them."""
    leaves = plan.treedef.flatten_up_to(hook_state)
    for message, remembered in zip(plan.messages, memory):
        if message.bucket is not None:
            for i, new in zip(plan.buckets[message.bucket].leaves, remembered):
                leaves[i] = new
    return plan.treedef.unflatten(leaves)
