"""The way of replicas that train alone, and its runner: the step's number says which kind of step is due."""

from dataclasses import replace
from functools import cache, partial
from typing import Any, NamedTuple

import jax

from fddp.comm import Group, nothing_to_compare, verify
from fddp.hooks import Hook
from fddp.local_training.fragments import Fragment, scalars_of
from fddp.local_training.inside import hold, inside, keys_of_island, own_rows, own_view, whole_view
from fddp.local_training.last_step import LastStep
from fddp.local_training.local_pieces import Local
from fddp.local_training.own_means import own_means
from fddp.local_training.remembered import by_kind, first_memory, in_places, memory_forms
from fddp.local_training.trained_alone import by_itself, counted
from fddp.local_training.wire import RANGE
from fddp.losses import Joined, Pending, Sums
from fddp.optim import LocalState, LocalSteps, check_fields
from fddp.schedules import Pieces, Runner, Schedule, rehearse
from fddp.step import ALONE, ISLANDS, LOCAL, WHOLE, Facts, Replica, TrainState, Way

TOGETHER = (-1,)  # a step that averages gradients; other numbers are those of what it sends to other islands


def alone(steps: LocalSteps, inner: Way) -> Way:
    """Makes the way.

    Args:
      steps: the optimizer, made by `fddp.local_steps`.
      inner: the way in which the replicas of an island hold a state.

    Returns:
      The way.
    """
    return inner._replace(
        name=LOCAL,
        more=(ALONE if steps.island == 1 else ISLANDS,),
        described=repr(steps),
        check=partial(_check, steps, inner),
        hold=partial(hold, inner),
        seen=_seen,
        gathered=WHOLE.gathered,
        remembers=partial(_remembers, steps),
        accumulate=partial(_accumulate, steps, inner),
        runner=partial(_runner, steps, inner),
        apart=True,
        table_rows=False,
        slices=False,
    )


def _check(steps: LocalSteps, inner: Way, replica: Replica, optimizer: Any, params: Any) -> str:
    if steps.start and replica.options.shard == "state":
        raise ValueError(
            f"local_steps: start={steps.start} cannot go with shard='state', as the parameters that islands begin with "
            "are whole: give shard='optimizer', or start=0."
        )
    trained = replica.trained(params)
    check_fields(steps.others, jax.eval_shape(steps.inner.init, trained), trained)
    return inner.check(replace(replica, way=inner), optimizer.inner, params)


def _seen(replica: Replica, state: TrainState) -> TrainState:
    if not isinstance(state.opt_state, LocalState):
        raise ValueError(
            f"the optimizer's state is {type(state.opt_state).__name__}, and this step was made with {LOCAL}: begin "
            "with step.init(fddp.whole(state.params))."
        )
    return state._replace(opt_state=state.opt_state.inner)


def _remembers(steps: LocalSteps, replica: Replica, hook: Hook, forms: Any) -> Any:
    parts = steps.replicas(replica.group.parts)
    return first_memory(hook, forms, parts, RANGE, averages=bool(steps.start) or parts > 1)


def _accumulate(
    steps: LocalSteps,
    inner: Way,
    replica: Replica,
    state: TrainState,
    shards: Any,
    pending: Pending | None,
    rows: Any,
) -> tuple[Pending, Sums]:
    view = own_view(state, shards)
    if steps.replicas(replica.group.parts) == 1 and not inner.apart:
        return replica.accumulate(view, pending, own_rows(rows))
    view = whole_view(replica.group, view)._replace(rng=keys_of_island(replica.group, view.rng))
    return inside(replica, inner).accumulate(view, pending, own_rows(rows))


def _runner(steps: LocalSteps, inner: Way, schedule: Schedule, replica: Replica, facts: Facts) -> Runner:
    return local_runner(schedule, *kinds(steps, inner, replica, facts), replica.group, replica.options.donate)


def kinds(steps: LocalSteps, inner: Way, replica: Replica, facts: Facts) -> tuple[Local, Pieces]:
    """Makes the kinds of step.

    Args:
      steps: the optimizer.
      inner: the way in which the replicas of an island hold a state.
      replica: one of all.
      facts: of the step.

    Returns:
      The steps of islands, and the pieces of a step that averages the gradients of all replicas.
    """
    scalars = scalars_of(facts)
    fragments = [Fragment(steps, replica, number, facts.plan, scalars) for number in range(steps.fragments)]
    for fragment in fragments:
        fragment.check()
    counts = counted(facts, isinstance(facts.batch, Joined))
    one = steps.replicas(replica.group.parts) == 1 and not inner.apart
    island = by_itself(replica, counts) if one else inner.pieces(inside(replica, inner), counts)
    together = inner.pieces(replace(replica, way=inner), counts)
    local = Local(replica, island, steps, facts.plan, [*fragments, *own_means(steps, inner, replica, facts, scalars)])
    return local, local.together(together)


class Latest(NamedTuple):
    """The step that ran last, or is due, and what runs it."""

    last: LastStep
    runner: Runner


def local_runner(schedule: Schedule, local: Local, together: Pieces, group: Group, donate: bool) -> Runner:
    """Makes the runner; the schedule makes each kind of step when that is first due.

    Args:
      schedule: launches the programs of each kind.
      local: makes the pieces of each kind.
      together: the pieces of a step that averages gradients.
      group: the replicas.
      donate: whether programs may reuse the state's memory.

    Returns:
      The runner, which counts steps as `state.step` does.
    """

    @cache
    def of_kind(kind: tuple[int, ...]) -> Runner:
        others = {TOGETHER: lambda: together, (): local.alone}
        return schedule(group, others[kind]() if kind in others else local.sends(kind), donate)

    first = of_kind((0,))
    latest = Latest(LastStep(), first)

    def due(state: TrainState) -> Latest:
        if isinstance(state.step, jax.ShapeDtypeStruct):
            return latest._replace(runner=first)
        last, kind = latest.last.following(local.steps, state.step)
        return Latest(last, of_kind(TOGETHER if last.number <= local.steps.start else kind))

    def run(state: Any, pending: Any, shards: Any, memory: Any, rows: Any) -> tuple[Any, Any, Any]:
        nonlocal latest
        now = due(state)
        result, shards, places = now.runner.run(state, pending, shards, in_places(memory), rows)
        latest = now._replace(last=now.last._replace(step=result[0].step))
        return result, shards, by_kind(places)

    def lower(state: Any, pending: Any, shards: Any, memory: Any, rows: Any) -> jax.stages.Lowered:
        return due(state).runner.lower(state, pending, shards, in_places(memory), rows)  # type: ignore

    def rehearse_all(*arguments: Any) -> None:
        def attempt() -> None:
            memory = memory_forms(local.replica, local.plan)
            for number in range(len(local.exchanges)):
                rehearse(group, local.sends((number,)), memory, *arguments)

        verify(group, "synchronizations", attempt, nothing_to_compare)

    return Runner(
        run,
        None if first.lower is None else lower,
        None if first.timeline is None else lambda: latest.runner.timeline(),  # pyright: ignore[reportOptionalCall]
        lambda state, *rest: due(state).runner.tasks(state, *rest),
        lambda state, pending, shards, memory, rows: first.footprint(state, pending, shards, in_places(memory), rows),
        first.promises,
        rehearse_all,
    )
