"""A step of replicas that train alone, and synchronize a fragment of their parameters now and then.

There are three kinds. In the first all replicas average gradients, as in any other step. In the second each replica
trains alone, and sends nothing. The third is the second that also sends the pseudo-gradient of a fragment (shared −
local parameters) to an outer optimizer.

Source: Douillard et al., "DiLoCo" (2023) and "Streaming DiLoCo" (2025); what `fddp.local_steps` names besides.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from fddp.buckets import (
    BucketPlan,
    Messages,
    add_tail,
    at_least,
    copy_of,
    is_shard,
    join,
    pack,
    place_scalars,
    take_apart,
    take_tail,
    unpack,
    widened,
)
from fddp.comm import add_replica_dim, drop_replica_dim
from fddp.hooks import Reduction, reductions
from fddp.losses import Joined
from fddp.optim import LocalState, LocalSteps, scale_of, skipped, update
from fddp.schedules import Pieces, Round, by_bucket
from fddp.step import Mean, Replica, StepInfo, TrainState, average, with_trained

GIVEN = ("state", "pending", "shards", "rows")
RANGE = jnp.bfloat16  # weights of many steps times their changes outgrow float16, and no dtype of this range
# A state as one replica sees it, what the step tells, and how much it has trained on.
Trained = tuple[TrainState, Any, Array]


def own_view(state: TrainState, shards: Any) -> TrainState:
    """A state as one replica sees it that trains alone: its own parameters, inner state and buffers."""
    held: TrainState = _own(join(state, shards))
    return held._replace(opt_state=held.opt_state.inner)


def own_rows(rows: Any) -> Any:
    """Rows as a replica counts them that trains alone: without data for nothing, whatever the others divide by."""
    return rows._replace(divisor=rows.share) if isinstance(rows, Joined) else rows


@dataclass(frozen=True)
class Local:
    """Such a step, from one replica's point of view."""

    steps: LocalSteps
    replica: Replica
    plan: BucketPlan
    update: Callable[[TrainState, Mean], tuple[TrainState, StepInfo]]
    """The inner optimizer's."""
    scalars: Any
    """A dtype that holds loss, metrics, weights and buffers."""

    def __post_init__(self) -> None:
        for fragment in range(self.steps.fragments):
            self._fragment(fragment)

    def together(self, pieces: Pieces) -> Pieces:
        """A step that averages gradients, as it is without `local_steps`; its replicas stay equal."""
        (one,) = pieces.rounds

        def backward(state: TrainState, pending: Any, shards: Any, rows: Any, *nothing: Any) -> tuple[Messages, Any]:
            return one.run(own_view(state, shards), pending, rows)

        def finish(state: TrainState, shards: Any, messages: Messages, kept: Any, sent: Any) -> tuple[Any, Any]:
            (new, info), _ = pieces.finish(own_view(state, shards), (), messages, kept, sent)
            before: LocalState = _own(join(state, shards)).opt_state
            return self._held(before._replace(shared=self.replica.trained(new.params)), (new, info, before.weight))

        return Pieces((one._replace(reads=GIVEN, run=backward),), finish)

    def alone(self) -> Pieces:
        """A step of each replica for itself."""

        def backward(state: TrainState, pending: Any, shards: Any, rows: Any, *nothing: Any) -> tuple[Messages, Any]:
            return Messages((), ((), None)), self._contributed(own_view(state, shards), pending, rows)

        def finish(state: TrainState, shards: Any, messages: Messages, kept: Any, sent: Any) -> tuple[Any, Any]:
            return self._held(state.opt_state, self._trained(state, shards, kept))

        return Pieces((Round("backward", GIVEN, backward, (), "compute"),), finish)

    def sends(self, fragment: int) -> Pieces:
        """A step that synchronizes a fragment: as it was before the step if there is a delay, else as it is then."""
        numbers, plan, sums = self._fragment(fragment)

        def backward(state: TrainState, pending: Any, shards: Any, rows: Any, *nothing: Any) -> tuple[Messages, Any]:
            view = own_view(state, shards)
            kept = self._contributed(view, pending, rows)
            if self.steps.delay:
                weight = _own(join(state, shards)).opt_state.weight
                return self._changed(plan, fragment, state.opt_state, (view, None, weight), rows), kept
            trained = self._trained(state, shards, kept)
            return self._changed(plan, fragment, state.opt_state, trained, rows), add_replica_dim(trained)

        def finish(state: TrainState, shards: Any, messages: Messages, kept: Any, sent: Any) -> tuple[Any, Any]:
            new, info, weight = self._trained(state, shards, kept) if self.steps.delay else drop_replica_dim(kept)
            # With a delay this step's own is not among what was sent.
            left = weight - _own(join(state, shards)).opt_state.weight if self.steps.delay else jnp.zeros_like(weight)
            local, new = self._landed(plan, fragment, state.opt_state, new, messages)
            carried = by_bucket(plan, sent)
            of_each = jnp.zeros(len(self.plan.messages), jnp.uint32).at[np.array(numbers)].add(carried[: len(numbers)])
            info = info._replace(sent=of_each.at[-1].add(jnp.sum(carried[len(numbers) :], dtype=jnp.uint32)))
            return self._held(local, (new, info, weight.at[fragment].set(left[fragment])))

        return Pieces((Round("backward", GIVEN, backward, sums, "compute"),), finish)

    def _contributed(self, view: TrainState, pending: Any, rows: Any) -> Any:
        """Gradients and what goes with them; whether this replica still has data, where that may end."""
        sums: Any
        sums, kept = self._solo.local(lambda grads, tail: (grads, tail), view, pending, own_rows(rows))  # type: ignore
        active = sums[1][1].weight > 0 if isinstance(rows, Joined) else None
        return add_replica_dim((sums, active)), kept

    def _trained(self, state: TrainState, shards: Any, kept: Any) -> Trained:
        """A step of the inner optimizer."""
        view = own_view(state, shards)
        weight = _own(join(state, shards)).opt_state.weight
        sums, active = drop_replica_dim(kept[0])
        kept = kept[1]
        nothing = jnp.zeros(len(self.plan.messages), jnp.uint32)
        mean = self._solo.mean(self.plan, self._unpacked, view, sums, kept, nothing)  # type: ignore
        new, info = self.update(view, mean)
        if active is not None:
            held = (new.params, new.opt_state, new.model_state), (view.params, view.opt_state, view.model_state)
            params, opt_state, model_state = jax.tree.map(partial(jnp.where, active), *held)
            new = new._replace(params=params, opt_state=opt_state, model_state=model_state)
        trained_on = sums[1][1].weight / scale_of(view.opt_state)
        for passed_over in (info.skipped, skipped(new.opt_state, mean.grads)):
            trained_on = trained_on if passed_over is None else jnp.where(passed_over, 0, trained_on)
        return new, info, weight + trained_on.astype(weight.dtype)

    def _unpacked(self, sums: Any) -> tuple[list[Any], Any]:
        grads, tail = sums
        return self.plan.treedef.flatten_up_to(grads), tail

    def _changed(self, plan: BucketPlan, fragment: int, local: LocalState, trained: Trained, rows: Any) -> Messages:
        """Messages of a fragment: the weighted pseudo-gradient (shared − local) and this replica's buffers."""
        view, _, weights = trained
        weight = weights[fragment]
        travels = self._travels(plan)
        changes = jax.tree.map(
            lambda goes, old, new: (weight * (old - new)).astype(at_least(old.dtype, RANGE)) if goes else None,
            travels,
            local.shared,
            self.replica.trained(view.params),
        )
        buffers, _ = average().send(self.replica.group.communicator, self._buffers(fragment, view.model_state), rows)
        return add_tail(plan, pack(plan, changes), (weight, buffers))

    def _landed(
        self, plan: BucketPlan, fragment: int, local: LocalState, own: TrainState, messages: Messages
    ) -> tuple[LocalState, TrainState]:
        """A step of the outer optimizer, and with what this replica goes on."""
        buckets, (weight, buffers) = take_tail(plan, messages)
        weight = jnp.where(weight == 0, 1, weight)
        travels = self._travels(plan)
        came = iter(x for x in plan.treedef.flatten_up_to(unpack(plan, buckets)) if x is not None)
        grads = jax.tree.map(
            lambda goes, x: (next(came) / weight).astype(x.dtype) if goes else jnp.zeros_like(x), travels, local.shared
        )
        shared, outer = update(self.steps.outer, grads, local.outer, local.shared, travels)
        mixed = jax.tree.map(
            lambda goes, old, new: new + self.steps.mix * (old - new) if goes else old,
            travels,
            self.replica.trained(own.params),
            shared,
        )
        own = own._replace(params=with_trained(own.params, mixed))
        before = self._buffers(fragment, own.model_state)
        landed = average().land(self.replica.group.communicator, before, buffers, None)
        own = own if landed is None else own._replace(model_state=landed)
        return local._replace(shared=shared, outer=outer), own

    def _travels(self, plan: BucketPlan) -> Any:
        """A tree like the trained parameters: 1 for those in a plan, 0 for others."""
        inside = {i for bucket in plan.buckets for i in bucket.leaves}
        chosen = self.replica.chosen(plan.treedef.unflatten(plan.leaves))
        return plan.treedef.unflatten([int(i in inside) if i in chosen else None for i in range(len(plan.leaves))])

    def _held(self, local: LocalState, trained: Trained) -> tuple[Any, Any]:
        """The step's result, with what is each replica's own apart."""
        own, info, weight = trained
        copy = partial(copy_of, self.replica.group.copy_ranks)
        held = (self.replica.trained(own.params), own.opt_state, weight, own.model_state)
        params, inner, weight, buffers = jax.tree.map(copy, held)
        state = own._replace(params=with_trained(own.params, params), model_state=buffers)
        return take_apart((state._replace(opt_state=local._replace(inner=inner, weight=weight)), info))

    def _fragment(self, fragment: int) -> tuple[list[int], BucketPlan, tuple[Reduction, ...]]:
        """Numbers of a fragment's buckets, a plan of them alone, and how they are summed."""
        count = len(self.plan.buckets)
        ends = [0, *accumulate(bucket.nbytes for bucket in self.plan.buckets)]
        if count < self.steps.fragments:
            raise ValueError(
                f"local_steps cannot make {self.steps.fragments} fragments of {count} "
                f"bucket{'s' * (count > 1)}: give fewer fragments, or a smaller bucket_cap_mb."
            )
        # Each begins where its share of the bytes does, and has a bucket at least.
        begins = [0]
        for k in range(1, self.steps.fragments):
            nearest = min(range(count), key=lambda at: abs(ends[at] - k * ends[-1] / self.steps.fragments))
            begins.append(min(max(nearest, begins[-1] + 1), count - self.steps.fragments + k))
        numbers = list(range(begins[fragment], [*begins, count][fragment + 1]))
        hook = self.replica.options.hook
        plan = widened(replace(self.plan, buckets=tuple(self.plan.buckets[k] for k in numbers)), RANGE)
        plan = place_scalars(plan, self.scalars, exact=hook is None)
        names = [f"bucket {k}" for k in numbers]
        sums = [
            one if message.bucket is None else one._replace(name=names[message.bucket])
            for message, one in zip(plan.messages, reductions(plan, hook, None))
        ]
        return numbers, plan, tuple(sums)

    def _buffers(self, fragment: int, model_state: Any) -> Any:
        """Buffers go with the first fragment."""
        return model_state if fragment == 0 else None

    @property
    def _solo(self) -> Replica:
        """This replica, whose buffers are its own."""
        return replace(self.replica, options=replace(self.replica.options, broadcast_buffers=False))


def _own(held: Any) -> Any:
    """A replica's own arrays in place of copies, the rest as it is."""
    return jax.tree.map(lambda x: x.parts.reshape(x.shape) if is_shard(x) else x, held, is_leaf=is_shard)
