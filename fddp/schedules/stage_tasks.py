"""Cuts a program into stages, and makes a task of each."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Any

import jax

from fddp.jax_internals import ClosedJaxpr, make_program
from fddp.jaxpr import Stage, cut
from fddp.schedules.tasks import HANDED, WRITTEN, Compute, Value


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
    numbers = [number for group in groups for number in group]
    outputs = [jaxpr.outvars[number] for number in numbers]
    between = [at for at, number in enumerate(numbers) if made[number].kind == HANDED]
    consts = dict(zip(jaxpr.constvars, closed.consts))
    whole = make_program(closed, jaxpr.eqns, jaxpr.invars, outputs, consts)
    own = [number for number, value in enumerate(given) if not value.equal_everywhere]
    stages = cut(whole, [len(group) for group in groups], comes, own, between)

    # What an update hands on to its next stage is equal on all replicas, if what it is made of is.
    equal = {n for stage in stages for n, alike in zip(stage.writes, stage.alike) if alike and kind == "update"}
    handed = ((k, *each) for k, stage in enumerate(stages) for each in zip(stage.writes, stage.between))
    own_kind = {True: WRITTEN, False: title}
    names = [*given, *(_handed(title, k, n - len(given), HANDED if n in equal else own_kind[b]) for k, n, b in handed)]
    bare = {number for number, name in enumerate(names) if number < len(given) or name.kind in (HANDED, WRITTEN)}
    results = iter([made[number] for number in numbers if made[number].kind != HANDED])

    known = dict[Any, Callable[..., Sequence[Any]]]()

    def task(k: int, stage: Stage) -> Compute:
        reads = tuple(names[number] for number in stage.reads)
        writes = (*(names[number] for number in stage.writes), *islice(results, stage.results))
        own = tuple(number not in bare for number in stage.reads)
        handed = tuple(number not in bare for number in stage.writes)
        run = known.setdefault((stage.run, own, handed), partial(_handing, stage.run, own, handed))
        run = run if writes else lambda *values: ()
        return Compute(f"{title} {k}", reads, writes, run, kind, speaks=stage.speaks and kind == "compute")

    return [task(k, stage) for k, stage in enumerate(stages)]


def _handed(title: str, stage: int, number: int, kind: str) -> Value:
    """The name of a value that a stage hands on."""
    return Value(kind, stage, str(number) if kind == title else f"{title}/{number}")


def _handing(
    run: Callable[..., Sequence[Any]], own: Sequence[bool], handed: Sequence[bool], *values: jax.Array
) -> Sequence[Any]:
    """Runs a stage. Marked values, of those that it reads and hands on, have a first dim along which replicas lie."""
    made = run(*(x[0] if mine else x for mine, x in zip(own, values)))
    passed = [x[None] if mine else x for mine, x in zip(handed, made)]
    return *passed, *made[len(handed) :]
