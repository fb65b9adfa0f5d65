"""Sums messages over replicas: plainly, or by a hook.

Source: `register_comm_hook` in PyTorch.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, PyTree, Shaped, UInt32

from fddp.buckets import BucketPlan, Message, by_device
from fddp.comm import (
    Communicator,
    Placement,
    add_bytes,
    as_uint32,
    count_aside,
    count_bytes,
)
from fddp.hooks.hook import GradBucket, Hook, State
from fddp.hooks.table_rows import sum_of_table

# The memory for each message of a plan; empty without a hook.
Memory = tuple[Any, ...]


class Hooked(NamedTuple):
    """A sum by a hook, by rows of a table, or on each device of a replica."""

    apply: Callable[[Communicator, Shaped[Array, " n"], Any], tuple[Array, Any]]
    """(comm, message, memory) → (sum, new memory)."""
    memory: int | None = None
    """Index into `Memory`. Messages with one index share it, one after the other."""


class Collective(NamedTuple):
    """A plain collective, for which a group may have a faster way between programs."""

    kind: Literal["all_reduce", "reduce_scatter", "all_gather"] = "all_reduce"
    """A sum, a shard of the sum per replica, or the messages of all replicas."""
    replicas: int = 1
    """Number of replicas, for a gather."""
    rounds: int = 1
    """Number of equal parts of the message that one program sums one by one, as a loop does."""

    def result_form(self, message: Array | jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        """Shape and dtype of the result for one replica's message."""
        factors = {"reduce_scatter": (1, self.replicas), "all_gather": (self.replicas, 1)}
        times, divisor = factors.get(self.kind, (1, 1))
        return jax.ShapeDtypeStruct((message.shape[0] * times // divisor,), message.dtype)


class Reduction(NamedTuple):
    """The sum of one message over replicas."""

    name: str = "tail"
    contents: str = "loss and metrics"
    collective: Collective = Collective()
    hooked: Hooked | None = None
    """The sum in place of the plain collective."""

    @property
    def title(self) -> str:
        """Name and contents."""
        return f"{self.name} ({self.contents})" if self.contents else self.name

    @property
    def memory(self) -> int | None:
        """Index of the hook's memory."""
        return self.hooked and self.hooked.memory


PLAIN = Reduction()

# Each collective as a function of one replica's flat message.
COLLECTIVES: dict[str, Callable[[Communicator, Array], Array]] = {
    "all_reduce": lambda comm, x: comm.all_reduce(x),
    "reduce_scatter": lambda comm, x: comm.reduce_scatter(x.reshape(comm.size, -1)),
    "all_gather": lambda comm, x: comm.all_gather(x).reshape(-1),
}


def reductions(plan: BucketPlan, hook: Hook | None) -> tuple[Reduction, ...]:
    """Returns the reduction of each message of a plan, by `hook` or plainly."""

    def reduction_of(index: int, message: Message) -> Reduction:
        if message.bucket is None:
            return PLAIN
        bucket = plan.buckets[message.bucket]
        contents, *more = bucket.names
        if more:
            contents += f" and {len(more)} more"
        reduction = Reduction(message.name, contents, Collective(rounds=bucket.rounds))
        if bucket.rows:
            return reduction._replace(hooked=Hooked(partial(sum_of_table, bucket.rows)))
        if hook is None:
            return reduction
        leaves = plan.leaves_of(bucket)
        forms = tuple(jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves)
        return reduction._replace(hooked=Hooked(partial(_hooked, hook, forms), index))

    return tuple(reduction_of(index, message) for index, message in enumerate(plan.messages))


def per_device(placement: Placement, reduction: Reduction) -> Reduction:
    """Runs a reduction on each device of a replica, on that device's part of the message."""
    axes = placement.other_axes
    if not axes:
        return reduction
    reduce = _reducing(reduction)

    def reduce_parts(comm: Communicator, message: Array, memory: PyTree) -> Array:
        spec = PartitionSpec(axes)
        return by_device(axes, lambda x: reduce(comm, x, memory)[0], spec, spec)(message)

    def apply(comm: Communicator, message: Array, memory: PyTree) -> tuple[Array, Any]:
        total, nbytes = count_aside(comm, reduce_parts, message, memory)
        add_bytes(comm, placement.devices_of_replica * nbytes)
        return total, memory

    return reduction._replace(hooked=Hooked(apply, reduction.memory))


def summed(
    comm: Communicator,
    reduction: Reduction,
    message: Shaped[Array, " n"],
    memory: PyTree,
) -> tuple[Shaped[Array, " n"], Any, UInt32[Array, ""]]:
    """Sums one message over replicas, inside a program.

    Returns the sum, the new memory, and the bytes that each replica sent (saturated at 2³² − 1).
    """
    (total, new), nbytes = count_bytes(comm, _reducing(reduction), message, memory)
    return total, new, as_uint32(reduction.collective.rounds * nbytes)


def _reducing(reduction: Reduction) -> Callable[..., tuple[Array, Any]]:
    """Returns the function (comm, message, memory) → (sum, new memory) of a reduction."""
    if reduction.hooked:
        return reduction.hooked.apply
    plain = COLLECTIVES[reduction.collective.kind]
    if reduction.collective.rounds > 1:
        plain = partial(_round_by_round, plain, reduction.collective.rounds)
    return lambda comm, message, memory: (plain(comm, message), memory)


def _round_by_round(
    plain: Callable[[Communicator, Array], Array],
    rounds: int,
    comm: Communicator,
    message: Shaped[Array, " n"],
) -> Shaped[Array, " n"]:
    """Sums the parts of a message in a loop; `fused_loops` merges it with the producing loop."""
    return jax.lax.map(partial(plain, comm), message.reshape(rounds, -1)).reshape(-1)


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


def _hooked(
    hook: Hook,
    leaves: tuple[jax.ShapeDtypeStruct, ...],
    comm: Communicator,
    buffer: Shaped[Array, " n"],
    memory: State,
) -> tuple[Array, State]:
    return hook.apply(comm, GradBucket(buffer, leaves), memory)
