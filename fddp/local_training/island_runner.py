"""The way of islands that do not wait for each other, and its runner.

Inside of an island each step is an ordinary one. Now and then the island sends its pseudo-gradient to the keeper of the
shared parameters, which answers with the newest ones when the quorum is there. Here no message goes from island to
island, but for steps at the beginning that average the gradients of all.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax

from fddp.buckets import join, take_apart
from fddp.local_training.island_state import Island, island_of
from fddp.local_training.last_step import LastStep
from fddp.local_training.local_runner import alone, kinds
from fddp.local_training.merging import Contribution, SharedParams
from fddp.losses import Joined
from fddp.optim import IslandState, LocalSteps
from fddp.schedules import Runner, Schedule, more_sent
from fddp.step import QUORUM, Facts, Replica, TrainState, Way, refuse


class Keeper(NamedTuple):
    """The keeper of the shared parameters, as the processes of an island see it, which call it together."""

    give: Callable[[Contribution], SharedParams]
    """Sends a pseudo-gradient, and returns the newest parameters once it is merged."""
    meet: Callable[[], SharedParams]
    """Waits until all islands meet, and returns the newest parameters, with the state of the outer optimizer."""


# Joins the keeper before an island's first step alone, with the state that it begins with; every process calls it.
JoinKeeper = Callable[[Island, TrainState], Keeper]


def islands(steps: LocalSteps, inner: Way, join_keeper: JoinKeeper | None) -> Way:
    """Makes the way.

    Args:
      steps: the optimizer, made by `fddp.local_steps` with a quorum.
      inner: the way in which the replicas of an island hold a state.
      join_keeper: joins the keeper; None: islands only train, and whoever steps them merges.

    Returns:
      The way.
    """
    way = alone(steps, inner)
    return way._replace(
        name=QUORUM,
        check_batch=_check_batch,
        seen=_seen,
        runner=partial(_runner, steps, inner, join_keeper),
    )


def _check_batch(replica: Replica, batch: Any, rows: int) -> None:
    del rows
    if isinstance(batch, Joined):
        refuse(replica.asked | {"fddp.join": "fddp.join"})


def _seen(replica: Replica, state: TrainState) -> TrainState:
    del replica
    if not isinstance(state.opt_state, IslandState):
        raise ValueError(
            f"the optimizer's state is {type(state.opt_state).__name__}, and this step was made with {QUORUM}: begin "
            "with step.init(fddp.whole(state.params))."
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
    local, together = kinds(steps, inner, replica, facts)
    # After an error an island goes on by itself: no message of another one could meet a wrong one of its own.
    on_its_own = replace(replica.group, recovery=island.members.recovery)
    own = schedule(on_its_own, local.alone(), replica.options.donate)
    first = schedule(replica.group, together, replica.options.donate) if steps.start else own
    return island_runner(own, first, steps, island, join_keeper)


def island_runner(
    alone: Runner, together: Runner, steps: LocalSteps, island: Island, join_keeper: JoinKeeper | None
) -> Runner:
    """Makes the runner.

    Args:
      alone: a step of an island alone.
      together: a step that averages the gradients of all replicas, for the first `steps.start` ones.
      steps: says when an exchange is due.
      island: this process's.
      join_keeper: as for `islands`.

    Returns:
      The runner, which counts steps as `state.step` does.
    """
    last = LastStep()
    keeper: Keeper | None = None
    learner = _Learner(island)

    def run(state: Any, pending: Any, shards: Any, memory: Any, rows: Any) -> tuple[Any, Any, Any]:
        nonlocal last, keeper
        now, due = last.following(steps, state.step)
        if now.number <= steps.start:
            result, shards, _ = together.run(state, pending, shards, (), rows)
            last = now._replace(step=result[0].step)
            return result, shards, memory
        held = join(state, shards)
        if keeper is None and join_keeper:
            keeper = join_keeper(island, held)
        bare, own = _bare(held)
        with island.members.recovery:
            (new, info), own, _ = alone.run(bare, pending, own, (), rows)
        new = _whole(join(new, own), held)
        last = now._replace(step=new.step)
        if keeper and due:
            given = learner.learned(new)
            new = learner.landed(steps.mix, new, keeper.give(given))
            if island.members.is_main:
                nbytes = sum(x.nbytes for x in given.change)
                info = info._replace(sent=info.sent.at[-1].set(more_sent(info.sent[-1], nbytes)))
        new, shards = take_apart(new)
        return (new, info), shards, memory

    def meet(state: TrainState) -> TrainState:
        if keeper is None:
            return state
        given = learner.learned(state)
        if given.weight:
            keeper.give(given)
        return learner.landed(0.0, state, keeper.meet())  # now all islands are equal

    def lower(state: Any, pending: Any, shards: Any, memory: Any, rows: Any) -> jax.stages.Lowered:
        if together_is_due(state):
            return together.lower(state, pending, shards, (), rows)  # pyright: ignore[reportOptionalCall]
        bare, own = _bare(join(state, shards))
        return alone.lower(bare, pending, own, (), rows)  # pyright: ignore[reportOptionalCall]

    def tasks(state: Any, pending: Any, shards: Any, rows: Any) -> Any:
        if together_is_due(state):
            return together.tasks(state, pending, shards, rows)
        bare, own = _bare(join(state, shards))
        return alone.tasks(bare, pending, own, rows)

    def together_is_due(state: Any) -> bool:
        if not steps.start or isinstance(state.step, jax.ShapeDtypeStruct):
            return False
        return last.following(steps, state.step)[0].number <= steps.start

    return alone._replace(
        run=run,
        lower=lower if alone.lower else None,
        tasks=tasks,
        meet=meet,
        waits=together_is_due,
    )


@dataclass
class _Learner:
    """An island, and the shared parameters that it took last."""

    island: Island
    taken: int | None = None
    """Their version; None before the first exchange."""

    def learned(self, state: TrainState) -> Contribution:
        """The island's contribution; refuses a state that is not the last."""
        given = self.island.contribution(state)
        if self.taken not in (None, given.began):
            raise ValueError(
                f"this state has version {given.began} of the shared parameters, and the island has taken version "
                f"{self.taken} last: give the state that the last step returned, or begin anew with another "
                "fddp.train_step."
            )
        return given

    def landed(self, mix: float, state: TrainState, newest: SharedParams) -> TrainState:
        """The state with which the island goes on."""
        self.taken = newest.version
        return self.island.landed(mix, state, newest)


def _bare(held: TrainState) -> tuple[Any, Any]:
    """A state without what islands share, which a step alone neither reads nor writes, taken apart."""
    return take_apart(held._replace(opt_state=held.opt_state._replace(shared=(), version=(), outer=())))


def _whole(bare: TrainState, held: TrainState) -> TrainState:
    """A state with what islands share of another: the inverse of `_bare`."""
    kept: IslandState = held.opt_state
    opt_state = bare.opt_state._replace(shared=kept.shared, version=kept.version, outer=kept.outer)
    return bare._replace(opt_state=opt_state)
