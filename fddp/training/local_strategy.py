"""The strategy of replicas that train separately: three kinds of step, one of which is due.

A local step trains each replica by itself. An exchange is a local step that also averages the
replicas' changes since the last exchange, as an ordinary step averages gradients, and gives the
mean to the outer optimizer. A synchronous step, one of the first `start`, averages gradients.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, PyTree

from fddp.buckets import (
    Shard,
    ShardLayout,
    insert_shards,
    is_shard,
    map_shards,
    split_shards,
)
from fddp.jaxpr import with_trained
from fddp.losses import Joined, Pending, Sums
from fddp.optim import update
from fddp.step import (
    WHOLE_STATE,
    Agreed,
    Mean,
    Replica,
    StepInfo,
    Strategy,
    Training,
    TrainState,
    Trees,
    packing,
    ranks_of_parts,
    refuse,
)
from fddp.step.schedules import Pieces, Runner, Schedule, Send, StepInputs, StepOutputs

Result = tuple[Any, Any]
"""The result of `Pieces.run`: (next state, report), and the replica's shards."""


@dataclass(frozen=True, kw_only=True)
class LocalStrategy(Strategy):
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
            refuse(replica.features | {"fddp.join": "fddp.join"})

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

        def run(inputs: StepInputs) -> StepOutputs:
            number = last.of(inputs.state.step) + 1
            kind = steps.alone
            if number <= self.start:
                kind = steps.together
            elif (number - self.start) % self.every == 0:
                kind = steps.exchange
            outputs = scheduled(kind).run(inputs)
            last.step, last.number = outputs.result[0].step, number
            return outputs

        return scheduled(steps.exchange)._replace(run=run, inside=None)


@dataclass(frozen=True)
class _Steps:
    """The three kinds of step, for one replica."""

    replica: Replica
    agreed: Agreed
    """Its `use` updates a state of one replica: its local parameters and inner optimizer."""
    outer: optax.GradientTransformation

    def alone(self) -> Pieces:
        """Makes a local step."""

        def run(state: TrainState, pending: Any, shards: Any, rows: Any, send: Send) -> Result:
            return self._result(state, *self._trained(state, shards, rows))

        return Pieces(run)

    def exchange(self) -> Pieces:
        """Makes a local step that averages the changes of all replicas, each with weight 1."""
        replica, plan = self.replica, self.agreed.plan
        packed, unpacked = packing(replica, plan, self.agreed.common.state.params)

        def run(state: TrainState, pending: Any, shards: Any, rows: Any, send: Send) -> Result:
            local, info = self._trained(state, shards, rows)
            trees = map(replica.trained, (state.params, local.params))
            sums = Sums((), jnp.ones_like(info.loss), info.loss, info.aux)
            one = jnp.ones((), jnp.int32)
            tail, buffers = replica.tail(Pending(sums, local.model_state, one, one), rows)
            received, nbytes = send(packed(jax.tree.map(jnp.subtract, *trees), tail))
            mean = replica.mean(plan, unpacked, state, received, (buffers, None), nbytes)
            state = self._outer_step(state, mean)
            local = local._replace(params=state.params, model_state=mean.model_state)
            info = info._replace(loss=mean.loss, aux=mean.aux, sent=mean.sent)
            return self._result(state, local, info)

        return Pieces(run, replica.reductions(plan))

    def together(self) -> Pieces:
        """Makes a synchronous step; all replicas stay equal."""
        whole = WHOLE_STATE.pieces(self.replica, self.agreed)

        def run(state: TrainState, pending: Any, shards: Any, rows: Any, send: Send) -> Result:
            (local, info), _ = whole.run(self._local(state, shards), None, (), rows, send)
            return self._result(state._replace(params=local.params), local, info)

        return whole._replace(run=run)

    def _trained(self, state: TrainState, shards: Any, rows: Any) -> tuple[TrainState, StepInfo]:
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

    def _outer_step(self, state: TrainState, mean: Mean) -> TrainState:
        """Updates the shared parameters with the mean change as their gradient."""
        trained, opt_state = self.replica.trained(state.params), state.opt_state
        new, outer = update(self.outer, mean.grads, opt_state.outer, trained, value=mean.loss)
        params = with_trained(state.params, new)
        return state._replace(params=params, opt_state=opt_state._replace(outer=outer))

    def _local(self, state: TrainState, shards: Any) -> TrainState:
        """Returns the state of one replica, with its local parameters and inner optimizer."""
        opt_state = map_shards(
            lambda x: x.parts.reshape(x.shape[1:]), insert_shards(state.opt_state, shards)
        )
        params = with_trained(state.params, opt_state.params)
        return state._replace(params=params, opt_state=opt_state.inner)

    def _result(self, state: TrainState, local: TrainState, info: StepInfo) -> Result:
        """Builds the step's result from the shared and the local state."""

        def stack(old: Shard, x: Array) -> Shard:
            return replace(old, parts=x.reshape(old.layout.dims))

        old = state.opt_state.params, state.opt_state.inner
        new = self.replica.trained(local.params), local.opt_state
        params, inner = jax.tree.map(stack, old, new, is_leaf=is_shard)
        opt_state = state.opt_state._replace(params=params, inner=inner)
        return split_shards((local._replace(params=state.params, opt_state=opt_state), info))
