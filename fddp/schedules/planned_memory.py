"""The memory of programs, as XLA has planned it when it compiled them."""

from collections.abc import Callable, Mapping, Sequence
from math import prod
from types import MappingProxyType
from typing import Any, NamedTuple

import jax

from fddp.comm import Group, Placement
from fddp.hooks import Memory
from fddp.jax_internals import compile_to_read
from fddp.schedules.ahead_of_time import Late
from fddp.schedules.footprint import Footprint, Moment, Planned, footprint
from fddp.schedules.programs import Prepared
from fddp.schedules.tasks import Compute, Task, Value


class Launch(NamedTuple):
    """The tasks of a step, as they are launched."""

    tasks: Sequence[Task]
    """The tasks, in order."""
    left: Mapping[Value, Value] = MappingProxyType({})
    """The values that a step leaves for the next one → the same, as the next one reads them."""


def of_tasks(
    group: Group,
    prepare: Callable[..., Prepared],
    launch: Callable[[Prepared], Launch] = lambda now: Launch(now.listed.tasks),
) -> Callable[..., Footprint | None]:
    """Makes a function that tells the memory of a step of several programs.

    Args:
      group: the replicas.
      prepare: (state, pending, shards, rows) → the step, ready to be launched.
      launch: (this step) → its tasks, in the order in which they are launched.

    Returns:
      The function, `footprint` of a `Runner`. It returns None if some program is compiled only when it is first called,
      or if the platform does not tell.
    """

    def told(state: Any, pending: Any, shards: Any, memory: Memory, rows: Any) -> Footprint | None:
        del memory
        given = state, pending, shards, group.placement.place(rows, group.placement.per_replica)
        now = prepare(*given)
        tasks, left = launch(now)
        of = {task.name: now.made[task.name] for task in tasks if isinstance(task, Compute) and task.writes}
        planned = {name: _memory(program) for name, program in of.items()}
        if not all(planned.values()):
            return None
        programs = {name: program.lowered if isinstance(program, Late) else program for name, program in of.items()}
        known = _forms(tasks, programs) | now.listed.enter(*given)
        known |= {value: known[read] for value, read in left.items()}
        sizes = {value: _nbytes(group.placement, value, x) for value, x in known.items()}
        written = {value for task in tasks for value in task.writes}
        donated = {task.name: _donated(task, programs[task.name]) for task in tasks if task.name in programs}
        works = {name: Planned(one.temp_size_in_bytes, donated[name]) for name, one in planned.items()}
        return footprint(tasks, sizes, works, known.keys() - written, {*now.listed.results, *left})

    return told


def of_one_program(program: jax.stages.Compiled) -> Footprint | None:
    """Tells the memory of a step that is one program.

    Args:
      program: the step, compiled.

    Returns:
      The bytes of one device; None where the platform does not tell.
    """
    told: Any = program.memory_analysis()
    if told is None:
        return None
    rests = told.argument_size_in_bytes
    # An output that is written where an argument lies takes nothing.
    more = told.temp_size_in_bytes + told.output_size_in_bytes - told.alias_size_in_bytes
    return Footprint(rests, (Moment("the step", rests + more),))


def _memory(program: Any) -> Any:
    """The memory of a program, if it is known for which arguments it is compiled."""
    compiled = compile_to_read(program.lowered) if isinstance(program, Late) else program
    return compiled.memory_analysis() if isinstance(compiled, jax.stages.Compiled) else None


def _forms(tasks: Sequence[Task], programs: Mapping[str, Any]) -> dict[Value, Any]:
    """The forms of the values that programs read and write."""
    forms = dict[Value, Any]()
    for task in tasks:
        if task.name in programs:
            forms |= zip(task.reads, programs[task.name].args_info[0])
            forms |= zip(task.writes, programs[task.name].out_info)
    return forms


def _donated(task: Task, program: Any) -> list[Value]:
    """The values that a program writes over."""
    forms = zip(task.reads, program.args_info[0])
    return [value for value, form in forms if all(x.donated for x in jax.tree.leaves(form)) and jax.tree.leaves(form)]


def _nbytes(placement: Placement, value: Value, tree: Any) -> int:
    """Bytes of one replica's arrays."""
    copies = 1 if value.equal_everywhere else placement.replicas_in_array
    return sum(prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(tree)) // copies
