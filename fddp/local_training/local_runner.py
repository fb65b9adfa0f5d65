"""The way of replicas that train separately, and its runner of the three kinds of step."""

from dataclasses import dataclass, replace
from functools import cache
from typing import Any, ClassVar

import jax
from jaxtyping import PyTree

from fddp.buckets import Shard
from fddp.comm import Group, nothing_to_compare, verify
from fddp.hooks import Hook
from fddp.local_training.fragments import Fragment, check_fragments, scalars_of
from fddp.local_training.inside import (
    copies_held,
    keys_of_island,
    own_rows,
    own_view,
    parts_held,
    whole_view,
    within_island,
)
from fddp.local_training.local_means import local_means
from fddp.local_training.local_optimizer import LocalSteps
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
from fddp.step import (
    ALONE,
    ISLANDS,
    LOCAL,
    Agreed,
    Copy,
    Cut,
    Held,
    LocalState,
    Options,
    Replica,
    Training,
    TrainState,
    Travels,
    Way,
)

# The kind of a step that averages gradients. All other kinds are the numbers of its exchanges.
TOGETHER = (-1,)


class SyncSteps(LocalSteps):
    """Local steps of islands that wait for each other."""

    def way(self, inner: Way) -> Way:
        """Returns the way of local steps."""
        return local_way(self, inner)


def local_way(steps: LocalSteps, inner: Way) -> Way:
    """Makes the way of local steps, whose islands hold their state in the way `inner`."""
    return LocalWay(
        steps=steps,
        inner=inner,
        name=LOCAL,
        more=(ALONE if steps.island == 1 else ISLANDS,),
        described=repr(steps),
        schedule=inner.schedule,
        apart=True,
        scattered=inner.scattered,
    )


