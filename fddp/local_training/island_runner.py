"""The way of asynchronous islands, and its runner.

Within an island each step is an ordinary one. Periodically the island sends its pseudo-gradient to
the server, which replies with the latest shared parameters once the quorum is complete. Islands
send each other nothing, except in `start` initial steps, which average the gradients of all.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
from jaxtyping import PyTree

from fddp.buckets import insert_shards, take_apart
from fddp.local_training.island_state import Island, island_of
from fddp.local_training.last_step import LastStep
from fddp.local_training.local_runner import kinds, local_way
from fddp.local_training.merging import Contribution, SharedParams
from fddp.losses import Joined
from fddp.optim import IslandState, LocalSteps
from fddp.schedules import Runner, Schedule, StepInputs, StepOutputs, more_sent
from fddp.step import QUORUM, Facts, Replica, TrainState, Way, refuse


class Keeper(NamedTuple):
    """The client of the server; the processes of an island call it jointly."""

    give: Callable[[Contribution], SharedParams]
    """Sends a pseudo-gradient, and returns the latest parameters after its merge."""
    meet: Callable[[], SharedParams]
    """Waits for the meeting of all islands, and returns the latest parameters and outer state."""


# (island, state) → client; called by every process before its island's first separate step.
JoinKeeper = Callable[[Island, TrainState], Keeper]


def islands(steps: LocalSteps, inner: Way, join_keeper: JoinKeeper | None) -> Way:
    """Makes the way of asynchronous islands, which hold their state in the way `inner`.

    Without `join_keeper` islands only train, and their caller merges.
    """
    way = local_way(steps, inner)
    return way._replace(
        name=QUORUM,
        check_batch=_check_batch,
        seen=_seen,
        runner=partial(_runner, steps, inner, join_keeper),
    )


def _check_batch(replica: Replica, batch: PyTree, rows: int) -> None:
    del rows
    if isinstance(batch, Joined):
        refuse(replica.asked | {"fddp.join": "fddp.join"})


def _seen(replica: Replica, state: TrainState) -> TrainState:
    del replica
    if not isinstance(state.opt_state, IslandState):
        raise ValueError(
            f"the optimizer's state is {type(state.opt_state).__name__}, and this step was made "
            f"with {QUORUM}: begin with step.init(fddp.whole(state.params))."
        )
    return state._replace(opt_state=state.opt_state.inner)


def _runner(
    steps: LocalSteps,
    inner: Way,
    join_keeper: JoinKeeper | None,
    schedule: Schedule,
    replica: Replica,
    facts: Facts,
) -> Runner:
    island = island_of(steps, replica)
    local, synchronous = kinds(steps, inner, replica, facts)
    # An island may continue after an error, since it shares no collectives with other islands.
    island_group = replace(replica.group, recovery=island.members.recovery)
    local_runner = schedule(island_group, local.alone(), replica.options.donate)
    first_runner = (
        schedule(replica.group, synchronous, replica.options.donate)
        if steps.start
        else local_runner
    )
    return island_runner(local_runner, first_runner, steps, island, join_keeper)


def island_runner(
    local: Runner,
    synchronous: Runner,
    steps: LocalSteps,
    island: Island,
    join_keeper: JoinKeeper | None,
) -> Runner:
    """Makes a runner of `steps.start` synchronous steps, then of local ones with exchanges."""
    last = LastStep()
    keeper: Keeper | None = None
    learner = _Learner(island)

    def run(inputs: StepInputs) -> StepOutputs:
        nonlocal last, keeper
        current, due = last.following(steps, inputs.state.step)
        if current.number <= steps.start:
            outputs = synchronous.run(inputs._replace(memory=()))
            last = current._replace(step=outputs.result[0].step)
            return outputs._replace(memory=inputs.memory)
        full_state = insert_shards(inputs.state, inputs.shards)
        if keeper is None and join_keeper:
            keeper = join_keeper(island, full_state)
        with island.members.recovery:
            (new, info), local_shards, _ = local.run(_local_inputs(inputs, full_state))
        new = _whole(insert_shards(new, local_shards), full_state)
        last = current._replace(step=new.step)
        if keeper and due:
            contribution = learner.learned(new)
            new = learner.landed(steps.mix, new, keeper.give(contribution))
            if island.members.is_main:
                nbytes = sum(x.nbytes for x in contribution.change)
                info = info._replace(sent=info.sent.at[-1].set(more_sent(info.sent[-1], nbytes)))
        new, shards = take_apart(new)
        return StepOutputs((new, info), shards, inputs.memory)

    def meet(state: TrainState) -> TrainState:
        if keeper is None:
            return state
        contribution = learner.learned(state)
        if contribution.weight:
            keeper.give(contribution)
        return learner.landed(0.0, state, keeper.meet())  # now all islands are equal

    def lower(inputs: StepInputs) -> jax.stages.Lowered:
        if together_is_due(inputs.state):
            return synchronous.lower(inputs._replace(memory=()))  # type: ignore
        full_state = insert_shards(inputs.state, inputs.shards)
        return local.lower(_local_inputs(inputs, full_state))  # type: ignore

    def tasks(state: TrainState, pending: PyTree, shards: PyTree, rows: PyTree) -> Any:
        if together_is_due(state):
            return synchronous.tasks(state, pending, shards, rows)
        bare, local_shards = _bare(insert_shards(state, shards))
        return local.tasks(bare, pending, local_shards, rows)

    def together_is_due(state: TrainState) -> bool:
        if not steps.start or isinstance(state.step, jax.ShapeDtypeStruct):
            return False
        return last.following(steps, state.step)[0].number <= steps.start

    return local._replace(
        run=run, lower=lower if local.lower else None, tasks=tasks, meet=meet, waits=together_is_due
    )


@dataclass
class _Learner:
    """An island, and the shared parameters that it received last."""

    island: Island
    taken: int | None = None
    """Their version; None before the first exchange."""

    def learned(self, state: TrainState) -> Contribution:
        """Returns the island's contribution; raises ValueError if the state is not the latest."""
        contribution = self.island.contribution(state)
        if self.taken not in (None, contribution.began):
            raise ValueError(
                f"this state has version {contribution.began} of the shared parameters, and the "
                f"island received version {self.taken} last: give the state that the last step "
                "returned, or restart with another fddp.train_step."
            )
        return contribution

    def landed(self, mix: float, state: TrainState, newest: SharedParams) -> TrainState:
        """Mixes received parameters into the island's state."""
        self.taken = newest.version
        return self.island.landed(mix, state, newest)


def _local_inputs(inputs: StepInputs, full_state: TrainState) -> StepInputs:
    """The inputs of a local step, without the shared parameters and the hooks' memory."""
    bare, shards = _bare(full_state)
    return inputs._replace(state=bare, shards=shards, memory=())


def _bare(state: TrainState) -> tuple[Any, Any]:
    """Removes the shared parameters, unused by a local step, and takes the state apart."""
    return take_apart(
        state._replace(opt_state=state.opt_state._replace(shared=(), version=(), outer=()))
    )


def _whole(bare: TrainState, full_state: TrainState) -> TrainState:
    """Restores the shared parameters from another state: the inverse of `_bare`."""
    source: IslandState = full_state.opt_state
    opt_state = bare.opt_state._replace(
        shared=source.shared, version=source.version, outer=source.outer
    )
    return bare._replace(opt_state=opt_state)
