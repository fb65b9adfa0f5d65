"""Bytes that a replica holds and sends, against the arrays on its device and its messages."""

import html
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fddp
from fddp.analysis.measure import bytes_of

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
        for name, nbytes in bytes_of(step.local_form).items():
            assert on_each_device(state, name) == [nbytes] * 4, name

    check(state)
    state, _ = step(state, ROWS)
    check(state)
    pending, _ = step.no_sync(state, ROWS)
    step(pending, ROWS)
    check(pending)
    step(state, ROWS)
    # Pending gradients are reported from then on, and are whole.
    assert bytes_of(step.local_form)["accumulated"] > 4 * 45


@pytest.mark.parametrize("shard", [None, "optimizer", "state"])
def test_a_replica_holds_its_part_of_the_optimizers_state_and_of_the_padding(
    group: Groups, shard: str | None
):
    step, state = make(group(4), shard)
    facts = fddp.measure(step, state, [ROWS]).facts
    count = state.opt_state[0].count.nbytes
    padding = PADDING if shard else 0
    assert step.plan.padding == padding
    # Two moments for each parameter.
    replicas = 4 if shard else 1
    assert facts["held"]["opt_state"] == count + 2 * (4 * 45 + padding) // replicas
    assert facts["whole"]["opt_state"] == count + 2 * 4 * 45
    parts = 4 if shard == "state" else 1
    assert facts["held"]["params"] == (4 * 45 + padding * (parts > 1)) // parts


def test_tables_are_shown_in_notebooks(group: Groups):
    step, state = make(group(1), None)
    state, _ = step(state, ROWS)
    measurement = fddp.measure(step, state, [ROWS])
    lines = dict(line.split(maxsplit=1) for line in str(measurement).splitlines())
    assert lines["world_size"] == "1" and lines["watchers_said"] == "-"
    assert lines["total_parameter_size_bytes"] == f"{4 * 45}"
    for shown in (measurement, step.plan):
        assert shown._repr_html_() == f"<pre>{html.escape(str(shown))}</pre>"