@dataclass(frozen=True, kw_only=True)
class LocalWay(Way):
    """Each island holds a state of its own, and trains separately between exchanges."""

    steps: LocalSteps
    inner: Way
    """The way in which the replicas of an island hold its state."""

    opt_state: ClassVar[type] = LocalState

    def check(self, replica: Replica, optimizer: Any, params: PyTree) -> str:
        """Refuses fields that no inner optimizer has, and what the inner way refuses."""
        steps = self.steps
        if steps.start and replica.options.shard == "state":
            raise ValueError(
                f"local_steps: start={steps.start} does not work with shard='state', because "
                "islands begin with whole parameters: give shard='optimizer', or start=0."
            )
        trained = replica.trained(params)
        check_fields(steps.others, jax.eval_shape(steps.inner.init, trained), trained)
        return self.inner.check(replace(replica, way=self.inner), optimizer, params)

    def travels(self, options: Options, group: Group) -> Travels:
        """Gradients and pseudo-gradients of islands are sent whole."""
        forms = self.inner.travels(options, group)
        rounds = forms.rounds and self.scattered
        return forms._replace(table_rows=False, slices=False, rounds=rounds)

    def hold(self, replica: Replica, whole: Held, cut: Cut, copy: Copy) -> Held:
        """Cuts the arrays that the replicas of an island share, and copies the others."""
        trained, opt_state, model_state = whole
        group = replica.group

        def cut_in_each(x: Any, leaf: int) -> Shard:
            return replace(cut(x, leaf), copies=True, ranks=group.copy_ranks, nodes=group.nodes)

        params, inner = parts_held(self.inner, replica, trained, opt_state.inner, cut_in_each)
        params, inner, weight, buffers = copies_held(
            (params, inner, opt_state.weight, model_state), copy
        )
        return params, opt_state._replace(inner=inner, weight=weight), buffers

    def seen(self, replica: Replica, state: TrainState) -> TrainState:
        """Returns the state with that of the inner optimizer."""
        del replica
        if not isinstance(state.opt_state, self.opt_state):
            raise ValueError(
                f"the optimizer's state is {type(state.opt_state).__name__}, and this step was "
                f"made with {self.name}: begin with step.init(fddp.whole(state.params))."
            )
        return state._replace(opt_state=state.opt_state.inner)

    def remembers(self, replica: Replica, hook: Hook, forms: PyTree) -> Any:
        """Makes the hook's first state of each exchange."""
        island_size = self.steps.replicas(replica.group.parts)
        averages = bool(self.steps.start) or island_size > 1
        return first_memory(hook, forms, island_size, RANGE, averages=averages)

    def accumulate(
        self,
        replica: Replica,
        state: TrainState,
        shards: PyTree,
        pending: Pending | None,
        rows: PyTree,
    ) -> tuple[Pending, Sums]:
        """Adds rows to the pending sums of an island."""
        view = own_view(state, shards)
        rows = own_rows(rows)
        if self.trains_alone(replica):
            return replica.accumulate(view, pending, rows)
        view = whole_view(replica.group, view)._replace(rng=keys_of_island(replica.group, view.rng))
        return within_island(replica, self.inner).accumulate(view, pending, rows)

    def pieces(self, replica: Replica, agreed: Agreed) -> Pieces:
        """Makes the pieces of a step within an island."""
        return self.inner.pieces(replica, agreed)

    def runner(self, schedule: Schedule, replica: Replica, agreed: Agreed) -> Runner:
        """Makes a runner that schedules each kind of step when it is first due."""
        steps = self.steps
        local, synchronous = self.kinds(replica, agreed)
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
        last = Training()

        def due(state: TrainState) -> tuple[int, Runner]:
            if isinstance(state.step, jax.ShapeDtypeStruct):
                return 0, first
            number = last.of(state.step) + 1
            return number, of_kind(TOGETHER if number <= steps.start else steps.sends(number))

        def with_places(inputs: StepInputs) -> StepInputs:
            return inputs._replace(memory=in_places(inputs.memory))

        def run(inputs: StepInputs) -> StepOutputs:
            nonlocal latest
            number, runner = due(inputs.state)
            outputs = runner.run(with_places(inputs))
            last.step, last.number, latest = outputs.result[0].step, number, runner
            return outputs._replace(memory=by_messages_and_leaves(outputs.memory))

        def lower(inputs: StepInputs) -> jax.stages.Lowered:
            return due(inputs.state)[1].lower(with_places(inputs))  # type: ignore

        def rehearse_all(*arguments: Any) -> None:
            def attempt() -> None:
                memory = memory_forms(replica, agreed.plan)
                for number in range(len(local.exchanges)):
                    rehearse(group, local.sends((number,)), memory, *arguments)

            verify(group, "synchronizations", attempt, nothing_to_compare)

        runner = Runner(
            run,
            lower=None,
            timeline=None,
            tasks=lambda state, *arguments: due(state)[1].tasks(state, *arguments),
            promises=first.promises,
            rehearse=rehearse_all,
        )
        if first.lower:
            runner = runner._replace(lower=lower)
        if first.timeline:
            runner = runner._replace(timeline=lambda: latest.timeline())  # type: ignore
        return runner

    def kinds(self, replica: Replica, agreed: Agreed) -> tuple[Local, Pieces]:
        """Makes the local steps of islands, and the pieces of a synchronous step."""
        steps = self.steps
        inner = self.inner
        check_fragments(steps, agreed.plan)
        scalars = scalars_of(agreed)
        fragments = [
            Fragment(steps, replica, number, agreed.plan, scalars)
            for number in range(steps.fragments)
        ]
        exchanges = [*fragments, *local_means(steps, inner, replica, agreed, scalars)]
        counts = counted(agreed, isinstance(agreed.rows, Joined))
        if self.trains_alone(replica):
            island = by_itself(replica, counts)
        else:
            island = inner.pieces(within_island(replica, inner), counts)
        local = Local(replica, island, steps, exchanges)
        return local, local.together(inner.pieces(replace(replica, way=inner), counts))

    def trains_alone(self, replica: Replica) -> bool:
        """True if an island is one replica with a whole state."""
        return self.steps.replicas(replica.group.parts) == 1 and not self.inner.apart
