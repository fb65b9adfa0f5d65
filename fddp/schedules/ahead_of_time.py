"""Compiles the tasks of a list before any of them runs; equal programs are compiled once."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import PyTree

from fddp.buckets import sub_byte
from fddp.comm import Placement, of_one_replica
from fddp.jax_internals import Jaxpr, callbacks, inner_programs
from fddp.schedules.claims import each_by_one
from fddp.schedules.compiling import Compiling, first_call
from fddp.schedules.programs import Freed, Programs, of_state, program_of, specs_of
from fddp.schedules.stage_tasks import idle
from fddp.schedules.tasks import Communicate, Compute, TaskList
from fddp.schedules.values import HANDED, WRITTEN, Value


def compiled(
    placement: Placement,
    listed: TaskList,
    values: Mapping[Value, Any],
    freed: Freed,
    says: Compiling,
) -> Programs:
    """Compiles all programs of a list, equal ones once; `values` holds those of all replicas."""
    forms = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), dict(values))
    traces = _Traces(placement, says)
    keys = dict[str, Any]()
    description = "a step"

    def make(number: int) -> Callable[..., Sequence[Any]]:
        nonlocal description
        program = traced[number]
        description = f"program {number + 1} of {len(traced)} ({program.name})"
        return program.make()

    with says(lambda: description):
        for task in listed.tasks:
            if isinstance(task, Communicate):
                forms.update(zip(task.writes, _received(placement, listed, task, forms)))
            elif task.run is not idle:
                keys[task.name] = traces.key(task, freed.get(task.name, ()), forms)
        traced = list(traces.known.values())
        programs = dict(zip(traces.known, each_by_one([t.text for t in traced], make)))
    idle_tasks = dict.fromkeys((task.name for task in listed.computations), idle)
    return idle_tasks | {name: programs[key] for name, key in keys.items()}


class _Traced(NamedTuple):
    """A program that is still to be compiled."""

    name: str
    """The name of the first task that runs it."""
    text: str
    """The program as lowered for XLA."""
    constants: Sequence[Any]
    """Its constants, held so that their ids stay unique."""
    make: Callable[[], Callable[..., Sequence[Any]]]
    """Compiles it."""


class _Traces:
    """The programs of tasks, traced and lowered one after the other, equal ones once."""

    def __init__(self, placement: Placement, says: Compiling) -> None:
        self._placement = placement
        self._says = says
        self._traced = dict[Any, Any]()
        self._keys = dict[Any, Any]()
        self.known = dict[Any, _Traced]()
        """Key → program."""

    def key(self, task: Compute, free: Sequence[Value], forms: dict[Value, Any]) -> Any:
        """Returns the key of a task's program, and adds the shapes of its outputs to `forms`."""
        inputs = [forms[name] for name in task.reads]
        shapes = _shapes(inputs)
        tree = jax.tree.structure(inputs)
        # Equal layers make stages of one function.
        weak = tuple(getattr(x, "weak_type", False) for x in jax.tree.leaves(inputs))
        call = (task.run, *specs_of(self._placement, task), tree, *shapes, weak)
        _, traced = self._trace(call, task, inputs)
        forms.update(zip(task.writes, traced.out_info))
        donated = tuple(_donatable(task, free, forms))
        if (call, donated) not in self._keys:
            jit, traced = self._trace(call, task, inputs, donated)
            lowered = traced.lower()
            text = lowered.as_text()
            identities = (*map(id, traced.jaxpr.consts), *_callbacks(traced.jaxpr.jaxpr))
            key = (text, tree, *shapes, *identities)
            # A program that is compiled ahead of time takes no arrays of less than 8 bits, to which
            # JAX gives another layout, nor the token of MPI's collectives.
            make = lowered.compile
            if traced.jaxpr.effects or any(sub_byte(dtype) for _, dtype in shapes):
                run = first_call(jit, task.name, self._says)
                make = lambda: run  # noqa: E731
            self.known.setdefault(key, _Traced(task.name, text, traced.jaxpr.consts, make))
            self._keys[call, donated] = key
        return self._keys[call, donated]

    def _trace(
        self, call: Any, task: Compute, inputs: Sequence[Any], donated: Sequence[int] = ()
    ) -> Any:
        """Traces a task, or returns the trace of an equal one."""
        if (call, *donated) not in self._traced:
            jit = program_of(self._placement, task, donated)
            self._traced[call, *donated] = jit, jit.trace(*inputs)
        return self._traced[call, *donated]


def _received(
    placement: Placement, listed: TaskList, task: Communicate, forms: Mapping[Value, Any]
) -> tuple[Any, Any]:
    """The shapes of a message's sum and of the bytes of all messages."""
    replicas = placement.replicas_in_array
    total = task.reduction.collective.result_form(of_one_replica(forms[task.reads[0]], replicas))
    if not task.writes[0].equal_everywhere:
        total = jax.ShapeDtypeStruct((total.shape[0] * replicas,), total.dtype)
    return total, jax.ShapeDtypeStruct((len(listed.messages),), np.uint32)


def _donatable(task: Compute, free: Sequence[Value], forms: Mapping[Value, Any]) -> list[int]:
    """Positions of inputs to donate, each of which has an output of the same shape.

    They are arrays of the state, and values that a stage of an update passes to the next.
    """

    def shapes(value: Value) -> Counter[Any]:
        return Counter((value.equal_everywhere, *shape) for shape in _shapes(forms[value]))

    outputs = sum(map(shapes, task.writes), Counter())
    positions = list[int]()
    for at, name in enumerate(task.reads):
        donatable = of_state(name) or name.kind in (HANDED, WRITTEN)
        if name in free and donatable and shapes(name) <= outputs:
            outputs -= shapes(name)
            positions.append(at)
    return positions


def _shapes(tree: PyTree) -> list[tuple[tuple[int, ...], Any]]:
    return [(x.shape, x.dtype) for x in jax.tree.leaves(tree)]


def _callbacks(jaxpr: Jaxpr) -> list[Any]:
    """The host functions that a program calls, which its text only numbers."""
    functions = list[Any]()
    for eqn in jaxpr.eqns:
        functions += callbacks(eqn)
        for body in inner_programs(eqn):
            functions += _callbacks(body)
    return functions
