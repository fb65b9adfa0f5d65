"""A fragment of the parameters: its pseudo-gradient, and the outer step with the mean over islands.

The pseudo-gradient of an island is shared − local parameters.

Source: Douillard et al., "DiLoCo" (2023) and "Streaming DiLoCo" (2025).
"""

from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from fddp.buckets import BucketPlan, Messages, is_shard, scalar_dtype
from fddp.comm import Communicator
from fddp.hooks import Reduction
from fddp.jaxpr import with_trained
from fddp.local_training.inside import array_of, trained_leaves, with_array
from fddp.local_training.local_optimizer import LocalSteps
from fddp.local_training.wire import Averaged, Wire
from fddp.optim import update
from fddp.step import Agreed, LocalState, Replica, TrainState, average


@dataclass(frozen=True)
class Fragment:
    """Buckets that are synchronized at the same step, for one replica."""

    steps: LocalSteps
    replica: Replica
    number: int
    of: BucketPlan
    """The plan of all buckets."""
    scalars: Any
    """A dtype for loss, metrics, weights and buffers."""

    @property
    def renews(self) -> tuple[int, ...]:
        """Numbers of the means that restart with it: a fragment of all parameters includes the mean
        over a node."""
        if self.steps.fragments == 1 and self.steps.node is not None:
            return self.number, self.steps.node
        return (self.number,)

    def changed(self, local: LocalState, view: TrainState, rows: PyTree) -> Messages:
        """Packs the weighted pseudo-gradient (shared − local), and the island's buffers."""
        changes = jax.tree.map(
            lambda included, old, new: old - new if included else None,
            self.travels,
            self._parts(local.shared),
            self._parts(trained_leaves(self.replica, view.params)),
        )
        # Islands of several replicas count even without data.
        joined = rows if self.wire.whole.parts == 1 else None
        buffers, _ = average().send(self._peers, self._buffers(view.model_state), joined)
        return self.wire.packed(view.opt_state.weight[self.number], changes, buffers)

    def landed(
        self, local: LocalState, state: TrainState, mean: Averaged
    ) -> tuple[LocalState, TrainState]:
        """Takes an outer step, and mixes its result with the local parameters."""
        arrays = iter(x for x in self.wire.unpacked(mean.buckets) if x is not None)
        grads = jax.tree.map(
            lambda included, x: next(arrays) if included else jnp.zeros_like(x),
            self.travels,
            local.shared,
        )
        shared, outer = update(self.steps.outer, grads, local.outer, local.shared, self.travels)
        params = jax.tree.map(
            self._mixed, self.travels, trained_leaves(self.replica, state.params), shared
        )
        buffers = self._buffers(state.model_state)
        model_state = average().land(self._peers, buffers, mean.more, None)
        if model_state is not None:
            state = state._replace(model_state=model_state)
        state = state._replace(params=with_trained(state.params, params))
        return local._replace(shared=shared, outer=outer), state

    def _mixed(self, included: int, old: Any, new: Array) -> Any:
        if not included:
            return old
        if is_shard(old):
            new = self.wire.part(new)
        return with_array(old, new + self.steps.mix * (array_of(old) - new))

    @cached_property
    def wire(self) -> Wire:
        """Its messages between islands."""
        num_parts = self.steps.replicas(self.replica.group.parts)
        buckets = tuple(self.of.buckets[k] for k in self.numbers)
        plan = replace(self.of, buckets=buckets, parts=num_parts)

        def named(reduction: Reduction) -> Reduction:
            if reduction.bucket is None:
                return reduction
            number = self.numbers[reduction.bucket]
            # The hooks' memory of pseudo-gradients follows their memory of gradients.
            messages = [message.bucket for message in self.of.messages]
            index = None if reduction.memory is None else len(messages) + messages.index(number)
            return reduction._replace(name=f"bucket {number}", bucket=number, memory=index)

        level = self.steps.level(self.replica.group.parts)
        return Wire(self.replica.group, plan, level, self.scalars, self.replica.options.hook, named)

    @cached_property
    def travels(self) -> Any:
        """Tree like the parameters: 1 for leaves in the fragment, 0 for other trained leaves."""
        included = {i for bucket in self.wire.whole.buckets for i in bucket.leaves}
        chosen = self.replica.chosen(self.of.treedef.unflatten(self.of.leaves))
        return self.of.treedef.unflatten(
            [int(i in included) if i in chosen else None for i in range(len(self.of.leaves))]
        )

    @cached_property
    def numbers(self) -> list[int]:
        """Numbers of its buckets."""
        count = len(self.of.buckets)
        ends = [0, *accumulate(bucket.nbytes for bucket in self.of.buckets)]
        fragments = self.steps.fragments
        # Fragments divide the bytes evenly, with at least one bucket each.
        starts = [0]
        for k in range(1, fragments):
            nearest = min(range(count), key=lambda i: abs(ends[i] - k * ends[-1] / fragments))
            starts.append(min(max(nearest, starts[-1] + 1), count - fragments + k))
        return list(range(starts[self.number], [*starts, count][self.number + 1]))

    def _parts(self, tree: PyTree) -> Any:
        """Replaces trained leaves, sharded or whole, by this replica's parts."""
        return jax.tree.map(
            lambda x: x.parts if is_shard(x) else self.wire.part(x), tree, is_leaf=is_shard
        )

    def _buffers(self, model_state: PyTree) -> Any:
        """Returns the buffers for the first fragment, which carries them, else None."""
        return model_state if self.number == 0 else None

    @property
    def _peers(self) -> Communicator:
        """The replicas at this position in all islands."""
        return self.replica.group.communicator.at(self.wire.level)


def check_fragments(steps: LocalSteps, plan: BucketPlan) -> None:
    """Raises ValueError if fragments outnumber buckets."""
    count = len(plan.buckets)
    if count < steps.fragments:
        raise ValueError(
            f"local_steps cannot make {steps.fragments} fragments of {count} "
            f"bucket{'s' * (count > 1)}: give fewer fragments, or a smaller bucket_cap_mb."
        )


def scalars_of(agreed: Agreed) -> Any:
    """Finds a dtype for loss, metrics, weights and buffers."""
    weight = jax.ShapeDtypeStruct((), jnp.result_type(float))
    return scalar_dtype(jax.tree.leaves((agreed.outputs, agreed.state.model_state, weight)))
