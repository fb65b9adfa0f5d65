"""The way of asynchronous islands, and its runner.

Within an island each step is an ordinary one. Periodically the island sends its pseudo-gradient to
the server, which replies with the latest shared parameters once the quorum is complete. Islands
send each other nothing, except in `start` initial steps, which average the gradients of all.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import jax
from jaxtyping import PyTree

from fddp.buckets import insert_shards, take_apart
from fddp.islands.client import Client
from fddp.islands.island_state import Island, island_of
from fddp.islands.merging import Contribution, SharedParams
from fddp.local_training import LocalSteps, LocalWay, local_way
from fddp.losses import Joined
from fddp.schedules import Runner, Schedule, StepInputs, StepOutputs, TaskList, more_sent
from fddp.step import QUORUM, Facts, IslandState, Replica, Training, TrainState, Way, refuse

# (island, state) → client; called by every process before its island's first separate step.
Join = Callable[[Island, TrainState], Client]


def islands(steps: LocalSteps, inner: Way, join: Join | None) -> Way:
    """Makes the way of asynchronous islands, which hold their state in the way `inner`.

    Without `join` islands only train, and their caller merges.
    """
    fields: dict[str, Any] = vars(local_way(steps, inner)) | {"name": QUORUM}
    return IslandsWay(**fields, join=join)


@dataclass(frozen=True, kw_only=True)
class IslandsWay(LocalWay):
    """Islands that exchange parameters with a server, and do not wait for each other."""

    join: Join | None
    opt_state: ClassVar[type] = IslandState

    def check_batch(self, replica: Replica, batch: PyTree, rows: int) -> None:
        """Refuses `fddp.join`."""
        del rows
        if isinstance(batch, Joined):
            refuse(replica.asked | {"fddp.join": "fddp.join"})

    def runner(self, schedule: Schedule, replica: Replica, facts: Facts) -> Runner:
        """Makes a runner of `start` synchronous steps, then of local ones with exchanges."""
        steps = self.steps
        donate = replica.options.donate
        island = island_of(steps, replica)
        pieces, synchronous_pieces = self.kinds(replica, facts)
        # An island may continue after an error, since it shares no collectives with other islands.
        island_group = replace(replica.group, recovery=island.members.recovery)
        local = synchronous = schedule(island_group, pieces.alone(), donate)
        if steps.start:
            synchronous = schedule(replica.group, synchronous_pieces, donate)
        trainer = _Trainer(steps, island, local, synchronous, self.join)
        runner = local._replace(
            run=trainer.run, tasks=trainer.tasks, meet=trainer.meet, waits=trainer.is_synchronous
        )
        if local.lower:
            runner = runner._replace(lower=trainer.lower)
        return runner


@dataclass
class _Trainer:
    """The training of an island."""

    steps: LocalSteps
    island: Island
    local: Runner
    synchronous: Runner
    join: Join | None
    client: Client | None = None
    last: Training = field(default_factory=Training)
    version: int | None = None
    """Version of the shared parameters received last; None before the first exchange."""

    def run(self, inputs: StepInputs) -> StepOutputs:
        number = self.last.of(inputs.state.step) + 1
        due = self.steps.sends(number)
        if number <= self.steps.start:
            outputs = self.synchronous.run(inputs._replace(memory=()))
            self.last.step, self.last.number = outputs.result[0].step, number
            return outputs._replace(memory=inputs.memory)
        full_state = insert_shards(inputs.state, inputs.shards)
        if self.client is None and self.join:
            self.client = self.join(self.island, full_state)
        with self.island.members.recovery:
            (new, info), local_shards, _ = self.local.run(_local_inputs(inputs, full_state))
        new = _whole(insert_shards(new, local_shards), full_state)
        self.last.step, self.last.number = new.step, number
        if self.client and due:
            contribution = self._contribution(new)
            new = self._landed(self.steps.mix, new, self.client.exchange(contribution))
            if self.island.members.is_main:
                nbytes = sum(x.nbytes for x in contribution.change)
                info = info._replace(sent=info.sent.at[-1].set(more_sent(info.sent[-1], nbytes)))
        new, shards = take_apart(new)
        return StepOutputs((new, info), shards, inputs.memory)

    def meet(self, state: TrainState) -> TrainState:
        if self.client is None:
            return state
        contribution = self._contribution(state)
        if contribution.weight:
            self.client.exchange(contribution)
        return self._landed(0.0, state, self.client.meet())  # now all islands are equal

    def lower(self, inputs: StepInputs) -> jax.stages.Lowered:
        if self.is_synchronous(inputs.state):
            return self.synchronous.lower(inputs._replace(memory=()))  # type: ignore
        full_state = insert_shards(inputs.state, inputs.shards)
        return self.local.lower(_local_inputs(inputs, full_state))  # type: ignore

    def tasks(self, state: TrainState, pending: PyTree, shards: PyTree, rows: PyTree) -> TaskList:
        if self.is_synchronous(state):
            return self.synchronous.tasks(state, pending, shards, rows)
        bare, local_shards = _bare(insert_shards(state, shards))
        return self.local.tasks(bare, pending, local_shards, rows)

    def is_synchronous(self, state: TrainState) -> bool:
        """True if the next step averages the gradients of all islands."""
        if not self.steps.start or isinstance(state.step, jax.ShapeDtypeStruct):
            return False
        return self.last.of(state.step) < self.steps.start

    def _contribution(self, state: TrainState) -> Contribution:
        """Returns the island's contribution; raises ValueError if the state is not the latest."""
        contribution = self.island.contribution(state)
        if self.version not in (None, contribution.began):
            raise ValueError(
                f"this state has version {contribution.began} of the shared parameters, and the "
                f"island received version {self.version} last: give the state that the last step "
                "returned, or restart with another fddp.train_step."
            )
        return contribution

    def _landed(self, mix: float, state: TrainState, newest: SharedParams) -> TrainState:
        """Mixes received parameters into the island's state."""
        self.version = newest.version
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
