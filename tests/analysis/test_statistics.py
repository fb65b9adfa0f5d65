"""Bytes that a replica holds and sends, against the arrays on its device and its messages."""

import html
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fddp
from fddp.buckets import MiB
from fddp.schedules import SCHEDULES, Pieces, Runner, Schedule, fused

pytestmark = pytest.mark.steps

Groups = Callable[[int], fddp.Group]
# On four replicas 42, 2 and 1 elements are filled up to 44, 4 and 4.
PARAMS = {
    "w": np.ones((6, 7), np.float32),
    "b": np.ones(2, np.float32),
    "s": np.ones((), np.float32),
}
PADDING = 4 * (2 + 2 + 3)
ROWS = np.ones((8, 6), np.float32)


def loss_fn(p: Any, x: Any, model_state: Any) -> Any:
    return jnp.mean((x @ p["w"]) ** 2) + jnp.sum(p["b"]) * p["s"], (model_state, None)


def make(group: fddp.Group, shard: Any, **options: Any) -> tuple[fddp.TrainStep, fddp.TrainState]:
    step = fddp.train_step(
        loss_fn, optax.adamw(0.1), group=group, shard=shard, donate=False, **options
    )
    return step, step.init(PARAMS, model_state={"mean": np.ones(5, np.float32)})


def on_each_device(state: fddp.TrainState, name: str) -> list[int]:
    """Bytes of the arrays of a field."""
    shards = [part for x in jax.tree.leaves(getattr(state, name)) for part in x.addressable_shards]
    return [
        sum(part.data.nbytes for part in shards if part.device == device)
        for device in state.step.devices()
    ]


@pytest.mark.parametrize("shard", [None, "optimizer", "state"])
def test_what_a_replica_holds_is_what_lies_on_its_device(group: Groups, shard: str | None):
    step, state = make(group(4), shard)

    def check(state: fddp.TrainState) -> None:
        for name, nbytes in step.stats().replica_bytes.held._asdict().items():
            assert on_each_device(state, name) == [nbytes] * 4, name

    check(state)
    state, _ = step(state, ROWS)
    check(state)
    pending, _ = step.no_sync(state, ROWS)
    step(pending, ROWS)
    check(pending)
    step(state, ROWS)
    # Pending gradients are reported from then on, and are whole.
    assert step.stats().replica_bytes.held.accumulated > 4 * 45


@pytest.mark.parametrize("shard", ["optimizer", "state"])
def test_a_replica_holds_its_part_of_the_optimizers_state_and_of_the_padding(
    group: Groups, shard: str
):
    step, state = make(group(4), shard)
    (local, total, *_) = step.stats().replica_bytes
    count = state.opt_state[0].count.nbytes
    assert step.plan.padding == PADDING
    # Two moments for each parameter.
    assert local.opt_state == count + 2 * (4 * 45 + PADDING) // 4
    assert local.opt_state < total.opt_state / 4 + count + PADDING
    assert total == make(group(4), None)[0].stats().replica_bytes.whole
    assert local.params == ((4 * 45 + PADDING) // 4 if shard == "state" else total.params)


def test_without_shards_a_replica_holds_all(group: Groups):
    replica_bytes = make(group(4), None)[0].stats().replica_bytes
    assert replica_bytes.held == replica_bytes.whole and (
        replica_bytes.gradients,
        replica_bytes.sent,
    ) == (4 * 45, None)


@pytest.mark.parametrize("shard", ["optimizer", "state"])
def test_gradients_are_those_of_all_messages(
    group: Groups, shard: str, monkeypatch: pytest.MonkeyPatch
):
    sizes: list[int] = []

    def schedule(group: fddp.Group, pieces: Pieces, donate: bool) -> Runner:
        def watched(task: Any) -> Any:
            def run(*args: Any) -> Any:
                messages, residuals = task.run(*args)
                sizes[:] = [x.size * x.dtype.itemsize for x in messages.arrays]
                return messages, residuals

            return task._replace(run=run) if task.kind == "compute" else task

        return fused(group, pieces._replace(rounds=tuple(map(watched, pieces.rounds))), donate)

    monkeypatch.setitem(SCHEDULES, "fused", Schedule("fused", schedule, one_program=True))
    step, state = make(group(4), shard, schedule="fused", bucket_cap_mb=64 / MiB)
    _, info = step(state, ROWS)
    buckets = [
        nbytes for nbytes, message in zip(sizes, step.plan.messages) if message.bucket is not None
    ]
    replica_bytes = step.stats().replica_bytes
    (*bucket_bytes, scalars) = np.asarray(info.sent).tolist()
    assert len(buckets) > 1 and replica_bytes.gradients == sum(buckets) == 4 * 45 + PADDING
    # There and back, three quarters each.
    assert (
        sum(bucket_bytes) == 2 * replica_bytes.gradients * 3 // 4
        and replica_bytes.sent == sum(bucket_bytes) + scalars
    )


def test_printed_bytes_are_a_table(group: Groups):
    step, state = make(group(4), "optimizer")
    step(state, ROWS)
    replica_bytes = step.stats().replica_bytes
    lines = str(replica_bytes).splitlines()
    assert [line.split()[-2:] for line in lines[2:3]] == [
        [str(replica_bytes.held.opt_state), str(replica_bytes.whole.opt_state)]
    ]
    assert lines[-1].split()[-1] == str(replica_bytes.sent) and len(lines) == 8


def test_statistics_are_printed_as_a_table_and_shown_as_one_in_notebooks(group: Groups):
    step, state = make(group(1), None, schedule="after")
    for _ in range(2):
        state, _ = step(state, ROWS)
    stats = step.stats()
    lines = dict(line.split(maxsplit=1) for line in str(stats).splitlines())
    assert lines["world_size"] == "1" and lines["iteration"] == "2" and lines["hook"] == "-"
    assert lines["total_parameter_size_bytes"] == f"{4 * 45}" and lines["parameters"].split() == [
        "180",
        "180",
    ]
    assert re.fullmatch(r"\d+\.\d\d ms", lines["avg_backward_comm_time"])
    assert repr(stats.hook) in repr(stats)  # a record as well
    for shown in (stats, step.plan, step.tasks(state, ROWS), step.timeline()):
        assert shown._repr_html_() == f"<pre>{html.escape(str(shown))}</pre>"
