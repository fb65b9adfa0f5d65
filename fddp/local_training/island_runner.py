"""The way of islands that do not wait for each other, and its runner.

An island trains alone. Now and then it sends its pseudo-gradient to the keeper of the shared parameters, which answers
with the newest ones when the quorum is there. Here no message goes from replica to replica.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax

from fddp.buckets import join, take_apart
from fddp.comm import Recovery
from fddp.local_training.fragments import Fragment, scalars_of
from fddp.local_training.island_state import contribution, landed
from fddp.local_training.last_step import LastStep
from fddp.local_training.local_pieces import Local, by_itself, counted
from fddp.local_training.local_runner import alone
from fddp.local_training.merging import Contribution, Leaves
from fddp.losses import Joined
from fddp.optim import IslandState, LocalSteps
from fddp.schedules import Runner, Schedule
from fddp.step import QUORUM, WHOLE, Copy, Cut, Facts, Held, Replica, TrainState, Way, refuse


class Keeper(NamedTuple):
    """The keeper of the shared parameters, as an island sees it."""

    give: Callable[[Contribution], tuple[int, Leaves]]
    """Sends a pseudo-gradient, and returns the newest parameters, with their version, once it is merged."""
    meet: Callable[[], tuple[int, Leaves]]
    """Waits until all islands meet, and returns the newest parameters."""


# Joins the keeper when an island makes its first step, with the state that it begins with; every island calls it.
JoinKeeper = Callable[[Replica, TrainState], Keeper]


def islands(steps: LocalSteps, join_keeper: JoinKeeper | None) -> Way:
    """Makes the way.

    Args:
      steps: the optimizer, made by `fddp.local_steps` with a quorum.
      join_keeper: joins the keeper; None: islands only train, and whoever steps them merges.

    Returns:
      The way.
    """
    return alone(steps, WHOLE)._replace(
        name=QUORUM,
        more=(),
        check_batch=_check_batch,
        hold=_hold,
        seen=_seen,
        runner=partial(_runner, steps, join_keeper),
        waits=False,
    )


def _check_batch(replica: Replica, batch: Any, rows: int) -> None:
    del rows
    if isinstance(batch, Joined):
        refuse(replica.asked | {"fddp.join": "fddp.join"})


def _hold(replica: Replica, trained: Any, opt_state: Any, model_state: Any, cut: Cut, copy: Copy) -> Held:
    del replica, cut
    return jax.tree.map(copy, (trained, opt_state, model_state))


def _seen(replica: Replica, state: TrainState) -> TrainState:
    del replica
    if not isinstance(state.opt_state, IslandState):
        raise ValueError(
            f"the optimizer's state is {type(state.opt_state).__name__}, and this step was made with {QUORUM}: begin "
            "with step.init(fddp.whole(state.params))."
        )
    return state._replace(opt_state=state.opt_state.inner)


def _runner(
    steps: LocalSteps, join_keeper: JoinKeeper | None, schedule: Schedule, replica: Replica, facts: Facts
) -> Runner:
    group = replica.group
    if group.size > group.processes:
        raise ValueError(
            f"an island that does not wait is a process of one replica, and this group has {group.size} replicas in "
            f"{group.processes}: start a process for each island, or let fddp.simulate_islands show what they would do."
        )
    counts = counted(facts, joined=False)
    everything = Fragment(steps, replica, 0, facts.plan, scalars_of(facts))
    pieces = Local(replica, by_itself(replica, counts), [everything]).alone()
    # After an error an island goes on by itself: no message of another rank could meet a wrong one of its own.
    on_its_own = dataclasses.replace(group, recovery=Recovery(lambda place, seconds: True))
    inner = schedule(on_its_own, pieces, replica.options.donate)
    return island_runner(inner, steps, replica, join_keeper)


def island_runner(inner: Runner, steps: LocalSteps, replica: Replica, join_keeper: JoinKeeper | None) -> Runner:
    """Makes the runner.

    Args:
      inner: a step of an island alone.
      steps: says when an exchange is due.
      replica: what one replica does.
      join_keeper: as for `islands`.

    Returns:
      The runner, which counts steps as `state.step` does.
    """
    last = LastStep()
    keeper: Keeper | None = None
    island = replica.group.rank

    def run(state: Any, pending: Any, shards: Any, memory: Any, rows: Any) -> tuple[Any, Any, Any]:
        nonlocal last, keeper
        held = join(state, shards)
        if keeper is None and join_keeper:
            keeper = join_keeper(replica, held)
        now, fragment = last.following(steps, held.step)
        bare, own = _bare(held)
        (new, info), own, _ = inner.run(bare, pending, own, (), rows)
        new = _whole(join(new, own), held)
        last = now._replace(step=new.step)
        if keeper and fragment is not None:
            given = contribution(replica, island, new)
            new = landed(replica, steps.mix, new, *keeper.give(given))
            info = info._replace(sent=info.sent.at[-1].add(sum(x.nbytes for x in given.change)))
        new, shards = take_apart(new)
        return (new, info), shards, memory

    def meet(state: TrainState) -> TrainState:
        if keeper is None:
            return state
        given = contribution(replica, island, state)
        if given.weight:
            keeper.give(given)
        return landed(replica, steps.mix, state, *keeper.meet())

    def lower(state: Any, pending: Any, shards: Any, memory: Any, rows: Any) -> jax.stages.Lowered:
        bare, own = _bare(join(state, shards))
        return inner.lower(bare, pending, own, (), rows)  # pyright: ignore[reportOptionalCall]

    def tasks(state: Any, pending: Any, shards: Any, rows: Any) -> Any:
        bare, own = _bare(join(state, shards))
        return inner.tasks(bare, pending, own, rows)

    return inner._replace(run=run, lower=lower if inner.lower else None, tasks=tasks, meet=meet)


def _bare(held: TrainState) -> tuple[Any, Any]:
    """A state without the shared parameters, which a step alone neither reads nor writes, taken apart."""
    return take_apart(held._replace(opt_state=held.opt_state._replace(shared=(), version=())))


def _whole(bare: TrainState, held: TrainState) -> TrainState:
    """A state with the shared parameters of another: the inverse of `_bare`."""
    kept: IslandState = held.opt_state
    return bare._replace(opt_state=bare.opt_state._replace(shared=kept.shared, version=kept.version))
