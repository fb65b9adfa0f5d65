"""The way of replicas that train separately, and its runner of the three kinds of step."""

from dataclasses import replace
from functools import cache, partial
from typing import Any

import jax
from jaxtyping import PyTree

from fddp.comm import nothing_to_compare, verify
from fddp.hooks import Hook
from fddp.local_training.fragments import Fragment, check_fragments, scalars_of
from fddp.local_training.inside import (
    hold,
    keys_of_island,
    own_rows,
    own_view,
    whole_view,
    within_island,
)
from fddp.local_training.local_means import local_means
from fddp.local_training.local_optimizer import LastStep, LocalSteps
from fddp.local_training.local_pieces import Local
from fddp.local_training.periods import check_fields
from fddp.local_training.remembered import (
    by_messages_and_leaves,
    first_memory,
    in_places,
    memory_forms,
)
from fddp.local_training.trained_alone import by_itself, counted
from fddp.local_training.wire import RANGE
from fddp.losses import Joined, Pending, Sums
from fddp.schedules import Pieces, Runner, Schedule, StepInputs, StepOutputs, rehearse
from fddp.step import ALONE, ISLANDS, LOCAL, WHOLE, Facts, LocalState, Replica, TrainState, Way

# The kind of a step that averages gradients. All other kinds are the numbers of its exchanges.
TOGETHER = (-1,)


class SyncSteps(LocalSteps):
    """Local steps of islands that wait for each other."""

    def way(self, inner: Way) -> Way:
        """Returns the way of local steps."""
        return local_way(self, inner)


def local_way(steps: LocalSteps, inner: Way) -> Way:
    """Makes the way of local steps, whose islands hold their state in the way `inner`."""
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


def _check(steps: LocalSteps, inner: Way, replica: Replica, optimizer: Any, params: PyTree) -> str:
    if steps.start and replica.options.shard == "state":
        raise ValueError(
            f"local_steps: start={steps.start} cannot go with shard='state', as the parameters "
            "that islands begin with are whole: give shard='optimizer', or start=0."
        )
    trained = replica.trained(params)
    check_fields(steps.others, jax.eval_shape(steps.inner.init, trained), trained)
    return inner.check(replace(replica, way=inner), optimizer, params)


def _seen(replica: Replica, state: TrainState) -> TrainState:
    if not isinstance(state.opt_state, LocalState):
        raise ValueError(
            f"the optimizer's state is {type(state.opt_state).__name__}, and this step was made "
            f"with {LOCAL}: begin with step.init(fddp.whole(state.params))."
        )
    return state._replace(opt_state=state.opt_state.inner)


def _remembers(steps: LocalSteps, replica: Replica, hook: Hook, forms: PyTree) -> Any:
    island_size = steps.replicas(replica.group.parts)
    return first_memory(
        hook, forms, island_size, RANGE, averages=bool(steps.start) or island_size > 1
    )


def _accumulate(
    steps: LocalSteps,
    inner: Way,
    replica: Replica,
    state: TrainState,
    shards: PyTree,
    pending: Pending | None,
    rows: PyTree,
) -> tuple[Pending, Sums]:
    view = own_view(state, shards)
    if steps.replicas(replica.group.parts) == 1 and not inner.apart:
        return replica.accumulate(view, pending, own_rows(rows))
    view = whole_view(replica.group, view)._replace(rng=keys_of_island(replica.group, view.rng))
    return within_island(replica, inner).accumulate(view, pending, own_rows(rows))


def _runner(
    steps: LocalSteps, inner: Way, schedule: Schedule, replica: Replica, facts: Facts
) -> Runner:
    """Makes a runner that schedules each kind of step when it is first due."""
    local, synchronous = kinds(steps, inner, replica, facts)
    group = replica.group

    @cache
    def of_kind(kind: tuple[int, ...]) -> Runner:
        if kind == TOGETHER:
            pieces = synchronous
        elif kind:
            pieces = local.sends(kind)
        else:
            pieces = local.alone()
        return schedule(group, pieces, replica.options.donate)

    first = latest = of_kind((0,))
    last = LastStep()

    def due(state: TrainState) -> tuple[LastStep, Runner]:
        if isinstance(state.step, jax.ShapeDtypeStruct):
            return last, first
        following, kind = last.following(steps, state.step)
        return following, of_kind(TOGETHER if following.number <= steps.start else kind)

    def with_places(inputs: StepInputs) -> StepInputs:
        return inputs._replace(memory=in_places(inputs.memory))

    def run(inputs: StepInputs) -> StepOutputs:
        nonlocal last, latest
        following, runner = due(inputs.state)
        outputs = runner.run(with_places(inputs))
        last, latest = following._replace(step=outputs.result[0].step), runner
        return outputs._replace(memory=by_messages_and_leaves(outputs.memory))

    def lower(inputs: StepInputs) -> jax.stages.Lowered:
        return due(inputs.state)[1].lower(with_places(inputs))  # type: ignore

    def rehearse_all(*arguments: Any) -> None:
        def attempt() -> None:
            memory = memory_forms(replica, facts.plan)
            for number in range(len(local.exchanges)):
                rehearse(group, local.sends((number,)), memory, *arguments)

        verify(group, "synchronizations", attempt, nothing_to_compare)

    runner = Runner(
        run,
        lower=None,
        timeline=None,
        tasks=lambda state, *arguments: due(state)[1].tasks(state, *arguments),
        footprint=lambda inputs: first.footprint(with_places(inputs)),
        promises=first.promises,
        rehearse=rehearse_all,
    )
    if first.lower:
        runner = runner._replace(lower=lower)
    if first.timeline:
        runner = runner._replace(timeline=lambda: latest.timeline())  # type: ignore
    return runner


def kinds(steps: LocalSteps, inner: Way, replica: Replica, facts: Facts) -> tuple[Local, Pieces]:
    """Makes the local steps of islands, and the pieces of a step that averages all gradients."""
    check_fragments(steps, facts.plan)
    scalars = scalars_of(facts)
    fragments = [
        Fragment(steps, replica, number, facts.plan, scalars) for number in range(steps.fragments)
    ]
    exchanges = [*fragments, *local_means(steps, inner, replica, facts, scalars)]
    counts = counted(facts, isinstance(facts.batch, Joined))
    if steps.replicas(replica.group.parts) == 1 and not inner.apart:
        island = by_itself(replica, counts)
    else:
        island = inner.pieces(within_island(replica, inner), counts)
    local = Local(replica, island, steps, exchanges)
    return local, local.together(inner.pieces(replace(replica, way=inner), counts))
