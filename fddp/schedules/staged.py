"""Steps of several programs that end when they return: concurrent or in order."""

from collections.abc import Callable
from functools import partial

from fddp.comm import Group
from fddp.jax_internals import without_jit
from fddp.schedules.ahead_of_time import compiled
from fddp.schedules.hook_memory import remembered
from fddp.schedules.launcher import Launcher
from fddp.schedules.lists import in_one_piece, in_stages
from fddp.schedules.pieces import MakeList, Pieces, Runner, Schedule, StepInputs, StepOutputs
from fddp.schedules.programs import MakePrograms, jitted, preparing
from fddp.schedules.queues import HERE, QueueOf, arranging, heard, speaks
from fddp.schedules.send import side_by_side
from fddp.schedules.tasks import TaskList


def _staged(group: Group, pieces: Pieces, donate: bool) -> Runner:
    """Cuts the backward pass where buckets become ready, and sends them from another thread.

    For hosts whose XLA overlaps nothing by itself (CPU). Stages are compiled once for each shape of
    the arguments. If `donate`, updates may reuse the state's memory.
    """
    return on_threads(group, partial(in_stages, group.placement, pieces), donate)


def _after(group: Group, pieces: Pieces, donate: bool) -> Runner:
    """Sends one all-reduce at a time after the backward pass: the baseline (paper, section 3.2.1).

    If `donate`, the last program may reuse the state's memory.
    """
    return in_order(group, partial(in_one_piece, group.placement, pieces), donate)


def on_threads(
    group: Group, make: MakeList, donate: bool, programs: MakePrograms = compiled
) -> Runner:
    """Launches compute tasks in order, and sends each message as soon as it is ready.

    Messages leave in the order of the list on every rank, one at a time on each clone of the
    transport. `make` makes the list, `programs` the programs of its tasks.
    """

    def queues_of(listed: TaskList) -> QueueOf:
        count = len(side_by_side(group, [task.reduction for task in listed.messages]))
        queues = {task.name: "all-reduce 0" for task in listed.tasks if speaks(task)}
        queues |= {task.name: f"all-reduce {k % count}" for k, task in enumerate(listed.messages)}
        return heard(group, lambda task: queues.get(task.name, HERE))

    check = partial(refuse_without_jit, "staged")
    return _launched(group, make, queues_of, donate, programs, check, Launcher(group))


def in_order(group: Group, make: MakeList, donate: bool, programs: MakePrograms = jitted) -> Runner:
    """Launches each task of a list when the previous one has ended."""
    all_here = lambda listed: lambda task: HERE  # noqa: E731
    launcher = Launcher(group, ahead=0)
    return _launched(group, make, all_here, donate, programs, lambda: None, launcher)


staged = Schedule("staged", _staged, launch=on_threads)
after = Schedule("after", _after, cuts=False, launch=in_order)


def refuse_without_jit(schedule: str) -> None:
    """Refuses to run a schedule of stages operation by operation."""
    if without_jit():
        raise ValueError(
            "under jax.disable_jit() a loss runs operation by operation, and "
            f"schedule={schedule!r} has cut it into compiled stages: make the step with "
            "schedule='after' to look inside."
        )


def _launched(
    group: Group,
    make: MakeList,
    queues_of: Callable[[TaskList], QueueOf],
    donate: bool,
    programs: MakePrograms,
    check: Callable[[], None],
    launcher: Launcher,
) -> Runner:
    prepare = preparing(group, make, arranging(queues_of), programs, donate)

    def run(inputs: StepInputs) -> StepOutputs:
        check()
        prepared, values = prepare(inputs)
        launcher.log.begin()
        launched = launcher.launch(prepared, values, memory=inputs.memory)
        launcher.log.end()
        result, shards = prepared.listed.leave(launched.results)
        return StepOutputs(result, shards, remembered(launched, inputs.memory))

    return Runner(run, None, launcher.log.timeline, make)
