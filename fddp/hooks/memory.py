"""The memory of a hook: stored for each leaf of the parameters, and used for each message."""

from typing import Any

from fddp.buckets import BucketPlan

# The memory for each message of a plan; empty without a hook.
Memory = tuple[Any, ...]


def by_message(plan: BucketPlan, hook_state: Any) -> Memory:
    """Rearranges a tree of memories, one per parameter, into the memories of each message."""
    leaves = plan.treedef.flatten_up_to(hook_state)
    memory = list[Any]()
    for message in plan.messages:
        if message.bucket is None:
            memory.append(())
        else:
            memory.append(tuple(leaves[leaf] for leaf in plan.buckets[message.bucket].leaves))
    return tuple(memory)


def by_leaf(plan: BucketPlan, hook_state: Any, memory: Memory) -> Any:
    """Returns memories to their tree: the inverse of `by_message`. Unsent leaves keep theirs."""
    leaves = plan.treedef.flatten_up_to(hook_state)
    for message, leaf_memories in zip(plan.messages, memory):
        if message.bucket is not None:
            for i, leaf_memory in zip(plan.buckets[message.bucket].leaves, leaf_memories):
                leaves[i] = leaf_memory
    return plan.treedef.unflatten(leaves)
