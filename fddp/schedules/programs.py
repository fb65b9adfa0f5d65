"""The compute tasks of a list as XLA programs, one each, and what else is made once for each form of arguments."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import jax
from jax.sharding import PartitionSpec

from fddp.comm import REPLICATED, Group, Placement, of_one_replica
from fddp.schedules.compiling import Compiling, compiling, first_call
from fddp.schedules.pieces import MakeList
from fddp.schedules.queues import Arrange, Arranged, forms_promised
from fddp.schedules.send import Sent, sending
from fddp.schedules.shown import named
from fddp.schedules.tasks import MESSAGE, SHARDS, STATE, Compute, TaskList, Value

# By the names of tasks: (values that are read) -> values that are written.
Programs: TypeAlias = dict[str, Callable[..., Sequence[Any]]]
# The values whose memory a task may have, for each task by name.
Freed: TypeAlias = Mapping[str, Sequence[Value]]
# (placement, tasks, values that are there at first, what each task may have of the state's memory, reports what
# compiles)
MakePrograms: TypeAlias = Callable[[Placement, TaskList, Mapping[Value, Any], Freed, Compiling], Programs]


class Prepared(NamedTuple):
    """A list, ready to be launched."""

    listed: TaskList
    arranged: Arranged
    programs: Programs
    made: Programs
    """The same as XLA has made them, or will when they are first called: without what shows their names."""
    send: Callable[..., Sent]
    """Sends its messages."""
    numbers: dict[Value, int]
    """The places of its messages, in the order of the list."""


def preparing(
    group: Group, make: MakeList, arrange: Arrange, programs: MakePrograms, donate: bool
) -> Callable[..., Prepared]:
    """Makes a function that prepares a list, once for each form of a step's arguments.

    Args:
      group: the replicas.
      make: makes the list.
      arrange: arranges it for the launcher.
      programs: `jitted`, `compiled` or `on_each_device`.
      donate: whether a task may reuse memory of the state that no later task reads.

    Returns:
      (state, pending, shards, rows), as all replicas together have them → the list, ready to be launched.
    """
    known: dict[Any, Prepared] = {}

    def prepare(*arguments: Any) -> Prepared:
        leaves, treedef = jax.tree.flatten(arguments)
        form = (treedef, *((x.shape, x.dtype) for x in leaves))
        if form not in known:
            state, *own = forms_promised(arguments)
            listed = make(of_one_replica(state, 1), *of_one_replica(own, group.placement.replicas_in_array))
            arranged = arrange(listed)
            arranged = arranged if donate else replace(arranged, freed={})
            values = listed.enter(state, *own)
            made = programs(group.placement, listed, values, arranged.freed, partial(compiling, group))
            send = sending(group, [task.reduction for task in listed.messages])
            numbers = {task.reads[0]: number for number, task in enumerate(listed.messages)}
            known[form] = Prepared(listed, arranged, named(made), made, send, numbers)
        return known[form]

    return prepare


def jitted(
    placement: Placement, listed: TaskList, values: Mapping[Value, Any], freed: Freed, says: Compiling
) -> Programs:
    """Programs that XLA compiles when they are first called.

    Args:
      placement: where they run.
      listed: the tasks.
      values: those that are there at first.
      freed: the values whose memory a task may have, for each task by name.
      says: reports what compiles.

    Returns:
      A program for each compute task, by its name.
    """
    del values

    def program(task: Compute) -> Callable[..., Sequence[Any]]:
        free = [at for at, name in enumerate(task.reads) if name in freed.get(task.name, ()) and of_state(name)]
        return first_call(program_of(placement, task, free), task.name, says)

    return {task.name: program(task) for task in listed.tasks if isinstance(task, Compute)}


def on_each_device(
    placement: Placement, listed: TaskList, values: Mapping[Value, Any], freed: Freed, says: Compiling
) -> Programs:
    """Programs of one replica: each replica of this process runs them by itself, and XLA knows of no others.

    XLA compiles a program of all replicas for their number, and it may round differently for another number.

    Args:
      placement: where they run.
      listed: the tasks.
      values: those that are there at first: tuples of what each replica has.
      freed: the values whose memory a task may have, for each task by name.
      says: reports what compiles.

    Returns:
      A program for each compute task, by its name; tasks that share a function share a program.
    """
    del values
    known = dict[Any, Callable[..., Sequence[Any]]]()

    def program(task: Compute) -> Callable[..., Sequence[Any]]:
        # Updates alone donate: a stage that did would no longer share a program with the same stage of others.
        own = freed.get(task.name, ()) if task.kind == "update" else ()
        free = tuple(at for at, name in enumerate(task.reads) if name in own and of_state(name))
        free += tuple(range(task.reuses))
        if (task.run, free) not in known:
            known[task.run, free] = first_call(jax.jit(task.run, donate_argnums=free), task.name, says)
        one = known[task.run, free]

        def run(*read: Any) -> Sequence[Any]:
            of_each = zip(*(x if isinstance(x, tuple) else placement.each(x) for x in read))
            made = zip(*[one(*given) for given in of_each])
            return [_joined(placement, value, arrays) for value, arrays in zip(task.writes, made)]

        return run

    return {task.name: program(task) for task in listed.tasks if isinstance(task, Compute)}


def _joined(placement: Placement, value: Value, arrays: tuple[Any, ...]) -> Any:
    """Joins the arrays of a value that is sent or returned into one; all other values stay with each replica."""
    if value.equal_everywhere:
        return placement.together(arrays, REPLICATED)
    return placement.together(arrays, placement.per_replica) if value.kind == MESSAGE else arrays


def program_of(placement: Placement, task: Compute, donate: Sequence[int] = ()) -> jax.stages.Wrapped:
    """A task as a program, still to be compiled; it may reuse the memory of some of its inputs."""
    return placement.program(task.run, *specs_of(placement, task), donate=donate)


def specs_of(placement: Placement, task: Compute) -> tuple[tuple[PartitionSpec, ...], tuple[PartitionSpec, ...]]:
    """The places of the values that a task reads, and of those that it writes."""

    def specs(values: Sequence[Value]) -> tuple[PartitionSpec, ...]:
        return tuple(REPLICATED if value.equal_everywhere else placement.per_replica for value in values)

    return specs(task.reads), specs(task.writes)


def of_state(value: Value) -> bool:
    """Whether a value is an array of the state, whole or in shards."""
    return value.kind in (STATE, SHARDS)
