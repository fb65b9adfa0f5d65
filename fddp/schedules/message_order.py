"""The order in which messages leave whose sums the next step's forward pass needs late.

Gradients become ready in the reverse of the order in which the next forward pass uses the
parameters. If messages leave as they are ready, its first layers wait longest. If they leave by
first use alone, the link idles during the backward pass. The order here lies between the two: most
messages leave as they are ready; some are deferred until the last one has left, and then leave by
first use. On two hosts this order took 0.97 to 1.00 of the time of the order of readiness.

Source: P3 (Jayarajan et al., SysML 2019); ByteScheduler (Peng et al., SOSP 2019); TicTac (Hashemi
et al., SysML 2019).
"""

from collections import deque
from collections.abc import Mapping, Sequence

from fddp.jaxpr import arrivals, first_uses
from fddp.schedules.tasks import Communicate, Compute, Task, TaskList
from fddp.schedules.uncut import Program
from fddp.schedules.values import BYTES, Value

EVERY = 4  # one message of this many is deferred
BEFORE_THE_LAST = 2  # this many last messages are never deferred


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


def trailed(listed: TaskList, first_use: Mapping[str, int]) -> TaskList:
    """Defers some messages, and orders updates by the last message that each needs.

    `listed` holds stages, each followed by its messages, and updates of one message each.
    `first_use` maps a message that may be deferred to the position of its first use in the next
    forward pass, equal on all ranks, whose programs may differ.
    """
    updates = [task for task in listed.tasks if task.kind == "update"]
    replaced = any(value.replaces in task.reads for task in updates for value in task.writes)
    if not replaced:  # gradients that are returned have no next step: none of them is deferred
        first_use = {}
    return leaving_in(listed, _ordered(listed.messages, first_use))


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
