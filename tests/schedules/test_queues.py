"""Claims about tasks in several queues: errors, memory, and the record of their spans."""

import sys
import time
import weakref
from dataclasses import replace
from typing import Any

import pytest

from fddp.schedules import Span
from fddp.schedules.queues import HERE, Queues, by_kind, routed
from fddp.schedules.step_log import StepLog
from fddp.schedules.tasks import Communicate, Compute, Task
from fddp.schedules.values import Value

X, Y, Z = map(Value, "xyz")


def test_what_tasks_of_two_queues_read_is_given_to_neither():
    first, second = (Value("shards", path=str(k)) for k in range(2))
    step = Value("state", path="step")
    tasks = (
        Compute("stage", (step, first), (X,)),
        Compute("update", (step, second, X), (), kind="update"),
    )
    in_one_queue = {"stage": (first,), "update": (step, second, X)}
    assert routed(tasks, lambda task: HERE, ()).freed == in_one_queue
    assert routed(tasks, by_kind, ()).freed == {"stage": (first,), "update": (second, X)}


def test_an_error_in_one_queue_ends_all_that_wait_for_it():
    tasks = [Compute("a", (), (X,)), Compute("b", (X,), (Y,)), Compute("c", (Y,), (Z,))]
    queues = Queues(routed(tasks, lambda task: "c" if task.name == "c" else "a and b", [Z]), {}, {})

    def fails(task: Task, read: Any) -> Any:
        raise ArithmeticError(task.name)

    with pytest.raises(ArithmeticError, match="a"):
        queues.work("a and b", fails)
    with pytest.raises(ArithmeticError, match="a"):
        queues.work("c", lambda task, read: read)
    with pytest.raises(ArithmeticError, match="a"):
        queues.results()[Z].result()


def test_a_value_is_let_go_of_by_its_last_reader():
    class Big:
        pass

    tasks = [Compute("a", (), (X,)), Compute("b", (X,), (Y,)), Compute("c", (X, Y), (Z,))]
    queues = Queues(routed(tasks, lambda task: HERE, [Z]), {}, {})
    alive = list[Any]()

    def do(task: Task, read: Any) -> Any:
        if task.name == "a":
            value = Big()
            alive.append(weakref.ref(value))
            return (value,)
        read.clear()
        alive.append(alive[0]() is not None)
        return (0,)

    queues.work(HERE, do)
    assert alive[1:] == [True, False] and queues.results()[Z] == 0


def test_a_timeline_is_told_while_other_threads_note_their_tasks(monkeypatch: pytest.MonkeyPatch):
    log = StepLog()
    module = sys.modules[StepLog.__module__]
    log.begin()
    log.add(Span("communication", "gather 0", 0.0, time.perf_counter()))
    log.end()

    def leaving(span: Span, **times: float) -> Span:
        log.add(Span("communication", "gather 1", 0.0, 1.0))
        return replace(span, **times)

    monkeypatch.setattr(module, "replace", leaving)
    assert [span.name for span in log.timeline().spans] == ["gather 0"]


def test_of_a_task_that_goes_on_beyond_its_step_each_step_tells_its_part():
    log = StepLog()
    task = Compute("bucket 3", (), ())
    log.begin()
    with log.under_way(task):
        log.end()
        (before,) = log.timeline().spans
        log.begin()
    log.end()
    (after,) = log.timeline().spans
    assert (
        before.name == after.name == "bucket 3"
        and before.start < before.end <= after.start < after.end
    )
    log.begin()
    log.end()
    assert not log.timeline().spans, "what was over is forgotten"


def test_messages_of_one_name_have_their_own_values():
    first, second = (Value("message", k) for k in range(2))
    sums = [Value("sum", k) for k in range(2)]
    tasks = [
        Compute("a", (), (first,)),
        Communicate("bucket 0", (first,), (sums[0],)),
        Compute("b", (sums[0],), (second,)),
        Communicate("bucket 0", (second,), (sums[1],)),
        Compute("c", (sums[1],), (Z,), kind="update"),
    ]
    queues = Queues(routed(tasks, lambda task: HERE, [Z]), {}, {})
    queues.work(HERE, lambda task, read: [(task.name, *read)])
    assert queues.results() == {Z: ("c", ("bucket 0", ("b", ("bucket 0", ("a",)))))}
