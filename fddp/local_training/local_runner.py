"""The way of replicas that train separately, and its runner of the three kinds of step."""

from dataclasses import replace
from functools import cache, partial
from typing import Any, NamedTuple

import jax
from jaxtyping import PyTree

from fddp.comm import Group, nothing_to_compare, verify
from fddp.hooks import Hook
from fddp.local_training.fragments import Fragment, scalars_of
from fddp.local_training.inside import (
    hold,
    keys_of_island,
    own_rows,
    own_view,
    whole_view,
    within_island,
)
from fddp.local_training.last_step import LastStep
from fddp.local_training.local_pieces import Local
from fddp.local_training.own_means import own_means
from fddp.local_training.remembered import (
    by_messages_and_leaves,
    first_memory,
    in_places,
    memory_forms,
)
from fddp.local_training.trained_alone import by_itself, counted
from fddp.local_training.wire import RANGE
from fddp.losses import Joined, Pending, Sums
from fddp.optim import LocalState, LocalSteps, check_fields
from fddp.schedules import Pieces, Runner, Schedule, StepInputs, StepOutputs, rehearse
from fddp.step import ALONE, ISLANDS, LOCAL, WHOLE, Facts, Replica, TrainState, Way

# The kind of a step that averages gradients. All other kinds are the numbers of its exchanges.
TOGETHER = (-1,)


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
            f"local_steps: start={steps.start} does not work with shard='state', because islands "
            "begin with whole parameters: give shard='optimizer', or start=0."
        )
    trained = replica.trained(params)
    check_fields(steps.others, jax.eval_shape(steps.inner.init, trained), trained)
    return inner.check(replace(replica, way=inner), optimizer.inner, params)


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
    return local_runner(
        schedule, *kinds(steps, inner, replica, facts), replica.group, replica.options.donate
    )


def kinds(steps: LocalSteps, inner: Way, replica: Replica, facts: Facts) -> tuple[Local, Pieces]:
    """Makes the local steps of islands, and the pieces of a step that averages all gradients."""
    scalars = scalars_of(facts)
    fragments = [
        Fragment(steps, replica, number, facts.plan, scalars) for number in range(steps.fragments)
    ]
    for fragment in fragments:
        fragment.check()
    counts = counted(facts, isinstance(facts.batch, Joined))
    single = steps.replicas(replica.group.parts) == 1 and not inner.apart
    island = (
        by_itself(replica, counts)
        if single
        else inner.pieces(within_island(replica, inner), counts)
    )
    synchronous = inner.pieces(replace(replica, way=inner), counts)
    local = Local(
        replica,
        island,
        steps,
        facts.plan,
        [*fragments, *own_means(steps, inner, replica, facts, scalars)],
    )
    return local, local.together(synchronous)


class Latest(NamedTuple):
    """The last step, or the one that is due, and its runner."""

    last: LastStep
    runner: Runner


def local_runner(
    schedule: Schedule, local: Local, synchronous: Pieces, group: Group, donate: bool
) -> Runner:
    """Makes a runner that schedules each kind of step when it is first due.

    With `donate` programs may reuse the memory of the state.
    """

    @cache
    def of_kind(kind: tuple[int, ...]) -> Runner:
        makers = {TOGETHER: lambda: synchronous, (): local.alone}
        return schedule(group, makers[kind]() if kind in makers else local.sends(kind), donate)

    first = of_kind((0,))
    latest = Latest(LastStep(), first)

    def due(state: TrainState) -> Latest:
        if isinstance(state.step, jax.ShapeDtypeStruct):
            return latest._replace(runner=first)
        last, kind = latest.last.following(local.steps, state.step)
        return Latest(last, of_kind(TOGETHER if last.number <= local.steps.start else kind))

    def with_places(inputs: StepInputs) -> StepInputs:
        return inputs._replace(memory=in_places(inputs.memory))

    def run(inputs: StepInputs) -> StepOutputs:
        nonlocal latest
        current = due(inputs.state)
        outputs = current.runner.run(with_places(inputs))
        latest = current._replace(last=current.last._replace(step=outputs.result[0].step))
        return outputs._replace(memory=by_messages_and_leaves(outputs.memory))

    def lower(inputs: StepInputs) -> jax.stages.Lowered:
        return due(inputs.state).runner.lower(with_places(inputs))  # type: ignore

    def rehearse_all(*arguments: Any) -> None:
        def attempt() -> None:
            memory = memory_forms(local.replica, local.plan)
            for number in range(len(local.exchanges)):
                rehearse(group, local.sends((number,)), memory, *arguments)

        verify(group, "synchronizations", attempt, nothing_to_compare)

    return Runner(
        run,
        None if first.lower is None else lower,
        None if first.timeline is None else lambda: latest.runner.timeline(),  # type: ignore
        lambda state, *arguments: due(state).runner.tasks(state, *arguments),
        lambda inputs: first.footprint(with_places(inputs)),
        first.promises,
        rehearse_all,
    )
