"""A fragment of the parameters between islands: what they send of it, and what they make of it when it comes back.

An island sends its pseudo-gradient, shared − local parameters. With the mean of all the outer optimizer makes a step.

Source: Douillard et al., "DiLoCo" (2023) and "Streaming DiLoCo" (2025).
"""

from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from fddp.buckets import BucketPlan, Messages, is_shard, place_scalars, scalar_dtype
from fddp.comm import Communicator
from fddp.hooks import Reduction
from fddp.local_training.inside import trained_leaves
from fddp.local_training.wire import Averaged, Wire
from fddp.optim import LocalState, LocalSteps, update
from fddp.step import Facts, Replica, TrainState, average, with_trained


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
    def renews(self) -> tuple[int, ...]:
        """The numbers of the means that begin anew when it lands: that over a node, too, where it is all parameters."""
        node = self.steps.node if self.steps.fragments == 1 else None
        return (self.number,) if node is None else (self.number, node)

    def changed(self, local: LocalState, view: TrainState, rows: Any) -> Messages:
        """Makes the messages: a part of the weighted pseudo-gradient (shared − local), and the island's buffers."""
        changes = jax.tree.map(
            lambda goes, old, new: old - new if goes else None,
            self.travels,
            self._own(local.shared),
            self._own(trained_leaves(self.replica, view.params)),
        )
        buffers, _ = average().send(self._others, self._buffers(view.model_state), self._joined(rows))
        return self.wire.packed(view.opt_state.weight[self.number], changes, buffers)

    def landed(self, local: LocalState, own: TrainState, mean: Averaged) -> tuple[LocalState, TrainState]:
        """A step of the outer optimizer, and with what this replica goes on."""
        came = iter(x for x in self.wire.unpacked(mean.buckets) if x is not None)
        grads = jax.tree.map(lambda goes, x: next(came) if goes else jnp.zeros_like(x), self.travels, local.shared)
        shared, outer = update(self.steps.outer, grads, local.outer, local.shared, self.travels)
        before = trained_leaves(self.replica, own.params)
        mine = jax.tree.map(
            lambda old, new: self.wire.part(new) if is_shard(old) else new, before, shared, is_leaf=is_shard
        )

        def mixed(goes: int, old: Any, new: Array) -> Any:
            before = old.parts if is_shard(old) else old
            after = new + self.steps.mix * (before - new) if goes else before
            return replace(old, parts=after) if is_shard(old) else after

        params = jax.tree.map(mixed, self.travels, before, mine)
        own = own._replace(params=with_trained(own.params, params))
        buffers = self._buffers(own.model_state)
        after = average().land(self._others, buffers, mean.more, None)
        own = own if after is None else own._replace(model_state=after)
        return local._replace(shared=shared, outer=outer), own

    @cached_property
    def wire(self) -> Wire:
        """Its way to the other islands."""
        parts = self.steps.replicas(self.replica.group.parts)
        buckets = tuple(self.of.buckets[k] for k in self.numbers)
        whole = place_scalars(replace(self.of, buckets=buckets, parts=parts), self.scalars, exact=False)

        def named(one: Reduction) -> Reduction:
            if one.bucket is None:
                return one
            number = self.numbers[one.bucket]
            # What hooks remember of pseudo-gradients stands behind what they remember of gradients.
            messages = [message.bucket for message in self.of.messages]
            place = None if one.memory is None else len(messages) + messages.index(number)
            return one._replace(name=f"bucket {number}", bucket=number, memory=place)

        level = "all" if parts == 1 else "network"
        return Wire(self.replica.group, whole, level, self.scalars, self.replica.options.hook, named)

    @cached_property
    def travels(self) -> Any:
        """A tree like the trained parameters: 1 for those in the fragment, 0 for others."""
        inside = {i for bucket in self.wire.whole.buckets for i in bucket.leaves}
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

    def _own(self, tree: Any) -> Any:
        """This replica's parts of trained leaves, in place of shards and of whole leaves."""
        return jax.tree.map(lambda x: x.parts if is_shard(x) else self.wire.part(x), tree, is_leaf=is_shard)

    def _buffers(self, model_state: Any) -> Any:
        """Buffers go with the first fragment."""
        return model_state if self.number == 0 else None

    @property
    def _others(self) -> Communicator:
        """The replicas of this place in each island."""
        return self.replica.group.communicator.at(self.wire.level)

    def _joined(self, rows: Any) -> Any:
        """Rows by which buffers are averaged; those of islands count whatever data their replicas have left."""
        return rows if self.wire.whole.parts == 1 else None


def scalars_of(facts: Facts) -> Any:
    """Finds a dtype that holds loss, metrics, weights and buffers.

    Args:
      facts: of the step.

    Returns:
      The dtype.
    """
    weight = jax.ShapeDtypeStruct((), jnp.result_type(float))
    return scalar_dtype(jax.tree.leaves((facts.told, facts.state.model_state, weight)))
