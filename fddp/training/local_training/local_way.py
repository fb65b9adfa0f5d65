"""The way of replicas that train separately: three kinds of step, one of which is due.

A local step trains each replica by itself. An exchange is a local step that also averages the
replicas' changes since the last exchange, as an ordinary step averages gradients, and gives the
mean to the outer optimizer. A synchronous step, one of the first `start`, averages gradients.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, PyTree

from fddp.buckets import (
    Messages,
    Shard,
    ShardLayout,
    add_tail,
    insert_shards,
    is_shard,
    map_shards,
    pack,
    take_apart,
    take_tail,
    unpack_received,
)
from fddp.comm import add_replica_dim, drop_replica_dim
from fddp.hooks import Reduction
from fddp.jaxpr import with_trained
from fddp.losses import Joined, Pending, Sums
from fddp.optim import update
from fddp.step import (
    Agreed,
    Replica,
    StepInfo,
    Training,
    TrainState,
    Trees,
    Way,
    ranks_of_parts,
    refuse,
)
from fddp.step.schedules import Pieces, Round, Runner, Schedule, StepInputs, StepOutputs

NOTHING = Messages((), ((), None))
Result = tuple[Any, Any]
"""What `Pieces.finish` returns: (next state, report), and the replica's shards."""


@dataclass(frozen=True, kw_only=True)
class LocalWay(Way):
    """Each replica holds local parameters, and trains them separately between exchanges."""

    outer: optax.GradientTransformation
    every: int
    start: int
    # Changes are sent whole: all of their rows may be used, and no loop makes them.
    table_rows: bool = False
    rounds: bool = False

    def check_batch(self, replica: Replica, batch: PyTree, rows: int) -> None:
        """Refuses `fddp.join`."""
        del rows
        if isinstance(batch, Joined):
            refuse(replica.asked | {"fddp.join": "fddp.join"})

    def layouts(self, replica: Replica, whole: Trees) -> Trees:
        """Cuts the stacks of all replicas' arrays, so that each replica holds its own."""
        group = replica.group

        def layout(x: Any) -> ShardLayout:
            return ShardLayout(x.shape, group.size, ranks=ranks_of_parts(group))

        _, opt_state, _ = whole
        params, inner = jax.tree.map(layout, (opt_state.params, opt_state.inner))
        trained, none, buffers = super().layouts(replica, whole)
        return trained, none._replace(params=params, inner=inner), buffers

    def runner(self, schedule: Schedule, replica: Replica, agreed: Agreed) -> Runner:
        """Makes a runner that schedules each kind of step when it is first due."""
        steps = _Steps(replica, agreed, self.outer)
        last = Training()

        @cache
        def scheduled(kind: Callable[[], Pieces]) -> Runner:
            return schedule(replica.group, kind(), replica.options.donate)

        exchange = scheduled(steps.exchange)

        def due(state: TrainState) -> Runner:
            if isinstance(state.step, jax.ShapeDtypeStruct):
                return exchange
            number = last.of(state.step) + 1
            if number <= self.start:
                return scheduled(steps.together)
            if (number - self.start) % self.every == 0:
                return exchange
            return scheduled(steps.alone)

        def run(inputs: StepInputs) -> StepOutputs:
            number = last.of(inputs.state.step) + 1
            outputs = due(inputs.state).run(inputs)
            last.step, last.number = outputs.result[0].step, number
            return outputs

        def lower(inputs: StepInputs) -> jax.stages.Lowered:
            return due(inputs.state).lower(inputs)  # type: ignore

        return exchange._replace(run=run, lower=lower, inside=None)


