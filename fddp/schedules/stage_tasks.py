"""Cuts a program into stages, and makes a task of each."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Any

import jax

from fddp.jax_internals import ClosedJaxpr, make_program
from fddp.jaxpr import Stage, cut
from fddp.schedules.tasks import Compute
from fddp.schedules.values import HANDED, WRITTEN, Value


def stages_of(
    title: str,
    kind: str,
    closed: ClosedJaxpr,
    inputs: Sequence[Value],
    outputs: Sequence[Value],
    groups: Sequence[Sequence[int]],
    arrivals: Mapping[int, int] | None = None,
) -> list[Compute]:
    """Cuts a program into one stage for each group of outputs.

    `groups` holds positions of outputs. An output that has an input's name is that input, and is
    not computed.
    """
    computed = _computed_groups(inputs, outputs, groups)
    numbers = [number for group in computed for number in group]
    passed_on = [at for at, number in enumerate(numbers) if outputs[number].kind == HANDED]
    per_replica = [number for number, value in enumerate(inputs) if not value.equal_everywhere]
    program = _without_other_outputs(closed, numbers)
    stages = cut(program, [len(group) for group in computed], arrivals, per_replica, passed_on)

    names = [*inputs, *_names_between(title, kind, stages, len(inputs))]
    # These have no leading replica dim.
    bare = set(range(len(inputs)))
    bare |= {n for n, name in enumerate(names) if name.kind in (HANDED, WRITTEN)}
    results = iter([outputs[number] for number in numbers if outputs[number].kind != HANDED])
    programs = dict[Any, Callable[..., Sequence[Any]]]()

    def task(k: int, stage: Stage) -> Compute:
        reads = tuple(names[n] for n in stage.reads)
        writes = (*(names[n] for n in stage.writes), *islice(results, stage.results))
        stacked_in = tuple(n not in bare for n in stage.reads)
        stacked_out = tuple(n not in bare for n in stage.writes)
        key = (stage.run, stacked_in, stacked_out)
        run = programs.setdefault(key, partial(_with_replica_dims, *key))
        run = run if writes or stage.acts else idle
        speaks = stage.speaks and kind == "compute"
        return Compute(f"{title} {k}", reads, writes, run, kind, speaks=speaks)

    return [task(k, stage) for k, stage in enumerate(stages)]


def idle(*values: Any) -> tuple[()]:
    """The function of a task that has nothing to do: others read the values it waits for."""
    del values
    return ()


def _computed_groups(
    inputs: Sequence[Value], outputs: Sequence[Value], groups: Sequence[Sequence[int]]
) -> list[list[int]]:
    names = set(inputs)
    return [[number for number in group if outputs[number] not in names] for group in groups]


def _without_other_outputs(closed: ClosedJaxpr, numbers: Sequence[int]) -> ClosedJaxpr:
    jaxpr = closed.jaxpr
    outputs = [jaxpr.outvars[number] for number in numbers]
    consts = dict(zip(jaxpr.constvars, closed.consts))
    return make_program(closed, jaxpr.eqns, jaxpr.invars, outputs, consts)


def _names_between(title: str, kind: str, stages: Sequence[Stage], inputs: int) -> list[Value]:
    """Names the values that stages pass to later ones, which are numbered from `inputs` on."""
    names = list[Value]()
    for k, stage in enumerate(stages):
        for number, alike, in_slices in zip(stage.writes, stage.alike, stage.between):
            position = number - inputs
            # A value of an update is equal on all replicas if all its inputs are.
            if alike and kind == "update":
                names.append(Value(HANDED, k, f"{title}/{position}"))
            elif in_slices:
                names.append(Value(WRITTEN, k, f"{title}/{position}"))
            else:
                names.append(Value(title, k, str(position)))
    return names


def _with_replica_dims(
    run: Callable[..., Sequence[Any]],
    stacked_in: Sequence[bool],
    stacked_out: Sequence[bool],
    *values: jax.Array,
) -> Sequence[Any]:
    """Runs a stage on inputs with and without a leading replica dim, and adds it to outputs."""
    outputs = run(*(x[0] if stacked else x for stacked, x in zip(stacked_in, values)))
    passed_on = [x[None] if stacked else x for stacked, x in zip(stacked_out, outputs)]
    return *passed_on, *outputs[len(stacked_out) :]
