"""Makes tasks of the collectives that a loss holds: each travels between the stage before it and those behind."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax

from fddp.comm import Placement, trace_again
from fddp.jax_internals import ClosedJaxpr
from fddp.jaxpr import apart, arrivals
from fddp.schedules.tasks import Compute, Value

GIVEN = "given"  # what a replica gives to a collective of the loss
EXCHANGED = "exchanged"  # what comes back of it


class Exchanged(NamedTuple):
    """A program whose collectives are tasks."""

    closed: ClosedJaxpr
    """The program, with more inputs and outputs behind its own."""
    came: list[Value]
    """The names of these inputs."""
    given: list[Value]
    """The names of these outputs."""
    comes: dict[int, int]
    """Number of an input → when it comes."""
    tasks: list[Compute]
    """The collectives."""


def exchanged(placement: Placement, closed: ClosedJaxpr, comes: Mapping[int, int], first: int) -> Exchanged:
    """Takes a program's collectives out of it, as tasks.

    Args:
      placement: where the replicas' programs run.
      closed: the program.
      comes: number of an input → when it comes; the others are there from 0.
      first: the number of its first collective, among those of a step.

    Returns:
      The program as it is left, and the tasks.
    """
    found = apart(closed, placement.axis_name, comes)
    if found is None:
        return Exchanged(closed, [], [], dict(comes), [])
    forms = [form for one in found.exchanges for form in one.back]
    made = trace_again(placement, closed, found.run, *forms)
    # Between two moments at which inputs come there is room for all collectives.
    room = len(found.exchanges) + 1
    times = {at: time * room for at, time in comes.items()}
    inputs = len(closed.jaxpr.invars)
    tasks = list[Compute]()
    for k, one in enumerate(found.exchanges):
        given = tuple(Value(GIVEN, first + k, str(i)) for i in range(one.given))
        came = tuple(Value(EXCHANGED, first + k, str(i)) for i in range(len(one.back)))
        times |= {inputs + i: one.after * room + k + 1 for i in range(len(came))}
        inputs += len(came)
        run = partial(_of_one_replica, one.run)
        tasks.append(Compute(f"{one.name} {first + k}", given, came, run, "communication", speaks=True))
    came = [name for task in tasks for name in task.writes]
    return Exchanged(made, came, [name for task in tasks for name in task.reads], times, tasks)


def in_turn(one: Exchanged, messages: int) -> list[list[int]]:
    """Orders what a program makes: what the next stage waits for comes before the messages that nobody waits for.

    Args:
      one: the program.
      messages: number of messages, which are its first outputs.

    Returns:
      Groups of outputs: those that a collective is given, and each message as soon as the collectives are under way
      that it does not wait for.
    """
    waits = _awaited(one)[:messages]
    outputs = len(one.closed.jaxpr.outvars) - len(one.given)
    groups = list[list[int]]()
    left = 0
    for k, task in enumerate([*one.tasks, None]):
        if task is not None:
            groups.append(list(range(outputs, outputs + len(task.reads))))
            outputs += len(task.reads)
        # The messages that wait for the first k collectives alone leave in their order.
        while left < messages and (task is None or waits[left] <= k):
            groups.append([left])
            left += 1
    return groups


def described_exchanges(placement: Placement, closed: ClosedJaxpr, gradients: int) -> list[str]:
    """Lines that must be equal on all ranks: the collectives of a program, and how many of them each gradient awaits.

    Args:
      placement: where the replicas' programs run.
      closed: the program; gradients are its first outputs.
      gradients: number of gradients.

    Returns:
      The lines.
    """
    one = exchanged(placement, closed, {}, 0)
    names = [f"collective {task.name}" for task in one.tasks]
    if not names or not placement.on_mesh:  # elsewhere no message can meet them
        return names
    return [*names, f"collectives before each gradient {' '.join(map(str, _awaited(one)[:gradients]))}"]


def _awaited(one: Exchanged) -> list[int]:
    """The number of collectives that must be back before each output of a program can be made."""
    inputs = len(one.closed.jaxpr.invars) - len(one.came)
    numbers = [k for k, task in enumerate(one.tasks, 1) for _ in task.writes]
    return arrivals(one.closed, {inputs + i: k for i, k in enumerate(numbers)})


def _of_one_replica(run: Callable[..., list[Any]], *values: jax.Array) -> Sequence[Any]:
    return tuple(x[None] for x in run(*(x[0] for x in values)))