@dataclass(frozen=True)
class _Steps:
    """The three kinds of step, for one replica."""

    replica: Replica
    agreed: Agreed
    """Its `use` updates a state of one replica: its local parameters and inner optimizer."""
    outer: optax.GradientTransformation

    def alone(self) -> Pieces:
        """Makes a local step."""

        def run(state: TrainState, shards: Any, rows: Any, *nothing: Any) -> tuple[Messages, Any]:
            return NOTHING, add_replica_dim(self._trained(state, shards, rows))

        def finish(state: TrainState, shards: Any, messages: Any, saved: Any, _: Array) -> Result:
            return self._held(state, *drop_replica_dim(saved))

        return _pieces(run, (), finish)

    def exchange(self) -> Pieces:
        """Makes a local step that averages the changes of all replicas, each with weight 1."""
        replica = self.replica
        trained = replica.trained

        def run(state: TrainState, shards: Any, rows: Any, *nothing: Any) -> tuple[Messages, Any]:
            local, info = self._trained(state, shards, rows)
            changes = jax.tree.map(jnp.subtract, trained(state.params), trained(local.params))
            sums = Sums((), jnp.ones_like(info.loss), info.loss, info.aux)
            one = jnp.ones((), jnp.int32)
            tail, buffers = replica.tail(Pending(sums, local.model_state, one, one), rows)
            return self._packed(changes, tail), add_replica_dim((local, info, buffers))

        def finish(
            state: TrainState, shards: Any, messages: Messages, saved: Any, nbytes: Array
        ) -> Result:
            local, info, buffers = saved
            local, info = drop_replica_dim((local, info))
            saved = buffers, None
            plan = self.agreed.plan
            mean = replica.mean(plan, self._unpacked, state, messages, saved, nbytes)
            opt_state = state.opt_state
            new, outer = update(
                self.outer, mean.grads, opt_state.outer, trained(state.params), value=mean.loss
            )
            params = with_trained(state.params, new)
            state = state._replace(params=params, opt_state=opt_state._replace(outer=outer))
            local = local._replace(params=params, model_state=mean.model_state)
            info = info._replace(loss=mean.loss, aux=mean.aux, sent=mean.sent)
            return self._held(state, local, info)

        return _pieces(run, self._reductions, finish)

    def together(self) -> Pieces:
        """Makes a synchronous step; all replicas stay equal."""
        replica = self.replica

        def run(state: TrainState, shards: Any, rows: Any, *nothing: Any) -> tuple[Messages, Any]:
            return replica.local(self._packed, self._local(state, shards), None, rows)

        def finish(
            state: TrainState, shards: Any, messages: Messages, saved: Any, nbytes: Array
        ) -> Result:
            local = self._local(state, shards)
            plan = self.agreed.plan
            mean = replica.mean(plan, self._unpacked, local, messages, saved, nbytes)
            local, info = self.agreed.use(local, mean)
            return self._held(state._replace(params=local.params), local, info)

        return _pieces(run, self._reductions, finish)

    def _trained(
        self, state: TrainState, shards: Sequence[Array], rows: Any
    ) -> tuple[TrainState, StepInfo]:
        """Takes a step of the inner optimizer, without communication."""
        plan = self.agreed.plan
        local = self._local(state, shards)
        solo = replace(self.replica, options=replace(self.replica.options, broadcast_buffers=False))
        sums, saved = solo.local(lambda *sums: sums, local, None, rows)  # type: ignore
        no_bytes = jnp.zeros(len(plan.messages), jnp.uint32)

        def unpacked(sums: PyTree) -> tuple[list[Any], Any]:
            grads, tail = sums
            return plan.treedef.flatten_up_to(grads), tail

        mean = solo.mean(plan, unpacked, local, sums, saved, no_bytes)  # type: ignore
        return self.agreed.use(local, mean)

    def _local(self, state: TrainState, shards: Sequence[Array]) -> TrainState:
        """Returns the state of one replica, with its local parameters and inner optimizer."""

        def own(x: Shard) -> Array:
            return x.parts.reshape(x.shape[1:])

        opt_state = map_shards(own, insert_shards(state.opt_state, shards))
        params = with_trained(state.params, opt_state.params)
        return state._replace(params=params, opt_state=opt_state.inner)

    def _held(self, state: TrainState, local: TrainState, info: StepInfo) -> Result:
        """Builds the step's result from the shared and the local state."""

        def stack(old: Shard, x: Array) -> Shard:
            return replace(old, parts=x.reshape(old.layout.dims))

        old = state.opt_state.params, state.opt_state.inner
        new = self.replica.trained(local.params), local.opt_state
        params, inner = jax.tree.map(stack, old, new, is_leaf=is_shard)
        opt_state = state.opt_state._replace(params=params, inner=inner)
        return take_apart((local._replace(params=state.params, opt_state=opt_state), info))

    def _packed(self, tree: PyTree, tail: Any) -> Messages:
        return add_tail(self.agreed.plan, pack(self.agreed.plan, tree), tail)

    def _unpacked(self, messages: Messages) -> tuple[list[Any], Any]:
        plan = self.agreed.plan
        buckets, tail = take_tail(plan, messages)
        return plan.treedef.flatten_up_to(unpack_received(plan, buckets)), tail

    @property
    def _reductions(self) -> tuple[Reduction, ...]:
        return self.replica.reductions(self.agreed.plan)


def _pieces(
    run: Callable[..., tuple[Messages, Any]],
    reductions: tuple[Reduction, ...],
    finish: Callable[..., Result],
) -> Pieces:
    """Makes the pieces of a step of one round."""
    inputs = ("state", "shards", "rows")
    return Pieces((Round("backward", inputs, run, reductions),), finish)
