"""Makes tasks of a loss's collectives: each runs between the stage before it and those after it."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax

from fddp.comm import Placement, trace_again
from fddp.jax_internals import ClosedJaxpr
from fddp.jaxpr import apart, arrivals
from fddp.schedules.tasks import Compute
from fddp.schedules.values import Value

GIVEN = "given"  # the input of a collective of the loss
EXCHANGED = "exchanged"  # its output


class Exchanged(NamedTuple):
    """A program whose collectives are tasks."""

    closed: ClosedJaxpr
    """The program, with more inputs and outputs behind its own."""
    received: list[Value]
    """The names of these inputs."""
    passed: list[Value]
    """The names of these outputs."""
    arrivals: dict[int, int]
    """Position of an input → its time of arrival."""
    tasks: list[Compute]
    """The collectives."""


def exchanged(
    placement: Placement, closed: ClosedJaxpr, arrival: Mapping[int, int], first: int
) -> Exchanged:
    """Takes a program's collectives out of it, as tasks.

    `arrival` maps the position of an input to its time of arrival, 0 if omitted. `first` is the
    number of the first collective among those of a step.
    """
    split = apart(closed, placement.axis_name, arrival)
    if split is None:
        return Exchanged(closed, [], [], dict(arrival), [])
    forms = [form for exchange in split.exchanges for form in exchange.back]
    program = trace_again(placement, closed, split.run, *forms)
    # Between two times of arrival there is room for all collectives.
    room = len(split.exchanges) + 1
    times = {at: time * room for at, time in arrival.items()}
    inputs = len(closed.jaxpr.invars)
    tasks = list[Compute]()
    for k, exchange in enumerate(split.exchanges):
        reads = tuple(Value(GIVEN, first + k, str(i)) for i in range(exchange.given))
        writes = tuple(Value(EXCHANGED, first + k, str(i)) for i in range(len(exchange.back)))
        times |= {inputs + i: exchange.after * room + k + 1 for i in range(len(writes))}
        inputs += len(writes)
        run = partial(_of_one_replica, exchange.run)
        name = f"{exchange.name} {first + k}"
        tasks.append(Compute(name, reads, writes, run, "communication", speaks=True))
    received = [name for task in tasks for name in task.writes]
    passed = [name for task in tasks for name in task.reads]
    return Exchanged(program, received, passed, times, tasks)


def in_turn(program: Exchanged, messages: int) -> list[list[int]]:
    """Groups a program's outputs: a collective's inputs precede the messages that can wait.

    The messages are the first outputs. Each forms a group as soon as the collectives that it does
    not depend on are under way.
    """
    waits = _awaited(program)[:messages]
    outputs = len(program.closed.jaxpr.outvars) - len(program.passed)
    groups = list[list[int]]()
    leaving = 0
    for k, task in enumerate([*program.tasks, None]):
        if task is not None:
            groups.append(list(range(outputs, outputs + len(task.reads))))
            outputs += len(task.reads)
        # The messages that depend on the first k collectives only leave in order.
        while leaving < messages and (task is None or waits[leaving] <= k):
            groups.append([leaving])
            leaving += 1
    return groups


def described_exchanges(placement: Placement, closed: ClosedJaxpr, gradients: int) -> list[str]:
    """Describes a program's collectives in lines that must be equal on all ranks.

    The gradients are the program's first outputs; on a mesh the number of collectives that each
    gradient waits for is described, too.
    """
    program = exchanged(placement, closed, {}, 0)
    names = [f"collective {task.name}" for task in program.tasks]
    if not names or not placement.on_mesh:  # elsewhere they cannot mix with messages
        return names
    counts = " ".join(map(str, _awaited(program)[:gradients]))
    return [*names, f"collectives before each gradient {counts}"]


def _awaited(program: Exchanged) -> list[int]:
    """The number of collectives that must have ended before each output can be computed."""
    inputs = len(program.closed.jaxpr.invars) - len(program.received)
    numbers = [k for k, task in enumerate(program.tasks, 1) for _ in task.writes]
    return arrivals(program.closed, {inputs + i: k for i, k in enumerate(numbers)})


def _of_one_replica(run: Callable[..., list[Any]], *values: jax.Array) -> Sequence[Any]:
    return tuple(x[None] for x in run(*(x[0] for x in values)))
