"""The memory of compiled programs, as XLA has planned it."""

from collections.abc import Callable
from math import prod
from typing import Any

import jax
from jaxtyping import PyTree

from fddp.comm import Group, Placement
from fddp.jax_internals import compile_to_read
from fddp.schedules.ahead_of_time import CompiledOnCall
from fddp.schedules.footprint import Footprint, Moment, Planned, footprint
from fddp.schedules.pieces import StepInputs
from fddp.schedules.programs import Prepare
from fddp.schedules.tasks import Task
from fddp.schedules.values import Value


def of_tasks(group: Group, prepare: Prepare) -> Callable[[StepInputs], Footprint | None]:
    """Makes a function that reports the memory of a step of several programs.

    It is `footprint` of a `Runner`, and returns None if some program is compiled only by its first
    call, or if the platform does not report memory.
    """

    def report(inputs: StepInputs) -> Footprint | None:
        prepared, values = prepare(inputs)
        tasks = prepared.listed.tasks
        forms = dict[Value, Any]()
        planned = dict[str, Planned]()
        for task in prepared.listed.computations:
            if not task.writes:
                continue
            program: Any = prepared.unwrapped[task.name]
            compiled = program
            if isinstance(program, CompiledOnCall):
                program = program.lowered
                compiled = compile_to_read(program)
            memory = _memory(compiled)
            if memory is None:
                return None
            forms |= zip(task.reads, program.args_info[0])
            forms |= zip(task.writes, program.out_info)
            planned[task.name] = Planned(memory.temp_size_in_bytes, _donated(task, program))
        forms |= values
        sizes = {value: _nbytes(group.placement, value, x) for value, x in forms.items()}
        initial = forms.keys() - {value for task in tasks for value in task.writes}
        return footprint(tasks, sizes, planned, initial, set(prepared.listed.results))

    return report


def of_one_program(program: jax.stages.Compiled) -> Footprint | None:
    """Reports the bytes of one device that a step of one program needs.

    Returns None where the platform does not report memory.
    """
    memory: Any = program.memory_analysis()
    if memory is None:
        return None
    resident = memory.argument_size_in_bytes
    # An output that overwrites an argument needs no memory of its own.
    outputs = memory.output_size_in_bytes - memory.alias_size_in_bytes
    peak = resident + memory.temp_size_in_bytes + outputs
    return Footprint(resident, (Moment("the step", peak),))


def _memory(program: Any) -> Any:
    """Memory of a program, if it is known for which arguments it is compiled."""
    if isinstance(program, jax.stages.Compiled):
        return program.memory_analysis()
    return None


def _donated(task: Task, program: Any) -> list[Value]:
    """Inputs that a program overwrites."""
    leaves = [(value, jax.tree.leaves(x)) for value, x in zip(task.reads, program.args_info[0])]
    return [value for value, arrays in leaves if arrays and all(x.donated for x in arrays)]


def _nbytes(placement: Placement, value: Value, tree: PyTree) -> int:
    """Bytes of one replica's arrays."""
    nbytes = sum(prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(tree))
    if value.equal_everywhere:
        return nbytes
    return nbytes // placement.replicas_in_array
