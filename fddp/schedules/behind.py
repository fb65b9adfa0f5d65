"""A step that ends while the next one runs: sums that the next forward pass needs late, left to lie under it.

Gradients are ready in the reverse of the order in which the next forward pass wants the parameters. Messages that leave
as they are ready keep its first layers waiting for last; messages that leave by first use alone would let the link idle
while the backward pass goes on. Between the two: most leave as they are ready, some are put off until the last one is
away, and those by first use.

Source: P3 (Jayarajan et al., SysML 2019); ByteScheduler (Peng et al., SOSP 2019); TicTac (Hashemi et al., SysML 2019).
"""

from collections import deque
from collections.abc import Sequence

from fddp.jaxpr import arrivals, first_uses
from fddp.schedules.lists import Program
from fddp.schedules.tasks import BYTES, Communicate, Task, TaskList, replaces

EVERY, BEFORE_THE_LAST = 4, 2  # of so many messages one is put off; so many behind the last that is are not


def come_late(first: Program, last: Program) -> dict[str, int]:
    """When the parts of the state come that the last step's messages bring: messages in the order of first use.

    Args:
      first: the forward and backward pass.
      last: the updates.

    Returns:
      Names of what the first program is given, and when each comes, from 1 on.
    """
    when = arrivals(last.closed, {at: k + 1 for at, k in last.back.items()})
    message = {replaces(name): k for name, k in zip(last.made, when) if k}
    uses = {name: use for name, use in zip(first.read, first_uses(first.closed)) if name in message}
    order = dict.fromkeys(message[name] for name in sorted(uses, key=uses.__getitem__))
    places = {k: place for place, k in enumerate(order, 1)}
    return {name: places[message[name]] for name in uses}


def trailed(listed: TaskList) -> TaskList:
    """Puts messages off, and each update where the last message is back that it needs.

    Args:
      listed: stages, a message behind the one that makes it, and updates of one message each.

    Returns:
      The list.
    """
    messages, computes = listed.messages, [task for task in listed.tasks if task.kind == "compute"]
    updates = [task for task in listed.tasks if task.kind == "update"]
    ordered = _ordered(messages, _first_uses(computes, updates))
    tasks, leaving, made = list[Task](), deque(ordered), set[str]()
    for task in computes:
        tasks.append(task)
        made.update(task.writes)
        while leaving and leaving[0].reads[0] in made:
            tasks.append(leaving.popleft())
    return listed._replace(tasks=(*tasks, *leaving, *_as_they_can(updates, ordered)))


def _ordered(messages: Sequence[Communicate], uses: dict[str, int]) -> list[Communicate]:
    off = _put_off(messages)
    late = sorted((one for one in messages if one.name in off), key=lambda one: uses.get(one.writes[0], 0))
    ordered = [*(one for one in messages if one.name not in off), *late]
    # How much was sent is known once the last one is back.
    told = [name for one in messages for name in one.writes if name == BYTES]
    return [one._replace(writes=(one.writes[0], *(told if one is ordered[-1] else ()))) for one in ordered]


def _put_off(messages: Sequence[Communicate]) -> set[str]:
    """Never the first one, which carries the loss and the weight by which all others are divided."""
    asked = {name for one in messages for name in one.reads[1:]}
    some = [messages[k] for k in range(len(messages) - 1 - BEFORE_THE_LAST, 0, -EVERY)]
    return {one.name for one in some if len(one.reads) == 1 and asked.isdisjoint(one.writes)}


def _first_uses(computes: Sequence[Task], updates: Sequence[Task]) -> dict[str, int]:
    """Which stage first uses what each message brings."""
    stage = {name: k for k, task in reversed(list(enumerate(computes))) for name in task.reads}
    uses = dict[str, int]()
    for task in updates:
        first = min((stage[part] for name in task.writes if (part := replaces(name)) in stage), default=len(computes))
        for name in task.reads:
            uses[name] = min(first, uses.get(name, first))
    return uses


def _as_they_can(updates: Sequence[Task], messages: Sequence[Communicate]) -> list[Task]:
    """Updates in the order in which messages come back."""
    there = {name: k for k, message in enumerate(messages, 1) for name in message.writes}
    places = list[int]()
    for task in updates:
        places.append(max((there.get(name, 0) for name in task.reads), default=0))
        there.update(dict.fromkeys(task.writes, places[-1]))
    return [task for _, task in sorted(zip(places, updates), key=lambda pair: pair[0])]
