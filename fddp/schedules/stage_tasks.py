"""Cuts a program into stages, and makes a task of each."""

from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import Any

import jax

from fddp.jax_internals import ClosedJaxpr, make_program
from fddp.jaxpr import Stage, cut
from fddp.schedules.tasks import Compute, Value


def stages_of(
    title: str,
    kind: str,
    closed: ClosedJaxpr,
    given: Sequence[Value],
    made: Sequence[Value],
    groups: Sequence[Sequence[int]],
    comes: Mapping[int, int] | None = None,
) -> list[Compute]:
    """Cuts a program into stages, as tasks. No stage makes an output with the name of an input: it is that input."""
    jaxpr = closed.jaxpr
    there = set(given)
    groups = [[number for number in group if made[number] not in there] for group in groups]
    outputs = [jaxpr.outvars[number] for group in groups for number in group]
    consts = dict(zip(jaxpr.constvars, closed.consts))
    whole = make_program(closed, jaxpr.eqns, jaxpr.invars, outputs, consts)
    stages = cut(whole, [len(group) for group in groups], comes)

    handed = ((k, number) for k, stage in enumerate(stages) for number in stage.writes)
    names = [*given, *(Value(title, k, str(number - len(given))) for k, number in handed)]
    results = iter([made[number] for group in groups for number in group])

    def task(k: int, stage: Stage) -> Compute:
        reads = tuple(names[number] for number in stage.reads)
        writes = (*(names[number] for number in stage.writes), *islice(results, stage.results))
        run = _handing(stage, len(given)) if writes else lambda *values: ()
        return Compute(f"{title} {k}", reads, writes, run, kind)

    return [task(k, stage) for k, stage in enumerate(stages)]


def _handing(stage: Stage, inputs: int) -> Callable[..., Sequence[Any]]:
    """Runs a stage. The values that it hands on to later stages are each replica's own: they get a first dim."""

    def run(*values: jax.Array) -> Sequence[Any]:
        read = [value if number < inputs else value[0] for number, value in zip(stage.reads, values)]
        made = stage.run(*read)
        handed = len(stage.writes)
        return *(value[None] for value in made[:handed]), *made[handed:]

    return run
