"""The compute tasks of a list as XLA programs, one each, and what else is made once for each form of arguments."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import jax
import numpy as np
from jax.sharding import PartitionSpec

from fddp.buckets import sub_byte
from fddp.comm import REPLICATED, Group, Placement, of_one_replica
from fddp.jax_internals import Jaxpr, callbacks, inner_programs
from fddp.schedules.claims import each_by_one
from fddp.schedules.compiling import Compiling, compiling, first_call
from fddp.schedules.pieces import MakeList
from fddp.schedules.queues import Arrange, Arranged, forms_promised
from fddp.schedules.send import Sent, sending
from fddp.schedules.shown import named
from fddp.schedules.tasks import HANDED, MESSAGE, SHARDS, STATE, WRITTEN, Compute, TaskList, Value

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
            known[form] = Prepared(listed, arranged, named(made), send, numbers)
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
        free = [at for at, name in enumerate(task.reads) if name in freed.get(task.name, ()) and _of_state(name)]
        return first_call(_program(placement, task, free), task.name, says)

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
        free = tuple(at for at, name in enumerate(task.reads) if name in own and _of_state(name))
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


def compiled(
    placement: Placement, listed: TaskList, values: Mapping[Value, Any], freed: Freed, says: Compiling
) -> Programs:
    """Compiles all programs before any of them runs, equal ones once.

    Args:
      placement: where they run.
      listed: the tasks.
      values: those that are there at first, as all replicas together have them.
      freed: the values whose memory a task may have, for each task by name.
      says: reports what compiles.

    Returns:
      A program for each compute task, by its name.
    """
    forms = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), dict(values))
    keys = dict[str, Any]()
    known = dict[Any, _Traced]()

    def trace(task: Compute) -> Any:
        read = [forms[name] for name in task.reads]
        jit = _program(placement, task)
        traced = jit.trace(*read)
        forms.update(zip(task.writes, traced.out_info))
        if free := _usable(task, freed.get(task.name, ()), forms):
            jit = _program(placement, task, free)
            traced = jit.trace(*read)
        lowered = traced.lower()
        # Equal layers make equal stages: what XLA would get twice is compiled once.
        shapes = _shapes(read)
        told_apart = (*map(id, traced.jaxpr.consts), *_callbacks(traced.jaxpr.jaxpr))
        text = lowered.as_text()
        same = (text, jax.tree.structure(read), *shapes, *told_apart)
        if same not in known:
            # A program that is compiled ahead of time takes no arrays of less than 8 bits, to which JAX gives another
            # layout, nor the token that MPI's collectives hand on.
            ahead = not traced.jaxpr.effects and not any(sub_byte(dtype) for _, dtype in shapes)
            made = lowered.compile if ahead else partial(first_call, jit, task.name, says)
            known[same] = _Traced(task.name, text, traced.jaxpr.consts, made)
        return same

    now = "a step"

    def make(number: int) -> Callable[..., Sequence[Any]]:
        nonlocal now
        one = [*known.values()][number]
        now = f"program {number + 1} of {len(known)} ({one.name})"
        return one.make()

    with says(lambda: now):
        for task in listed.tasks:
            if isinstance(task, Compute):
                if task.writes:
                    keys[task.name] = trace(task)
            else:
                back = task.reduction.back(of_one_replica(forms[task.reads[0]], placement.replicas_in_array))
                if not task.writes[0].equal_everywhere:
                    back = jax.ShapeDtypeStruct((back.shape[0] * placement.replicas_in_array,), back.dtype)
                nbytes = jax.ShapeDtypeStruct((len(listed.messages),), np.uint32)
                forms.update(zip(task.writes, (back, nbytes)))
        programs = dict(zip(known, each_by_one([one.text for one in known.values()], make)))
    # A stage that writes nothing has nothing to do: other stages use what it waits for.
    return {
        task.name: programs[keys[task.name]] if task.writes else task.run
        for task in listed.tasks
        if isinstance(task, Compute)
    }


class _Traced(NamedTuple):
    """A program that is still to be compiled."""

    name: str
    """The name of the first task that runs it."""
    text: str
    """The program, as XLA gets it."""
    constants: Sequence[Any]
    """Its constants, which are kept alive, so that their ids stay unique."""
    make: Callable[[], Callable[..., Sequence[Any]]]
    """Compiles it."""


def _program(placement: Placement, task: Compute, donate: Sequence[int] = ()) -> jax.stages.Wrapped:
    def specs(values: Sequence[Value]) -> tuple[PartitionSpec, ...]:
        return tuple(REPLICATED if value.equal_everywhere else placement.per_replica for value in values)

    return placement.program(task.run, specs(task.reads), specs(task.writes), donate=donate)


def _usable(task: Compute, free: Sequence[Value], forms: Mapping[Value, Any]) -> list[int]:
    """Inputs to donate: values of the state, and what an update hands on, each with a result of the same shape."""

    def wants(value: Value) -> Counter[Any]:
        return Counter((value.equal_everywhere, *shape) for shape in _shapes(forms[value]))

    room = sum(map(wants, task.writes), Counter())
    places = list[int]()
    for at, name in enumerate(task.reads):
        if name in free and (_of_state(name) or name.kind in (HANDED, WRITTEN)) and wants(name) <= room:
            room -= wants(name)
            places.append(at)
    return places


def _shapes(tree: Any) -> list[tuple[tuple[int, ...], Any]]:
    return [(x.shape, x.dtype) for x in jax.tree.leaves(tree)]


def _of_state(value: Value) -> bool:
    return value.kind in (STATE, SHARDS)


def _callbacks(jaxpr: Jaxpr) -> list[Any]:
    """The host's functions that a program calls: its text only numbers them."""
    own = [callback for eqn in jaxpr.eqns for callback in callbacks(eqn)]
    bodies = [body for eqn in jaxpr.eqns for body in inner_programs(eqn)]
    return [*own, *(callback for body in bodies for callback in _callbacks(body))]
