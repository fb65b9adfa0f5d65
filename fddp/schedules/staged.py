"""Steps of several programs that end when they return: computing beside messages, or one task after the other."""

from collections.abc import Callable
from functools import partial
from typing import Any

from fddp.comm import Group
from fddp.hooks import Memory
from fddp.jax_internals import without_jit
from fddp.schedules.ahead_of_time import compiled
from fddp.schedules.hook_memory import remembered
from fddp.schedules.launcher import Launcher
from fddp.schedules.lists import in_one_piece, in_stages
from fddp.schedules.pieces import MakeList, Pieces, Runner
from fddp.schedules.planned_memory import of_tasks
from fddp.schedules.programs import MakePrograms, jitted, preparing
from fddp.schedules.queues import HERE, QueueOf, as_listed, heard, speaks
from fddp.schedules.send import side_by_side
from fddp.schedules.tasks import TaskList


def staged(group: Group, pieces: Pieces, donate: bool) -> Runner:
    """Cuts the backward pass where buckets become ready: the main thread runs stages, another one sends their messages.

    For hosts whose XLA overlaps nothing by itself (CPU).

    Args:
      group: the replicas.
      pieces: the step.
      donate: whether updates may reuse the state's memory.

    Returns:
      The runner; stages are cut and compiled once for each form of its arguments.
    """
    return on_threads(group, partial(in_stages, group.placement, pieces), donate)


def after(group: Group, pieces: Pieces, donate: bool) -> Runner:
    """Runs the baseline: traffic starts when the backward is done, one all-reduce at a time (paper, section 3.2.1).

    Args:
      group: the replicas.
      pieces: the step.
      donate: whether the last program may reuse the state's memory.

    Returns:
      The runner.
    """
    return in_order(group, partial(in_one_piece, group.placement, pieces), donate)


def on_threads(group: Group, make: MakeList, donate: bool, programs: MakePrograms = compiled) -> Runner:
    """Launches compute tasks in order and sends each message as soon as it is made.

    Messages leave in the order of the list on every rank, one at a time on each of the clones of the transport.

    Args:
      group: the replicas.
      make: makes the list.
      donate: whether programs may reuse the state's memory.
      programs: makes programs of its tasks.

    Returns:
      The runner.
    """

    def queues_of(listed: TaskList) -> QueueOf:
        count = len(side_by_side(group, [task.reduction for task in listed.messages]))
        queues = {task.name: f"all-reduce {k % count}" for k, task in enumerate(listed.messages)}
        first = "all-reduce 0"
        return heard(group, lambda task: queues.get(task.name, first if speaks(task) else HERE))

    check = partial(refuse_without_jit, "staged")
    return _launched(group, make, queues_of, donate, programs, check, Launcher(group))


def in_order(group: Group, make: MakeList, donate: bool, programs: MakePrograms = jitted) -> Runner:
    """Launches each task of a list when the one before it is done.

    Args:
      group: the replicas.
      make: makes the list.
      donate: whether programs may reuse the state's memory.
      programs: makes programs of its tasks.

    Returns:
      The runner.
    """
    all_here = lambda listed: lambda task: HERE  # noqa: E731
    return _launched(group, make, all_here, donate, programs, lambda: None, Launcher(group, ahead=0))


def refuse_without_jit(schedule: str) -> None:
    """Refuses to run a schedule of stages operation by operation."""
    if without_jit():
        raise ValueError(
            f"under jax.disable_jit() a loss runs operation by operation, and schedule={schedule!r} has cut it into "
            "compiled stages: make the step with schedule='after' to look inside."
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
    prepare = preparing(group, make, as_listed(queues_of), programs, donate)

    def run(state: Any, pending: Any, shards: Any, memory: Memory, rows: Any) -> tuple[Any, Any, Memory]:
        check()
        rows = group.placement.place(rows, group.placement.per_replica)
        now = prepare(state, pending, shards, rows)
        values = now.listed.enter(state, pending, shards, rows)
        launcher.log.begin(now.listed.tasks)
        done = launcher.launch(now, now.arranged.routes[0], values, memory=memory)
        launcher.log.end()
        return *now.listed.leave(done.results), remembered(done, memory)

    return Runner(run, None, launcher.log.timeline, make, of_tasks(group, prepare))
