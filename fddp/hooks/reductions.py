"""Sums messages over replicas: plainly, or by a hook.

Source: `register_comm_hook` in PyTorch.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, PyTree, Shaped, UInt32

from fddp.buckets import BucketPlan, Message, by_device
from fddp.comm import Communicator, Placement, add_bytes, as_uint32, count_aside, count_bytes
from fddp.hooks.hook import GradBucket, Hook, State
from fddp.hooks.touched_rows import sum_of_table

# The memory for each message of a plan; empty without a hook.
Memory = tuple[Any, ...]


# (comm, message, memory) → (sum, new memory)
Reduce: TypeAlias = Callable[[Communicator, Shaped[Array, " n"], Any], tuple[Array, Any]]


def all_reduced(comm: Communicator, x: Shaped[Array, " n"]) -> Shaped[Array, " n"]:
    """Sums a message."""
    return comm.all_reduce(x)


def scattered(comm: Communicator, x: Shaped[Array, " n"]) -> Shaped[Array, " m"]:
    """Sums a message; returns this replica's part of the sum."""
    return comm.reduce_scatter(x.reshape(comm.size, -1))


def gathered(comm: Communicator, x: Shaped[Array, " n"]) -> Shaped[Array, " m"]:
    """Joins the messages of all replicas."""
    return comm.all_gather(x).reshape(-1)


def plain(collective: Callable[[Communicator, Array], Array], rounds: int = 1) -> Reduce:
    """Makes a reduction without memory of a collective, part by part in a loop of `rounds`."""

    def apply(comm: Communicator, message: Array, memory: Any) -> tuple[Array, Any]:
        if rounds == 1:
            return collective(comm, message), memory
        parts = message.reshape(rounds, -1)
        return jax.lax.map(partial(collective, comm), parts).reshape(-1), memory

    return apply


class Reduction(NamedTuple):
    """The sum of one message over replicas."""

    name: str = "tail"
    contents: str = "loss and metrics"
    apply: Reduce = plain(all_reduced)
    memory: int | None = None
    """Index into `Memory`, for a hook. Messages with one index share it, one after the other."""
    rounds: int = 1
    """Number of equal parts of the message that are summed one by one, as a loop computes them."""

    @property
    def title(self) -> str:
        """Name and contents."""
        return f"{self.name} ({self.contents})" if self.contents else self.name


def reductions(plan: BucketPlan, hook: Hook | None) -> tuple[Reduction, ...]:
    """Returns the reduction of each message of a plan, by `hook` or plainly."""

    def reduction_of(index: int, message: Message) -> Reduction:
        if message.bucket is None:
            return Reduction()
        bucket = plan.buckets[message.bucket]
        contents, *more = bucket.names
        if more:
            contents += f" and {len(more)} more"
        if bucket.rows:
            return Reduction(message.name, contents, partial(sum_of_table, bucket.rows))
        rounds = bucket.rounds
        if hook is None:
            return Reduction(message.name, contents, plain(all_reduced, rounds), rounds=rounds)
        leaves = plan.leaves_of(bucket)
        forms = tuple(jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves)
        return Reduction(message.name, contents, partial(hooked, hook, forms), index, rounds)

    return tuple(reduction_of(index, message) for index, message in enumerate(plan.messages))


def per_device(placement: Placement, reduction: Reduction) -> Reduction:
    """Runs a reduction on each device of a replica, on that device's part of the message."""
    axes = placement.other_axes
    if not axes:
        return reduction

    def reduce_parts(comm: Communicator, message: Array, memory: PyTree) -> Array:
        spec = PartitionSpec(axes)
        return by_device(axes, lambda x: reduction.apply(comm, x, memory)[0], spec, spec)(message)

    def apply(comm: Communicator, message: Array, memory: PyTree) -> tuple[Array, Any]:
        total, nbytes = count_aside(comm, reduce_parts, message, memory)
        add_bytes(comm, placement.devices_of_replica * nbytes)
        return total, memory

    return reduction._replace(apply=apply)


def summed(
    comm: Communicator,
    reduction: Reduction,
    message: Shaped[Array, " n"],
    memory: PyTree,
) -> tuple[Shaped[Array, " n"], Any, UInt32[Array, ""]]:
    """Sums one message over replicas, inside a program."""
    (total, new), nbytes = count_bytes(comm, reduction.apply, message, memory)
    return total, new, as_uint32(reduction.rounds * nbytes)


def all_finite(sums: Iterable[Shaped[Array, " n"]]) -> Bool[Array, ""]:
    """True if all sums of hooks are finite, on all replicas alike: they have equal sums.

    Of a scattered sum they have different parts, but a hook that scatters has no memory that
    depends on it.
    """
    finite = jnp.bool_(True)
    for total in sums:
        finite = jnp.logical_and(finite, jnp.all(jnp.isfinite(total)))
    return finite


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


def hooked(
    hook: Hook,
    leaves: tuple[jax.ShapeDtypeStruct, ...],
    comm: Communicator,
    buffer: Shaped[Array, " n"],
    memory: State,
) -> tuple[Array, State]:
    """Sums a bucket by a hook; raises TypeError unless the hook returns a pair."""
    result = hook.apply(comm, GradBucket(buffer, leaves), memory)
    if not isinstance(result, tuple) or len(result) != 2:
        raise TypeError(f"{hook.name}: apply must return (sum, memory), got {result!r:.60}.")
    return result
