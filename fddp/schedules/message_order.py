"""The order in which messages leave whose sums the next step's forward pass needs late.

Gradients become ready in the reverse of the order in which the next forward pass uses the parameters. If messages leave
as they are ready, its first layers wait longest. If they leave by first use alone, the link idles during the backward
pass. The order made here lies between the two: most messages leave as they are ready; some are put off until the last
one has left, and then leave by first use. Where computing takes longer than traffic no message waits for the link, and
to put one off only delays it. So both orders are made, and `Trial` measures in the first steps which one is faster.

Source: P3 (Jayarajan et al., SysML 2019); ByteScheduler (Peng et al., SOSP 2019); TicTac (Hashemi et al., SysML 2019).
"""

from collections import deque
from collections.abc import Mapping, Sequence
from statistics import median

import numpy as np

from fddp.comm import Group
from fddp.jaxpr import arrivals, first_uses
from fddp.schedules.border import Program
from fddp.schedules.tasks import BYTES, Communicate, Compute, Task, TaskList, Value

EVERY = 4  # of so many messages one is put off
BEFORE_THE_LAST = 2  # the last so many messages are never put off
TURNS = 3  # that each order takes
STEPS = 4  # in a turn; the first one does not count: it overlaps the end of a step of the other order
TRIED = 2 * TURNS * STEPS  # steps after which the faster one of two orders stays


def orders(listed: TaskList, first_use: Mapping[str, int]) -> tuple[TaskList, ...]:
    """Makes two orders of a list's messages: one as they are ready, one with some of them put off.

    Args:
      listed: see `trailed`.
      first_use: likewise.

    Returns:
      Two lists of the same tasks; one list where both orders are the same.
    """
    ready = trailed(listed, {})
    put_off = trailed(listed, first_use)
    return (ready,) if put_off.messages == ready.messages else (ready, put_off)


def come_late(first: Program, last: Program) -> dict[Value, int]:
    """Numbers the parts of the state as they come, if the last step's messages bring them in the order of first use.

    Args:
      first: the forward and backward pass.
      last: the updates.

    Returns:
      For each part that a message brings, by the name under which the first program reads it: its place, from 1 on.
    """
    when = arrivals(last.closed, {at: k + 1 for at, k in last.back.items()})
    message = {made.replaces: k for made, k in zip(last.made, when) if k}
    uses = {name: use for name, use in zip(first.read, first_uses(first.closed)) if name in message}
    order = dict.fromkeys(message[name] for name in sorted(uses, key=uses.__getitem__))
    places = {k: place for place, k in enumerate(order, 1)}
    return {name: places[message[name]] for name in uses}


class Trial:
    """Lets ways take a few steps in turn, until it is known how long each one takes.

    Rank 0 decides at the first step of each turn which way takes it. All ranks get there together, for they call a step
    equally often. After an error on one rank alone they go on where all have sent equally much, or not at all.
    """

    def __init__(self, group: Group) -> None:
        self._group = group
        self._steps = 0
        self._counts = False
        self._stays = False
        self._seconds = dict[int, list[float]]()
        self.latest = 0
        """The way of the last step."""

    def way(self, ways: int) -> int:
        """Picks the way that the next step takes; every rank calls it at the same step.

        Args:
          ways: how many there are, the same on all ranks.

        Returns:
          Its number, the same on all ranks.
        """
        if ways > 1 and not self._stays:
            turn, place = divmod(self._steps, STEPS)
            self._steps += 1
            self._counts = place > 0
            if place == 0:
                self._group.lane.wait()
                own = np.array(self._next(turn, ways), np.uint8)
                self.latest, self._stays = self._group.hosts.broadcast(own, 0).tolist()
        return self.latest

    def took(self, seconds: float) -> None:
        """Notes how long the step took that has just returned."""
        if self._counts and not self._stays:
            self._seconds.setdefault(self.latest, []).append(seconds)

    def _next(self, turn: int, ways: int) -> Sequence[int]:
        """The way whose turn it is, and 1 if it stays for good."""
        if turn < ways * TURNS:
            return turn % ways, 0
        return min(self._seconds, key=lambda way: median(self._seconds[way]), default=0), 1


def trailed(listed: TaskList, first_use: Mapping[str, int]) -> TaskList:
    """Puts some messages off, and orders updates by the last message that each one needs.

    Args:
      listed: stages, a message behind the one that makes it, and updates of one message each.
      first_use: when the next forward pass first uses what a message brings, by the names of those that may be put off;
        the same on all ranks, whose own programs may differ.

    Returns:
      The list.
    """
    updates = [task for task in listed.tasks if task.kind == "update"]
    replaced = any(made.replaces in task.reads for task in updates for made in task.writes)
    # Gradients that are returned have to be there at once.
    return leaving_in(listed, _ordered(listed.messages, first_use if replaced else {}))


def leaving_in(listed: TaskList, ordered: Sequence[Communicate]) -> TaskList:
    """Lets messages leave in an order, each as soon as those before it have left and its gradients are made.

    Args:
      listed: see `trailed`.
      ordered: its messages.

    Returns:
      The list, its updates in the order in which the messages come back.
    """
    computes = [task for task in listed.tasks if isinstance(task, Compute) and task.kind != "update"]
    updates = [task for task in listed.tasks if task.kind == "update"]
    tasks = list[Task]()
    leaving = deque(ordered)
    made = set[str]()
    for task in computes:
        tasks.append(task)
        made.update(task.writes)
        while leaving and leaving[0].reads[0] in made:
            tasks.append(leaving.popleft())
    return listed._replace(tasks=(*tasks, *leaving, *_as_they_can(updates, ordered)))


def _ordered(messages: Sequence[Communicate], first_use: Mapping[str, int]) -> list[Communicate]:
    asked = {name for one in messages for name in one.reads[1:]}
    some = [messages[k] for k in range(len(messages) - 1 - BEFORE_THE_LAST, 0, -EVERY)]
    off = [one for one in some if one.name in first_use and len(one.reads) == 1 and asked.isdisjoint(one.writes)]
    ordered = [*(one for one in messages if one not in off), *sorted(off, key=lambda one: first_use[one.name])]
    # The last message to come back also writes the bytes of all.
    told = [name for one in messages for name in one.writes if name == BYTES]
    return [one._replace(writes=(one.writes[0], *(told if one is ordered[-1] else ()))) for one in ordered]


def _as_they_can(updates: Sequence[Task], messages: Sequence[Communicate]) -> list[Task]:
    """Updates in the order in which messages come back."""
    there = {name: k for k, message in enumerate(messages, 1) for name in message.writes}
    places = list[int]()
    for task in updates:
        places.append(max((there.get(name, 0) for name in task.reads), default=0))
        there.update(dict.fromkeys(task.writes, places[-1]))
    return [task for _, task in sorted(zip(places, updates), key=lambda pair: pair[0])]
