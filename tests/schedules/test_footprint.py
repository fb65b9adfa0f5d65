"""The memory of a list of tasks is the largest sum of the values alive at a task."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fddp
from fddp.schedules.footprint import Footprint, Moment, Planned, footprint
from fddp.schedules.tasks import Communicate, Compute
from fddp.schedules.values import Value

W = Value("state", path="w")
M = Value("state", path="m")
ROWS = Value("rows")
KEPT = Value("stage", 0, "x")
MESSAGES = [Value("message", k) for k in range(2)]
SUMS = [Value("sum", k) for k in range(2)]
NEW = Value("result", path="0/w")
STEP = (
    Compute("stage 0", (W, ROWS), (KEPT, MESSAGES[0])),
    Communicate("bucket 0", (MESSAGES[0],), (SUMS[0],)),
    Compute("stage 1", (W, KEPT), (MESSAGES[1],)),
    Communicate("bucket 1", (MESSAGES[1],), (SUMS[1],)),
    Compute("update 0", (W, *SUMS), (NEW,), kind="update"),
)
SIZES = {W: 1000, M: 500, ROWS: 50, KEPT: 7, NEW: 1000, **dict.fromkeys((*MESSAGES, *SUMS), 100)}
RESTS = 1000 + 500 + 50


def at(planned: dict[str, Planned]) -> list[int]:
    computed = footprint(STEP, SIZES, planned, {W, M, ROWS}, {NEW})
    assert computed.rests == RESTS
    return [nbytes - RESTS for _, nbytes in computed.moments]


def test_a_value_takes_memory_from_its_writer_to_its_last_reader():
    residual = 7
    message = 100
    total = 100
    new = 1000
    assert at({}) == [
        residual + message,
        residual + message + total,
        residual + total + message,
        total + message + total,
        total + total + new,
    ]


def test_a_program_takes_what_is_planned_for_it_while_it_runs():
    temporary = {"stage 1": Planned(3000), "update 0": Planned(40)}
    assert [a - b for a, b in zip(at(temporary), at({}))] == [0, 0, 3000, 0, 40]


def test_a_value_that_is_written_over_takes_nothing_twice():
    assert at({"update 0": Planned(0, donated=[W])})[-1] == at({})[-1] - 1000


def test_a_value_that_nobody_reads_is_there_while_it_is_written():
    tasks = (Compute("a", (W,), (KEPT,)), Compute("b", (W,), (NEW,)))
    assert [nbytes for _, nbytes in footprint(tasks, SIZES, {}, {W}, {NEW}).moments] == [1007, 2000]


def test_the_peak_is_at_the_fullest_task():
    summary = Footprint(5, (Moment("a", 7), Moment("b", 9), Moment("c", 8)))
    assert (summary.fullest.task, summary.peak) == ("b", 9)
    assert Footprint(5, ()).peak == 5


WIDTH = 256
LEAF = 4 * WIDTH**2
WAYS: dict[str, dict[str, Any]] = {
    "whole": {},
    "optimizer": {"shard": "optimizer"},
    "state": {"shard": "state"},
}


def loss_fn(params: Any, x: Any) -> jax.Array:
    for w in params.values():
        x = jnp.tanh(x @ w)
    return jnp.mean(x**2)


def step_of(**options: Any) -> fddp.TrainStep:
    group = fddp.mesh_group(jax.sharding.Mesh(jax.devices()[:4], "replica"))
    return fddp.train_step(loss_fn, optax.adam(0.1), group=group, bucket_cap_mb=0, **options)


PARAMS = {f"w{k}": np.full((WIDTH, WIDTH), 0.01, np.float32) for k in range(8)}
BATCH = np.ones((4, WIDTH), np.float32)


@pytest.mark.quick("eager")
@pytest.mark.steps
@pytest.mark.parametrize("schedule", ["fused", "staged", "eager"])
def test_what_rests_is_the_state_and_the_rows(schedule: str):
    leaves = 8 * LEAF
    expected = {"whole": 3 * leaves, "optimizer": leaves * 3 / 2, "state": leaves * 3 / 4}
    for way, nbytes in expected.items():
        step = step_of(schedule=schedule, **WAYS[way])
        memory = fddp.audit(step, step.init(PARAMS), BATCH).memory
        assert memory is not None
        assert memory.given == pytest.approx(nbytes, abs=2 * 4 * WIDTH)


@pytest.mark.steps
def test_a_staged_step_in_shards_holds_two_buckets_at_once_if_it_gathers_twice():
    audits = {
        way: fddp.audit(step := step_of(schedule="staged", **o), step.init(PARAMS), BATCH)
        for way, o in WAYS.items()
    }
    more = {way: audit.memory.more / LEAF for way, audit in audits.items() if audit.memory}
    assert more["state"] > 8  # all are gathered before the first stage
    assert more["state"] < more["whole"]
    audit = audits["state"]
    assert audit.tasks is not None
    assert {task for task, _ in audit.tasks.moments} >= {"tail", "bucket 0", "stage 0"}
    assert str(audit).endswith(f"memory of a device: {audit.memory}, in {audit.tasks.fullest.task}")
    assert audit.problems() == ()


@pytest.mark.quick("staged")
@pytest.mark.steps
@pytest.mark.parametrize("schedule", ["fused", "staged", "eager"])
def test_a_step_that_ran_tells_its_peak_and_compiles_nothing_for_it(schedule: str):
    step = step_of(schedule=schedule)
    state = step.init(PARAMS)
    assert step.stats().peak_bytes is None
    state, _ = step(state, BATCH)
    compiled = list[str]()

    def note(event: str, duration_secs: float, **kwargs: str | int) -> None:
        del duration_secs, kwargs
        compiled.append(event)

    jax.monitoring.register_event_duration_secs_listener(note)
    peak = step.stats().peak_bytes
    jax.monitoring.unregister_event_duration_listener(note)
    assert [event for event in compiled if "backend_compile" in event] == []
    memory = fddp.audit(step, state, BATCH).memory
    assert memory is not None and peak == memory.peak
