"""One replica's parts of the leaves, and how they travel."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial, reduce
from typing import Any, Literal, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Array

from fddp.buckets import (
    BucketPlan,
    DeviceCut,
    Message,
    Messages,
    by_device,
    cut_as_leaf,
    device_cut,
    is_shard,
    own_part,
    pack,
    pack_rows,
    plan_of_parts,
    take_tail,
    true_numbers,
    unpack,
    unpack_rows,
    whole_forms,
)
from fddp.comm import Communicator, as_uint32, count_bytes
from fddp.hooks import GradRows, Reduction, on_each_device, reductions
from fddp.losses import added
from fddp.schedules import by_bucket, more_sent
from fddp.sharding.parts_update import run_on_parts
from fddp.step import Facts, Replica, StepInfo, TrainState

Function = TypeVar("Function", bound=Callable[..., Any])


class Kept(NamedTuple):
    """A replica's values when its last gradients have been sent."""

    own: Any
    """The buffers that it keeps."""
    nbytes: Any
    """Bytes that it has sent to make the gradients, for each bucket; () for none."""
    broken: Any
    """Marks its own gradients that were not all finite, where that is asked."""
    sums: tuple[tuple[Array, ...], ...]
    """Its parts of the sums that came back before."""


@dataclass(frozen=True)
class Parts:
    """One replica's parts of the leaves, and how they travel."""

    replica: Replica
    facts: Facts
    """Those of the step."""
    read_in: Mapping[int, np.dtype] = field(default_factory=dict)
    """The dtype of fewer bits in which the loss reads a leaf, for each leaf that is gathered so."""

    @property
    def plan(self) -> BucketPlan:
        """The buckets, of whole leaves, or of what a device of a replica holds of them."""
        return self.facts.plan

    @cached_property
    def of_gathers(self) -> BucketPlan:
        """The same buckets of parts of parameters, each in as few bits as the loss reads of what is in it."""
        plan = self.of_parts
        leaves = tuple(replace(leaf, dtype=self._read(i)) for i, leaf in enumerate(plan.leaves))
        dtypes = [np.dtype(jnp.result_type(*map(self._read, bucket.leaves))) for bucket in plan.buckets]
        buckets = tuple(replace(bucket, dtype=dtype) for bucket, dtype in zip(plan.buckets, dtypes))
        return replace(plan, leaves=leaves, buckets=buckets)

    def _read(self, leaf: int) -> np.dtype:
        return self.read_in.get(leaf, self.plan.leaves[leaf].dtype)

    @cached_property
    def of_parts(self) -> BucketPlan:
        """The same buckets, of parts."""
        return plan_of_parts(self.plan)

    @cached_property
    def cuts(self) -> list[DeviceCut]:
        """The parts of each leaf that the devices of a replica hold."""
        placement = self.replica.group.placement
        leaves = jax.tree.leaves(self.facts.state.params)
        return [device_cut(placement.view, placement.spec(x), x.shape) for x in leaves]

    @property
    def scatters(self) -> tuple[Reduction, ...]:
        """The sums of gradients: each replica gets its parts, and all of loss and metrics."""
        group = self.replica.group
        hook = self.replica.options.hook

        def scatter(message: Message, one: Reduction) -> Reduction:
            if message.bucket is None:
                return one
            whole = None if one.apply is None else partial(self._of_whole_leaves, message.bucket, one.apply)
            rows = self.replica.scatter and partial(self._of_rows, message.bucket, self.replica.scatter)
            # A hook speaks with all replicas, in its own way.
            level = "shards" if one.apply is None else "all"
            one = one._replace(collective="reduce_scatter", replicas=group.parts, apply=rows or whole, level=level)
            return on_each_device(group.placement, one)

        return tuple(map(scatter, self.plan.messages, reductions(self.plan, hook, None)))

    def _of_rows(
        self, bucket: int, scatter: Callable[..., tuple[Array, Any]], comm: Communicator, message: Array, memory: Any
    ) -> tuple[Array, Any]:
        """This replica's part of a bucket, by a hook that is given parts."""
        plan, of_parts = self.only(bucket)
        numbers = plan.buckets[0].leaves

        def rows_of(leaves: Sequence[Array]) -> Array:
            tree = plan.treedef.unflatten(dict(zip(numbers, leaves)).get(i) for i in range(len(plan.leaves)))
            return pack_rows(of_parts, comm.size, tree)[0].reshape(comm.size, -1)

        def leaves_of(rows: Array) -> list[Array]:
            leaves = plan.treedef.flatten_up_to(unpack_rows(of_parts, plan, comm.size, (rows.reshape(-1),)))
            return [leaves[i] for i in numbers]

        forms = tuple(jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in plan.travelling(plan.buckets[0]))
        true = true_numbers(plan, of_parts, comm.size)
        rows = GradRows(message.reshape(comm.size, -1), forms, rows_of, leaves_of, true, bucket)
        return scatter(comm, rows, memory)

    def _of_whole_leaves(
        self, bucket: int, apply: Callable[..., tuple[Array, Any]], comm: Communicator, message: Array, memory: Any
    ) -> tuple[Array, Any]:
        """This replica's part of what a hook makes of a bucket: a hook is given leaves, not parts of them."""
        plan, of_parts = self.only(bucket)
        shares = comm.at("shards")
        (whole,) = pack(plan, unpack_rows(of_parts, plan, shares.size, (message,)))
        total, memory = apply(comm, whole, memory)
        (rows,) = pack_rows(of_parts, shares.size, unpack(plan, (total,)))
        return own_part(rows, shares.size, shares.replica_index()), memory

    def only(self, bucket: int) -> tuple[BucketPlan, BucketPlan]:
        """The plans of one bucket: of whole leaves, and of parts."""
        plan, of_parts = (replace(x, buckets=(x.buckets[bucket],)) for x in (self.plan, self.of_parts))
        return plan, of_parts

    def one_round(self, bucket: int) -> tuple[BucketPlan, BucketPlan]:
        """The same plans of what travels of a bucket in one of its rounds: a layer of each stack."""

        def of_layers(plan: BucketPlan) -> BucketPlan:
            leaves = tuple(replace(leaf, shape=leaf.shape[1:]) for leaf in plan.leaves)
            (all_rounds,) = plan.buckets
            one = replace(all_rounds, size=all_rounds.size // all_rounds.rounds, rounds=1)
            return replace(plan, leaves=leaves, buckets=(one,))

        plan, of_parts = map(of_layers, self.only(bucket))
        return plan, of_parts

    def scatters_of(self, micro_batch: str) -> tuple[Reduction, ...]:
        """The same of a micro-batch before the last one, which sends gradients alone."""
        each = zip(self.plan.messages, self.scatters)
        return tuple(
            one._replace(name=f"{micro_batch} {one.name}") for message, one in each if message.bucket is not None
        )

    def gathers(self, order: Sequence[int]) -> tuple[Reduction, ...]:
        """The gathers that bring buckets of parameters to all replicas, in this order."""
        of = {message.bucket: one for message, one in zip(self.plan.messages, self.scatters)}
        gather = partial(Reduction._replace, collective="all_gather", apply=None, memory=None, level="shards", rounds=1)
        gathers = (gather(of[k], name=f"gather {k}") for k in order)
        return tuple(on_each_device(self.replica.group.placement, one) for one in gathers)

    def packed(self, grads: Any) -> tuple[Array, ...]:
        """Whole gradients in buckets, of which each replica is to get the sum of its parts."""

        def pack_here(leaves: list[Any]) -> tuple[Array, ...]:
            return pack_rows(self.of_parts, self.replica.group.parts, self.plan.treedef.unflatten(leaves))

        return self._by_device(pack_here, (self._specs("spec"),), self._messages)(self._travelling(grads))

    def gathered(self, params: Any, order: Sequence[int]) -> Messages:
        """The messages of parameters, of which this replica has its own parts."""
        plan = self.of_gathers

        def pack_here(leaves: list[Any]) -> tuple[Array, ...]:
            forms = zip(leaves, plan.leaves)
            parts = [None if x is None else x.reshape(leaf.shape).astype(leaf.dtype) for x, leaf in forms]
            buckets = pack(plan, plan.treedef.unflatten(parts))
            return tuple(buckets[k] for k in order)

        pack_all = self._by_device(pack_here, (self._specs("rows"),), self._messages)
        return Messages(pack_all(self._travelling(params)), ((), None))

    def gathered_here(self, message: Array) -> Array:
        """Gathers this message of all replicas inside a program, where a loss would have such a collective."""
        group = self.replica.group
        axis = group.placement.axis_name
        if axis is None:
            return message
        gather = partial(jax.lax.all_gather, axis_name=axis, axis_index_groups=group.nodes, tiled=True)
        return self._by_device(gather, self._messages, self._messages)(message)

    def whole(self, params: Any, messages: Messages, order: Sequence[int]) -> Any:
        """The parameters that have come from all replicas, among those that stay."""
        buckets = [array for _, array in sorted(zip(order, messages.arrays), key=lambda pair: pair[0])]
        came = self.unpacked(self.plan, self.of_parts, buckets)
        # What has no elements does not travel.
        empty = [
            jnp.zeros(x.shape, leaf.dtype) if is_shard(x) else x for x, leaf in zip(_leaves(params), self.plan.leaves)
        ]
        return self.plan.treedef.unflatten([old if new is None else new for new, old in zip(came, empty)])

    def unpacked(self, plan: BucketPlan, of_parts: BucketPlan, buckets: Sequence[Array]) -> list[Any]:
        """The whole leaves in buckets that hold the parts of all replicas; None for others."""

        def unpack_here(buckets: Sequence[Array]) -> list[Any]:
            came = plan.treedef.flatten_up_to(unpack_rows(of_parts, plan, self.replica.group.parts, buckets))
            # Cast again, these are the numbers that the loss reads.
            return [None if x is None else x.astype(leaf.dtype) for x, leaf in zip(came, plan.leaves)]

        return self._by_device(unpack_here, (self._messages,), self._specs("spec", plan))(buckets)

    def own(self, params: Any) -> Any:
        """This replica's parts of what is trained, in place of shards and of whole leaves."""
        size = self.replica.group.parts
        index = self.replica.group.communicator.at("shards").replica_index()
        chosen = set(self.replica.chosen(whole_forms(params)))

        def part(x: Any, cut: DeviceCut) -> Any:
            return own_part(x, size, index, *cut_as_leaf(x.size, x.shape, size, cut))

        leaves = [
            x.parts if is_shard(x) else part(x, self.cuts[i]) if i in chosen else x
            for i, x in enumerate(_leaves(params))
        ]
        return self.plan.treedef.unflatten(leaves)

    def updated(self, state: TrainState, messages: Messages, kept: Kept) -> tuple[TrainState, StepInfo]:
        """The next state, in shards where this one is and else with this replica's parts of the parameters."""
        mine = state._replace(params=self.own(state.params))
        nothing = jnp.zeros(len(self.plan.messages), jnp.uint32)
        came = partial(self._came, kept.sums)
        mean = self.replica.mean(self.of_parts, came, mine, messages, (kept.own, kept.broken), nothing)
        comm = self.replica.group.communicator.at("shards")
        run = partial(run_on_parts, self.replica, self.facts.use, self.cuts, state, mine, mean)
        (new, info), sent = count_bytes(comm, run)
        return new, info._replace(sent=nothing.at[-1].add(as_uint32(sent)))

    def sent(self, info: StepInfo, of_scatters: Any, of_gathers: Any, order: Sequence[int]) -> StepInfo:
        """Adds the bytes of each bucket, there and back; the last number counts scalars and the update's messages."""
        before, last = jnp.split(of_scatters, [of_scatters.size - len(self.plan.messages)])
        sent = by_bucket(self.plan, last)
        places = np.array(order, int)
        sent = sent.at[places].set(more_sent(sent[places], of_gathers))
        for of_earlier in before.reshape(-1, len(self.plan.buckets)):
            sent = sent.at[: of_earlier.size].set(more_sent(sent[: of_earlier.size], of_earlier))
        return info._replace(sent=more_sent(sent, info.sent))

    def _came(self, sums: Sequence[Sequence[Array]], messages: Messages) -> tuple[list[Any], Any]:
        buckets, tail = take_tail(self.of_parts, messages)
        buckets = reduce(added, (*sums, tuple(buckets)))

        def unpack_here(buckets: Sequence[Array]) -> list[Any]:
            parts = zip(self.plan.treedef.flatten_up_to(unpack(self.of_parts, buckets)), self.cuts)
            return [x.reshape(-1, x.shape[-1]) if x is not None and cut.dims else x for x, cut in parts]

        return self._by_device(unpack_here, (self._messages,), self._specs("rows"))(buckets), tail

    @property
    def _messages(self) -> PartitionSpec:
        """The spec of a message, of which each device of a replica has its own."""
        return PartitionSpec(self.replica.group.placement.other_axes)

    def _travelling(self, tree: Any) -> list[Any]:
        """The leaves of a tree, None for those that do not travel."""
        travels = _leaves_of(self.plan)
        return [x if i in travels else None for i, x in enumerate(self.plan.treedef.flatten_up_to(tree))]

    def _specs(self, kind: Literal["spec", "rows"], plan: BucketPlan | None = None) -> list[PartitionSpec | None]:
        """The specs of whole leaves, or of parts of them; None for those that do not travel."""
        travels = _leaves_of(plan or self.plan)
        return [getattr(cut, kind) if i in travels else None for i, cut in enumerate(self.cuts)]

    def _by_device(self, f: Function, in_specs: Any, out_specs: Any) -> Function:
        return by_device(self.replica.group.placement.other_axes, f, in_specs, out_specs)


def _leaves_of(plan: BucketPlan) -> set[int]:
    """The leaves that travel."""
    return {i for bucket in plan.buckets for i in bucket.leaves}


def _leaves(tree: Any) -> list[Any]:
    return jax.tree.leaves(tree, is_leaf=is_shard)
