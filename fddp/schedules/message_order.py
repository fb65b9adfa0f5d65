"""The order in which messages leave whose sums the next step's forward pass needs late.

Gradients become ready in the reverse of the order in which the next forward pass uses the
parameters. If messages leave as they are ready, its first layers wait longest. If they leave by
first use alone, the link idles during the backward pass. The order here lies between the two: most
messages leave as they are ready; some are deferred until the last one has left, and then leave by
first use. Where computation takes longer than traffic no message waits for the link, and a
deferred message is only late. So both orders are made, and `Trial` measures in the first steps
which one is faster.

Source: P3 (Jayarajan et al., SysML 2019); ByteScheduler (Peng et al., SOSP 2019); TicTac (Hashemi
et al., SysML 2019).
"""

from collections import deque
from collections.abc import Mapping, Sequence
from statistics import median

import numpy as np

from fddp.comm import Group
from fddp.jaxpr import arrivals, first_uses
from fddp.schedules.tasks import BYTES, Communicate, Compute, Task, TaskList, Value
from fddp.schedules.uncut import Program

EVERY = 4  # one message of this many is deferred
BEFORE_THE_LAST = 2  # this many last messages are never deferred
TURNS = 3  # of each order
# Steps of a turn. The first is not timed: it overlaps the end of a step of the other order.
STEPS = 4
TRIED = 2 * TURNS * STEPS  # steps after which the faster order stays


def orders(listed: TaskList, first_use: Mapping[str, int]) -> tuple[TaskList, ...]:
    """The list with messages as they are ready, and with some deferred if that is another order."""
    ready = trailed(listed, {})
    deferred = trailed(listed, first_use)
    return (ready,) if deferred.messages == ready.messages else (ready, deferred)


def arrival_order(first: Program, update: Program) -> dict[Value, int]:
    """Ranks the state's arrays by arrival, if the last step's messages arrive by first use.

    Maps the name by which the first round reads an array to its place, from 1 on.
    """
    times = arrivals(update.closed, {at: k + 1 for at, k in update.sums.items()})
    message = {value.replaces: time for value, time in zip(update.writes, times) if time}
    uses = {
        name: use for name, use in zip(first.reads, first_uses(first.closed)) if name in message
    }
    order = dict.fromkeys(message[name] for name in sorted(uses, key=uses.__getitem__))
    places = {k: place for place, k in enumerate(order, 1)}
    return {name: places[message[name]] for name in uses}


class Trial:
    """Lets the possible orders take turns for a few steps, and then picks the fastest.

    Rank 0 decides at the first step of each turn. All ranks reach it together, because they call
    the step equally often. After an error on one rank alone they continue only if all have sent
    equally many messages, or none.
    """

    def __init__(self, group: Group) -> None:
        self._group = group
        self._steps = 0
        self._timed = False
        self._decided = False
        self._seconds = dict[int, list[float]]()
        self.latest = 0
        """The order of the last step."""

    def way(self, ways: int) -> int:
        """The number of the next step's order, of `ways`, the same on all ranks. Collective."""
        if ways > 1 and not self._decided:
            turn, place = divmod(self._steps, STEPS)
            self._steps += 1
            self._timed = place > 0
            if place == 0:
                self._group.lane.wait()
                local = np.array(self._next(turn, ways), np.uint8)
                self.latest, self._decided = self._group.hosts.broadcast(local, 0).tolist()
        return self.latest

    def took(self, seconds: float) -> None:
        """Records the duration of the step that has just returned."""
        if self._timed and not self._decided:
            self._seconds.setdefault(self.latest, []).append(seconds)

    def _next(self, turn: int, ways: int) -> Sequence[int]:
        """The order of this turn, and 1 if it is final."""
        if turn < ways * TURNS:
            return turn % ways, 0
        return min(self._seconds, key=lambda way: median(self._seconds[way]), default=0), 1


def trailed(listed: TaskList, first_use: Mapping[str, int]) -> TaskList:
    """Defers some messages, and orders updates by the last message that each needs.

    `listed` holds stages, each followed by its messages, and updates of one message each.
    `first_use` maps a message that may be deferred to the position of its first use in the next
    forward pass, equal on all ranks, whose programs may differ.
    """
    updates = [task for task in listed.tasks if task.kind == "update"]
    replaced = any(value.replaces in task.reads for task in updates for value in task.writes)
    # Gradients that are returned have no next step: none of them is deferred.
    return leaving_in(listed, _ordered(listed.messages, first_use if replaced else {}))


def leaving_in(listed: TaskList, messages: Sequence[Communicate]) -> TaskList:
    """Lets messages leave in an order, each as soon as it is ready and the earlier ones have left.

    Updates follow in the order in which their messages arrive.
    """
    updates = [task for task in listed.tasks if task.kind == "update"]
    waiting = deque(messages)
    tasks = list[Task]()
    ready = set[str]()
    for task in listed.tasks:
        if not isinstance(task, Compute) or task.kind == "update":
            continue
        tasks.append(task)
        ready.update(task.writes)
        while waiting and waiting[0].reads[0] in ready:
            tasks.append(waiting.popleft())
    return listed._replace(tasks=(*tasks, *waiting, *_by_arrival(updates, messages)))


def _ordered(messages: Sequence[Communicate], first_use: Mapping[str, int]) -> list[Communicate]:
    if not messages:
        return []
    flags = {name for message in messages for name in message.reads[1:]}
    candidates = [messages[k] for k in range(len(messages) - 1 - BEFORE_THE_LAST, 0, -EVERY)]
    deferred = [
        message
        for message in candidates
        if message.name in first_use
        and len(message.reads) == 1
        and flags.isdisjoint(message.writes)
    ]
    ordered = [message for message in messages if message not in deferred]
    ordered += sorted(deferred, key=lambda message: first_use[message.name])
    # The last message to arrive also writes the bytes of all.
    nbytes = tuple(name for message in messages for name in message.writes if name == BYTES)
    *earlier, last = (message._replace(writes=message.writes[:1]) for message in ordered)
    return [*earlier, last._replace(writes=(*last.writes, *nbytes))]


def _by_arrival(updates: Sequence[Task], messages: Sequence[Communicate]) -> list[Task]:
    """Updates in the order in which messages arrive."""
    arrival = {name: k for k, message in enumerate(messages, 1) for name in message.writes}
    times = list[int]()
    for task in updates:
        times.append(max((arrival.get(name, 0) for name in task.reads), default=0))
        arrival.update(dict.fromkeys(task.writes, times[-1]))
    return [task for _, task in sorted(zip(times, updates), key=lambda pair: pair[0])]
