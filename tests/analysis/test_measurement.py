"""The shares of a step's time, checked on steps with known spans."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fddp
from fddp.analysis.measure import COLLECTIVE, MeasuredStep, Measurement, read_steps
from fddp.jax_internals import KINDS, parse
from fddp.step.schedules import Span, Timeline


def compute(start: float, end: float) -> Span:
    return Span("compute", "stage", start, end)


def send(start: float, end: float) -> Span:
    return Span("communication", f"bucket at {start:g}", start, end, 400)


# 10 s: idle for 1, then 5 of computing, 3 of sending of which 1 lies under it, an update of 1, idle
# again for 1.
SPANS = (compute(101, 104), compute(104, 106), send(105, 107), send(107, 108), compute(108, 109))
BY_HAND = Measurement((MeasuredStep(10, Timeline(SPANS)),), {})


def three_layers(params: Any, batch: Any) -> jax.Array:
    hidden = batch
    for name in ("a", "b", "c"):
        hidden = jnp.tanh(hidden @ params[name])
    return jnp.mean(hidden**2)


PARAMS = {name: np.full((16, 16), 0.1, np.float32) for name in ("a", "b", "c")}


def trained(
    group: fddp.Group, steps: int, **options: Any
) -> tuple[fddp.TrainStep, fddp.TrainState, Any]:
    """A step that trained on three layers, its state and a batch."""
    step = fddp.train_step(three_layers, optax.sgd(0.1), group=group, bucket_cap_mb=0, **options)
    state = step.init(PARAMS)
    batch = np.ones((2 * group.size, 16), np.float32)
    for _ in range(steps):
        state, _ = step(state, batch)
    return step, state, batch


### By hand


def test_compute_non_compute_and_idle_share_the_step():
    shares = (BY_HAND.compute_percent, BY_HAND.non_compute_percent, BY_HAND.idle_percent)
    assert shares == (60, 20, 20)


def test_overlap_is_the_share_of_the_traffic():
    assert BY_HAND.overlap_percent == pytest.approx(100 / 3)
    assert BY_HAND.all_reduces == 2


def test_shares_are_of_all_steps_together():
    quiet = MeasuredStep(30, Timeline((compute(0, 30),)))
    both = Measurement((*BY_HAND.steps, quiet), {})
    assert (both.compute_percent, both.non_compute_percent, both.idle_percent) == (90, 5, 5)
    assert (both.step_ms, both.all_reduces) == (20_000, 2)


def test_a_step_without_traffic_overlaps_nothing():
    quiet = Measurement((MeasuredStep(1, Timeline((compute(0, 1),))),), {})
    assert (quiet.overlap_percent, quiet.all_reduces) == (0, 0)


def test_a_message_that_lies_in_two_steps_is_one_of_each():
    spans = [
        Span("communication", "bucket 1", 0, 2, 8),
        *(Span("communication", f"bucket {k}", 3, 4, 8) for k in (0, 1)),
    ]
    assert Measurement((MeasuredStep(4, Timeline(tuple(spans))),), {}).all_reduces == 2


def test_the_table_names_each_share():
    lines = str(BY_HAND).splitlines()
    assert lines[0] == "1 steps, 10000.00 ms each (median)"
    assert [line.split("  ")[0] for line in lines[1:]] == [
        *("compute", "non-compute", "idle", "overlap", "all-reduces")
    ]
    assert "60.0%" in lines[1]


### In a profile


def plane(name: str, *events: tuple[str, float, float, dict[str, Any]]) -> list[Any]:
    """A plane of a profile: events by name, start and end in seconds, and stats."""
    return [(name, n, start, end - start, stats) for n, start, end, stats in events]


def op(name: str, device: int = 0) -> dict[str, Any]:
    return {"hlo_op": name, "device_ordinal": device}


def test_a_profile_of_cpu_devices_is_read_for_the_first_of_them():
    host = plane(
        "/host:CPU",
        ("fddp step", 0, 10, {}),
        ("dot.1", 1, 3, op("dot.1")),
        ("dot.1", 2, 9, op("dot.1", 1)),
        ("while.2", 3, 8, op("while.2")),
        ("psum.7", 3, 5, op("psum.7")),
        ("Rendezvous", 3, 5, {}),
        ("dot.1", 12, 13, op("dot.1")),  # of no step
    )
    ((seconds, line),) = read_steps(host)
    assert seconds == 10
    assert [(span.kind, span.name, span.start, span.end) for span in line.spans] == [
        ("compute", "dot.1", 1, 3),
        ("communication", "psum.7", 3, 5),
    ]


def test_a_profile_of_accelerators_is_read_from_their_planes():
    host = plane("/host:CPU", ("fddp step", 0, 10, {}), ("launch", 0, 1, op("gemm")))
    second = plane("/device:GPU:1", ("gemm_kernel", 1, 9, {"hlo_op": "gemm"}))
    first = plane(
        "/device:GPU:0",
        ("gemm_kernel", 1, 5, {"hlo_op": "gemm"}),
        ("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 2, 6, {"hlo_op": "all-reduce-start"}),
    )
    ((_, line),) = read_steps(host + second + first)
    assert (line.computing, line.communicating, line.exposed) == (4, 4, 1)


### Of real steps


def spans_within(step: MeasuredStep) -> bool:
    line = step.timeline
    return max(line.seconds, line.computing + line.exposed) <= step.seconds


def test_a_step_is_seen_by_the_profiler(group):
    step, state, batch = trained(group(2), 0)
    measurement = fddp.measure(step, state, [batch] * 2)
    assert len(measurement.steps) == 2
    assert measurement.all_reduces == len(step.plan.buckets) == 3
    for measured in measurement.steps:
        assert spans_within(measured)
        assert len(measured.timeline.communication) == 3
        assert measured.timeline.computing > 0


def test_measuring_changes_nothing_of_the_training(group):
    step, state, batch = trained(group(2), 1)
    before = jax.tree.map(np.asarray, state.params)
    fddp.measure(step, state, [batch])
    assert jax.tree.all(jax.tree.map(lambda a, b: bool(np.all(a == b)), before, state.params))
    state, _ = step(state, batch)  # its memory was not given away
    _, unmeasured, _ = trained(group(2), 2)
    assert jax.tree.all(
        jax.tree.map(lambda a, b: bool(np.all(a == b)), state.params, unmeasured.params)
    )


def test_steps_that_a_measurement_could_not_end_are_none_of_the_training(group):
    step = fddp.train_step(lambda w, x: jnp.mean((w - x) ** 2), optax.sgd(0.1), group=group(1))
    state, _ = step(step.init(jnp.zeros(())), jnp.ones(2))
    for measured in (step, step.on(step.group)):
        with pytest.raises(ValueError, match="0 rows"):
            fddp.measure(measured, state, [jnp.ones(2), jnp.ones(0)])
        assert measured.training.of(state.step) == 1


def test_there_must_be_something_to_measure(group):
    step, state, _ = trained(group(1), 0)
    with pytest.raises(ValueError, match="nothing to measure"):
        fddp.measure(step, state, [])


### DDP's logs


def test_facts_are_those_of_the_group_and_of_the_buckets(group):
    facts = fddp.measure(*trained(group(4), 3)[:2], [np.ones((8, 16), np.float32)]).facts
    assert (facts["world_size"], facts["backend_name"]) == (4, "local")
    assert (facts["num_parameter_tensors"], facts["total_parameter_size_bytes"]) == (3, 3 * 1024)
    assert facts["bucket_sizes"] == (1024, 1024, 1024)
    assert facts["grad_ready_order"] == ("c", "b", "a")
    assert (facts["skipped_steps"], facts["watchers_said"]) == (0, "")


def test_a_collective_of_any_kind_is_traffic():
    kernels = (
        "all-to-all.3",
        "all-gather-start.1",
        "psum.2",
        "ncclDevKernel_SendRecv",
        "mpi_allgather_ffi",
        "all_to_all",
        "collective-permute-start.4",
        "collective-broadcast.1",
        "pbroadcast.2",
    )
    assert all(
        COLLECTIVE.search(name)
        for name in (*kernels, "ncclDevKernel_AllReduce_Sum_f32_RING_LL", "reduce-scatter")
    )
    assert not any(
        COLLECTIVE.search(name)
        for name in ("dot.3", "reduce.4", "gather.1", "loop_fusion", "scatter")
    )
    assert not any(
        COLLECTIVE.search(name)
        for name in ("broadcast.3", "reduce_max.4", "argmin.2", "permutation", "pow.1")
    )


@pytest.mark.parametrize(
    "collective",
    [
        jax.lax.psum,
        jax.lax.pmax,
        jax.lax.pmin,
        jax.lax.all_gather,
        lambda x, axis: jax.lax.ppermute(x, axis, [(0, 1), (1, 0)]),
        lambda x, axis: jax.lax.all_to_all(x, axis, 0, 0),
        lambda x, axis: jax.lax.psum_scatter(x, axis),
    ],
    ids=("psum", "pmax", "pmin", "all_gather", "ppermute", "all_to_all", "psum_scatter"),
)
def test_what_jax_sends_is_traffic_under_the_name_that_it_has_in_the_program(collective):
    """A profile has the names of instructions; whether one sends, its opcode says."""
    mesh = jax.sharding.Mesh(jax.devices()[:2], "replica")
    spec = jax.sharding.PartitionSpec("replica")
    spread = jax.shard_map(
        lambda x: jnp.tanh(x) + jnp.sum(collective(x, "replica")),
        mesh=mesh,
        in_specs=spec,
        out_specs=spec,
    )
    lines = [
        line
        for line, _ in next(
            parse(jax.jit(spread).lower(jnp.ones(4)).compile().as_text() or "").schedules()
        ).lines
    ]
    collectives = [line.name for line in lines if line.opcode.startswith(KINDS)]
    assert collectives and all(COLLECTIVE.search(name) for name in collectives)
    computing = [line.name for line in lines if line.opcode in ("fusion", "copy", "parameter")]
    assert computing and not any(COLLECTIVE.search(name) for name in computing)
