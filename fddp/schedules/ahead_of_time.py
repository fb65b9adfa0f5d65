"""Compiles the tasks of a list before any of them runs: equal ones once."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np

from fddp.buckets import sub_byte
from fddp.comm import Placement, of_one_replica
from fddp.jax_internals import Jaxpr, callbacks, inner_programs
from fddp.schedules.claims import each_by_one
from fddp.schedules.compiling import Compiling, first_call
from fddp.schedules.programs import Freed, Programs, of_state, program_of, specs_of
from fddp.schedules.tasks import HANDED, WRITTEN, Communicate, Compute, TaskList, Value


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
    programs = _Traces(placement, says)
    keys = dict[str, Any]()
    now = "a step"

    def make(number: int) -> Callable[..., Sequence[Any]]:
        nonlocal now
        one = each[number]
        now = f"program {number + 1} of {len(each)} ({one.name})"
        return one.make()

    with says(lambda: now):
        for task in listed.tasks:
            if isinstance(task, Communicate):
                forms.update(zip(task.writes, _came(placement, listed, task, forms)))
            elif task.writes:
                keys[task.name] = programs.key(task, freed.get(task.name, ()), forms)
        each = list(programs.known.values())
        made = dict(zip(programs.known, each_by_one([one.text for one in each], make)))
    # A stage that writes nothing has nothing to do: other stages use what it waits for.
    return {
        task.name: made[keys[task.name]] if task.writes else task.run
        for task in listed.tasks
        if isinstance(task, Compute)
    }


@dataclass(frozen=True)
class Late:
    """A program that is compiled by its first call."""

    run: Callable[..., Sequence[Any]]
    lowered: jax.stages.Lowered
    """The same for a look at what XLA makes of it; what its first call has compiled is not compiled again."""

    def __call__(self, *given: Any) -> Sequence[Any]:
        return self.run(*given)


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


class _Traces:
    """The programs of tasks, as they are traced and lowered one after the other, equal ones once."""

    def __init__(self, placement: Placement, says: Compiling) -> None:
        self._placement = placement
        self._says = says
        self._traced = dict[Any, Any]()
        self._keys = dict[Any, Any]()
        self.known = dict[Any, _Traced]()
        """The programs, each by what tells it apart."""

    def key(self, task: Compute, free: Sequence[Value], forms: dict[Value, Any]) -> Any:
        """Finds what tells a task's program apart; adds the forms of what the task writes."""
        read = [forms[name] for name in task.reads]
        shapes = _shapes(read)
        tree = jax.tree.structure(read)
        # Equal layers make stages of one function.
        weak = tuple(getattr(x, "weak_type", False) for x in jax.tree.leaves(read))
        call = (task.run, *specs_of(self._placement, task), tree, *shapes, weak)
        _, traced = self._trace(call, task, read)
        forms.update(zip(task.writes, traced.out_info))
        donated = tuple(_usable(task, free, forms))
        if (call, donated) not in self._keys:
            jit, traced = self._trace(call, task, read, donated)
            lowered = traced.lower()
            text = lowered.as_text()
            told_apart = (*map(id, traced.jaxpr.consts), *_callbacks(traced.jaxpr.jaxpr))
            same = (text, tree, *shapes, *told_apart)
            # A program that is compiled ahead of time takes no arrays of less than 8 bits, to which JAX gives another
            # layout, nor the token that MPI's collectives hand on.
            ahead = not traced.jaxpr.effects and not any(sub_byte(dtype) for _, dtype in shapes)
            later = partial(Late, first_call(jit, task.name, self._says), lowered)
            make = lowered.compile if ahead else later
            self.known.setdefault(same, _Traced(task.name, text, traced.jaxpr.consts, make))
            self._keys[call, donated] = same
        return self._keys[call, donated]

    def _trace(self, call: Any, task: Compute, read: Sequence[Any], donated: Sequence[int] = ()) -> Any:
        """Traces a task, or finds the trace of an equal one."""
        if (call, *donated) not in self._traced:
            jit = program_of(self._placement, task, donated)
            self._traced[call, *donated] = jit, jit.trace(*read)
        return self._traced[call, *donated]


def _came(placement: Placement, listed: TaskList, task: Communicate, forms: Mapping[Value, Any]) -> tuple[Any, Any]:
    """The forms of what comes back of a message, and of the bytes that were sent."""
    back = task.reduction.back(of_one_replica(forms[task.reads[0]], placement.replicas_in_array))
    if not task.writes[0].equal_everywhere:
        back = jax.ShapeDtypeStruct((back.shape[0] * placement.replicas_in_array,), back.dtype)
    return back, jax.ShapeDtypeStruct((len(listed.messages),), np.uint32)


def _usable(task: Compute, free: Sequence[Value], forms: Mapping[Value, Any]) -> list[int]:
    """Inputs to donate: values of the state, and what an update hands on, each with a result of the same shape."""

    def wants(value: Value) -> Counter[Any]:
        return Counter((value.equal_everywhere, *shape) for shape in _shapes(forms[value]))

    room = sum(map(wants, task.writes), Counter())
    places = list[int]()
    for at, name in enumerate(task.reads):
        if name in free and (of_state(name) or name.kind in (HANDED, WRITTEN)) and wants(name) <= room:
            room -= wants(name)
            places.append(at)
    return places


def _shapes(tree: Any) -> list[tuple[tuple[int, ...], Any]]:
    return [(x.shape, x.dtype) for x in jax.tree.leaves(tree)]


def _callbacks(jaxpr: Jaxpr) -> list[Any]:
    """The host's functions that a program calls: its text only numbers them."""
    own = [callback for eqn in jaxpr.eqns for callback in callbacks(eqn)]
    bodies = [body for eqn in jaxpr.eqns for body in inner_programs(eqn)]
    return [*own, *(callback for body in bodies for callback in _callbacks(body))]
