"""The runner of a step of replicas that train alone: the step's number says which kind of step is due."""

from functools import cache
from typing import Any

import jax

from fddp.comm import Group, nothing_to_compare, verify
from fddp.schedules import Pieces, Promise, Runner, Schedule, rehearse
from fddp.step.local import Local
from fddp.step.state import TrainState

TOGETHER = -1  # a step that averages gradients; None: one that sends nothing; others send the fragment of this number


def local_runner(schedule: Schedule, local: Local, group: Group, together: Pieces, donate: bool) -> Runner:
    """Makes the runner; the schedule makes each kind of step when that is first due.

    Args:
      schedule: launches the programs of each kind.
      local: makes the pieces of each kind.
      group: the replicas.
      together: the pieces of a step that averages gradients.
      donate: whether programs may reuse the state's memory.

    Returns:
      The runner, which counts steps as `state.step` does.
    """

    @cache
    def of_kind(kind: int | None) -> Runner:
        others = {TOGETHER: lambda: local.together(together), None: local.alone}
        return schedule(group, others[kind]() if kind in others else local.sends(kind or 0), donate)

    first = of_kind(0)
    last: list[Any] = [None, 0, first]  # the step's number as it was returned last, that number, and who ran it

    def due(state: TrainState) -> tuple[Runner, int]:
        if isinstance(state.step, jax.ShapeDtypeStruct):
            return first, 0
        # The number itself is not asked for, where it is known: it may still be computed.
        step = state.step
        if isinstance(step, Promise) and step is not last[0]:
            step = step.result()
        number = last[1] + 1 if step is last[0] else int(jax.device_get(step)) + 1
        steps = local.steps
        return of_kind(TOGETHER if number <= steps.start else steps.sends(number)), number

    def run(state: Any, pending: Any, shards: Any, memory: Any, rows: Any) -> tuple[Any, Any, Any]:
        runner, number = due(state)
        result, shards, _ = runner.run(state, pending, shards, (), rows)
        last[:] = result[0].step, number, runner
        return result, shards, memory

    def lower(state: Any, pending: Any, shards: Any, memory: Any, rows: Any) -> jax.stages.Lowered:
        runner, _ = due(state)
        return runner.lower(state, pending, shards, (), rows)  # type: ignore

    def rehearse_fragments(*arguments: Any) -> None:
        def attempt() -> None:
            for fragment in range(local.steps.fragments):
                rehearse(group, local.sends(fragment), *arguments)

        verify(group, "synchronizations", attempt, nothing_to_compare)

    return Runner(
        run,
        None if first.lower is None else lower,
        None if first.timeline is None else lambda: last[2].timeline(),
        lambda state, *rest: due(state)[0].tasks(state, *rest),
        first.promises,
        rehearse_fragments,
    )
