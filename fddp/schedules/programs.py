"""The compute tasks of a list as XLA programs, prepared once for each shape of the arguments."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import jax
from jax.profiler import TraceAnnotation
from jax.sharding import PartitionSpec

from fddp.comm import REPLICATED, Group, Placement, of_one_replica
from fddp.jax_internals import Promise
from fddp.schedules.communications import inputs_of
from fddp.schedules.compiling import Compiling, compiling, first_call
from fddp.schedules.pieces import MakeList, StepInputs
from fddp.schedules.queues import Arrange, Routes, forms_promised
from fddp.schedules.send import Sent, sending
from fddp.schedules.tasks import Compute, TaskList
from fddp.schedules.values import MESSAGE, SHARDS, STATE, Value

# Task name -> its program: (inputs) -> outputs.
Programs: TypeAlias = dict[str, Callable[..., Sequence[Any]]]
# Task name -> the values whose memory it may reuse.
Freed: TypeAlias = Mapping[str, Sequence[Value]]
# (placement, tasks, initial values, values that each task may reuse, progress reporter)
MakePrograms: TypeAlias = Callable[
    [Placement, TaskList, Mapping[Value, Any], Freed, Compiling], Programs
]


class Prepared(NamedTuple):
    """A list, ready to be launched."""

    listed: TaskList
    routes: Routes
    donated: tuple[Value, ...]
    """The arrays of the state whose memory its programs reuse."""
    programs: Programs
    send: Callable[..., Sent]
    """Sends its messages."""
    numbers: dict[Value, int]
    """Message → its position in the list."""


# Inputs -> the list, ready to be launched, and its initial values.
Prepare: TypeAlias = Callable[[StepInputs], tuple[Prepared, dict[Value, Any]]]


def preparing(
    group: Group, make: MakeList, arrange: Arrange, programs: MakePrograms, donate: bool
) -> Prepare:
    """Makes a function that prepares a list, once for each shape of a step's inputs.

    It maps the inputs of all replicas to the prepared list and its initial values. `programs` is
    `jitted`, `compiled` or `on_each_device`. If `donate`, a task may reuse memory of the state that
    no later task reads.
    """
    prepared: dict[Any, Prepared] = {}
    # The last arguments' types. Those of a program's outputs are the same objects in each step, and
    # lists compare identities first, in a tenth of the time that a look at all shapes takes.
    last_types = list[Any]()
    last: Prepared

    def prepare(inputs: StepInputs) -> tuple[Prepared, dict[Value, Any]]:
        nonlocal last
        rows = group.placement.place(inputs.rows, group.placement.per_replica)
        arguments = inputs.state, inputs.pending, inputs.shards, rows
        leaves, treedef = jax.tree.flatten(arguments)
        types = [
            treedef,
            *(x.form if type(x) is Promise else getattr(x, "aval", x) for x in leaves),
        ]
        if types != last_types:
            form = (treedef, *((x.shape, x.dtype) for x in leaves))
            if form not in prepared:
                prepared[form] = prepare_anew(*forms_promised(arguments))
            last_types[:] = types
            last = prepared[form]
        return last, last.listed.enter(*arguments)

    def prepare_anew(state: Any, *per_replica: Any) -> Prepared:
        replicas = group.placement.replicas_in_array
        listed = make(of_one_replica(state, 1), *of_one_replica(per_replica, replicas))
        routes = arrange(listed)
        freed = routes.freed if donate else {}
        donated = tuple({v for values in freed.values() for v in values if v.kind == STATE})
        values = listed.enter(state, *per_replica)
        report = partial(compiling, group)
        unnamed = programs(group.placement, listed, values, freed, report)
        send = sending(group, [task.reduction for task in listed.messages])
        numbers = {name: number for number, name in enumerate(inputs_of(listed.messages))}
        named = {name: partial(_shown, name, program) for name, program in unnamed.items()}
        return Prepared(listed, routes, donated, named, send, numbers)

    return prepare


def _shown(name: str, program: Callable[..., Sequence[Any]], *inputs: Any) -> Sequence[Any]:
    """Shows a launch in `jax.profiler`; a name costs less than 1 µs if no profiler runs.

    A launched program runs on threads of XLA's own. So a task shows while it is launched, and again
    while a thread waits for it.
    """
    with TraceAnnotation(name):
        return program(*inputs)


def jitted(
    placement: Placement,
    listed: TaskList,
    values: Mapping[Value, Any],
    freed: Freed,
    says: Compiling,
) -> Programs:
    """Makes programs that XLA compiles when they are first called."""
    del values

    def program(task: Compute) -> Callable[..., Sequence[Any]]:
        jit = program_of(placement, task, _donated(task, freed))
        return first_call(jit, task.name, says)

    return {task.name: program(task) for task in listed.computations}


def on_each_device(
    placement: Placement,
    listed: TaskList,
    values: Mapping[Value, Any],
    freed: Freed,
    says: Compiling,
) -> Programs:
    """Makes programs of one replica, which each replica of this process runs by itself.

    XLA compiles a program of all replicas for their number, and may round differently for another
    number. The values are tuples with one array per replica; tasks that share a function share a
    program.
    """
    del values
    programs = dict[Any, Callable[..., Sequence[Any]]]()

    def program(task: Compute) -> Callable[..., Sequence[Any]]:
        donate = tuple(range(task.reuses))
        # Only updates donate: a stage that did would not share a program with equal stages.
        if task.kind == "update":
            donate = *_donated(task, freed), *donate
        if (task.run, donate) not in programs:
            jit = jax.jit(task.run, donate_argnums=donate)
            programs[task.run, donate] = first_call(jit, task.name, says)
        of_one = programs[task.run, donate]

        def run(*inputs: Any) -> Sequence[Any]:
            by_replica = zip(*(x if isinstance(x, tuple) else placement.each(x) for x in inputs))
            outputs = zip(*[of_one(*arrays) for arrays in by_replica])
            return [_joined(placement, value, x) for value, x in zip(task.writes, outputs)]

        return run

    return {task.name: program(task) for task in listed.computations}


def _donated(task: Compute, freed: Freed) -> list[int]:
    """The positions of the arrays of the state whose memory a task may reuse."""
    reusable = freed.get(task.name, ())
    return [at for at, name in enumerate(task.reads) if name in reusable and of_state(name)]


def _joined(placement: Placement, value: Value, arrays: tuple[Any, ...]) -> Any:
    """Joins the replicas' arrays of a message or of a replicated value; other values stay apart."""
    if value.equal_everywhere:
        return placement.together(arrays, REPLICATED)
    if value.kind == MESSAGE:
        return placement.together(arrays, placement.per_replica)
    return arrays


def program_of(
    placement: Placement, task: Compute, donate: Sequence[int] = ()
) -> jax.stages.Wrapped:
    """A task as a program that is not yet compiled; it may reuse the inputs at `donate`."""
    return placement.program(task.run, *specs_of(placement, task), donate=donate)


def specs_of(
    placement: Placement, task: Compute
) -> tuple[tuple[PartitionSpec, ...], tuple[PartitionSpec, ...]]:
    """The partition specs of a task's inputs and outputs."""

    def specs(values: Sequence[Value]) -> tuple[PartitionSpec, ...]:
        return tuple(REPLICATED if v.equal_everywhere else placement.per_replica for v in values)

    return specs(task.reads), specs(task.writes)


def of_state(value: Value) -> bool:
    """True if a value is an array of the state, replicated or in shards."""
    return value.kind in (STATE, SHARDS)
