"""A fragment on its way between islands: what they send of it, and what they make of it when it comes back.

An island's pseudo-gradient is shared − local parameters, equal on all of its replicas. Each sends a part of it to the
replicas of the same place in the other islands, and they gather the parts of the sum: so between islands each parameter
travels once, however many replicas an island has.

Source: Douillard et al., "DiLoCo" (2023) and "Streaming DiLoCo" (2025); `HierarchicalModelAverager` in PyTorch.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from fddp.buckets import (
    BucketPlan,
    Messages,
    add_tail,
    at_least,
    depth_of,
    is_shard,
    own_part,
    pack,
    place_scalars,
    plan_of_parts,
    scalar_dtype,
    take_tail,
    unpack,
    unpack_rows,
    whole_forms,
    widened,
)
from fddp.comm import Communicator
from fddp.hooks import Reduction, reductions
from fddp.optim import LocalState, LocalSteps, update
from fddp.step import Facts, Replica, TrainState, average, with_trained

RANGE = jnp.bfloat16  # weights of many steps times their changes outgrow float16, and no dtype of this range


@dataclass(frozen=True)
class Fragment:
    """Some buckets that are synchronized together, from one replica's point of view."""

    steps: LocalSteps
    replica: Replica
    number: int
    of: BucketPlan
    """The plan of all buckets."""
    scalars: Any
    """A dtype that holds loss, metrics, weights and buffers."""

    def check(self) -> None:
        """Refuses more fragments than there are buckets.

        Raises:
          ValueError: there are.
        """
        count = len(self.of.buckets)
        of = self.steps.fragments
        if count < of:
            raise ValueError(
                f"local_steps cannot make {of} fragments of {count} bucket{'s' * (count > 1)}: give fewer fragments, "
                "or a smaller bucket_cap_mb."
            )

    @property
    def sums(self) -> tuple[Reduction, ...]:
        """The sums of parts of the pseudo-gradient, over the replicas of one place in each island."""
        level = "all" if self.parts == 1 else "network"

        def of(one: Reduction) -> Reduction:
            if one.bucket is None:
                return one._replace(level=level)
            number = self.numbers[one.bucket]
            # What hooks remember of pseudo-gradients stands behind what they remember of gradients.
            messages = [message.bucket for message in self.of.messages]
            place = None if one.memory is None else len(messages) + messages.index(number)
            return one._replace(level=level, name=f"bucket {number}", bucket=number, memory=place)

        return tuple(map(of, reductions(self.sent, self.replica.options.hook, None)))

    @property
    def gathers(self) -> tuple[Reduction, ...]:
        """The gathers of parts inside of an island."""
        return tuple(
            Reduction(f"gather {k}", bucket=k, carries="", collective="all_gather", level="node", replicas=self.parts)
            for k in self.numbers
        )

    def changed(self, local: LocalState, view: TrainState, weights: Array, rows: Any) -> Messages:
        """Makes the messages: a part of the weighted pseudo-gradient (shared − local), and the island's buffers."""
        weight = weights[self.number]
        changes = jax.tree.map(
            lambda goes, old, new: (weight * (old - new)).astype(at_least(old.dtype, RANGE)) if goes else None,
            self.travels,
            self.own(local.shared),
            self.own(self.trained(view.params)),
        )
        buffers, _ = average().send(self._others, self._buffers(view.model_state), self._joined(rows))
        return add_tail(self.sent, pack(self.sent, changes), (weight, buffers))

    def summed(self, messages: Messages) -> tuple[list[Array], Any]:
        """This replica's parts of the mean pseudo-gradient, a bucket each, and the sums of buffers."""
        buckets, (weight, buffers) = take_tail(self.sent, messages)
        weight = jnp.where(weight == 0, 1, weight)
        leaves = self.of_parts.treedef.flatten_up_to(unpack(self.sent, buckets))
        mean = [None if x is None else (x / weight).astype(of.dtype) for x, of in zip(leaves, self.of_parts.leaves)]
        return list(pack(self.of_parts, self.of_parts.treedef.unflatten(mean))), buffers

    def landed(
        self, local: LocalState, own: TrainState, buckets: Sequence[Array], buffers: Any
    ) -> tuple[LocalState, TrainState]:
        """A step of the outer optimizer, and with what this replica goes on."""
        came = unpack_rows(self.of_parts, self.whole, self.parts, buckets)
        came = iter(x for x in self.whole.treedef.flatten_up_to(came) if x is not None)
        grads = jax.tree.map(lambda goes, x: next(came) if goes else jnp.zeros_like(x), self.travels, local.shared)
        shared, outer = update(self.steps.outer, grads, local.outer, local.shared, self.travels)
        mine = jax.tree.map(
            lambda old, new: self._part(new) if is_shard(old) else new,
            self.trained(own.params),
            shared,
            is_leaf=is_shard,
        )

        def mixed(goes: int, old: Any, new: Array) -> Any:
            before = old.parts if is_shard(old) else old
            after = new + self.steps.mix * (before - new) if goes else before
            return replace(old, parts=after) if is_shard(old) else after

        params = jax.tree.map(mixed, self.travels, self.trained(own.params), mine)
        own = own._replace(params=with_trained(own.params, params))
        before = self._buffers(own.model_state)
        after = average().land(self._others, before, buffers, None)
        own = own if after is None else own._replace(model_state=after)
        return local._replace(shared=shared, outer=outer), own

    def own(self, tree: Any) -> Any:
        """This replica's parts of trained leaves, in place of shards and of whole leaves."""
        return jax.tree.map(lambda x: x.parts if is_shard(x) else self._part(x), tree, is_leaf=is_shard)

    def trained(self, params: Any) -> Any:
        """The tree with None in place of leaves that are not trained, whether leaves are shards or not."""
        leaves, treedef = jax.tree.flatten(params, is_leaf=is_shard)
        chosen = self.replica.chosen(whole_forms(params))
        return treedef.unflatten([x if i in chosen else None for i, x in enumerate(leaves)])

    @cached_property
    def parts(self) -> int:
        """Number of parts of which each replica of an island sends one."""
        return self.steps.replicas(self.replica.group.parts)

    @cached_property
    def travels(self) -> Any:
        """A tree like the trained parameters: 1 for those in the fragment, 0 for others."""
        inside = {i for bucket in self.whole.buckets for i in bucket.leaves}
        chosen = self.replica.chosen(self.of.treedef.unflatten(self.of.leaves))
        return self.of.treedef.unflatten(
            [int(i in inside) if i in chosen else None for i in range(len(self.of.leaves))]
        )

    @cached_property
    def numbers(self) -> list[int]:
        """Numbers of its buckets."""
        count = len(self.of.buckets)
        ends = [0, *accumulate(bucket.nbytes for bucket in self.of.buckets)]
        of = self.steps.fragments
        # Each begins where its share of the bytes does, and has a bucket at least.
        begins = [0]
        for k in range(1, of):
            nearest = min(range(count), key=lambda at: abs(ends[at] - k * ends[-1] / of))
            begins.append(min(max(nearest, begins[-1] + 1), count - of + k))
        return list(range(begins[self.number], [*begins, count][self.number + 1]))

    @cached_property
    def whole(self) -> BucketPlan:
        """The plan of its buckets, of whole leaves."""
        buckets = tuple(self.of.buckets[k] for k in self.numbers)
        return place_scalars(replace(self.of, buckets=buckets, parts=self.parts), self.scalars, exact=False)

    @cached_property
    def of_parts(self) -> BucketPlan:
        """The same buckets, of one replica's parts."""
        return plan_of_parts(self.whole)

    @cached_property
    def sent(self) -> BucketPlan:
        """The same, as they are summed: in dtypes that hold weighted changes, with the scalars among them."""
        exact = self.replica.options.hook is None
        return place_scalars(widened(self.of_parts, RANGE), self.scalars, exact=exact)

    def _part(self, x: Array) -> Array:
        comm = self.replica.group.communicator.at("node")
        index = comm.replica_index() if self.parts > 1 else jnp.int32(0)
        return own_part(x, self.parts, index, depth_of(x.size, x.shape, self.parts))

    def _buffers(self, model_state: Any) -> Any:
        """Buffers go with the first fragment."""
        return model_state if self.number == 0 else None

    @property
    def _others(self) -> Communicator:
        """The replicas of this place in each island."""
        comm = self.replica.group.communicator
        return comm if self.parts == 1 else comm.at("network")

    def _joined(self, rows: Any) -> Any:
        """Rows by which buffers are averaged; those of islands count whatever data their replicas have left."""
        return rows if self.parts == 1 else None


def scalars_of(facts: Facts) -> Any:
    """Finds a dtype that holds loss, metrics, weights and buffers.

    Args:
      facts: of the step.

    Returns:
      The dtype.
    """
    weight = jax.ShapeDtypeStruct((), jnp.result_type(float))
    return scalar_dtype(jax.tree.leaves((facts.told, facts.state.model_state, weight)))
