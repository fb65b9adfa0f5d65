"""Every replica goes on with the same buffers: replica 0's, or the mean of all, or each with its
own.

That `no_sync` leaves them alone is in `test_no_sync.py`; how they go between processes in
`on_ranks/buffers.py`.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from every_schedule import SCHEDULES

import fddp

REPLICAS = 4


def noting(w: Any, x: Any, *, model_state: Any) -> Any:
    """Adds this replica's mean to one buffer and counts its steps in another."""
    new = {"seen": model_state["seen"] + jnp.mean(x), "count": model_state["count"] + 1}
    return jnp.mean((x - w) ** 2), (new, None)


def buffers(group: Any, mode: Any, schedule: Any, steps: int = 2) -> Any:
    step = fddp.train_step(
        noting, optax.sgd(0.1), group=group(REPLICAS), broadcast_buffers=mode, schedule=schedule
    )
    state = step.init(np.float32(0), model_state={"seen": np.float32(0), "count": np.int32(0)})
    for _ in range(steps):
        state, _ = step(state, np.array([1, 2, 4, 9], np.float32))
    return state.model_state


def on_each(x: Any) -> list[float]:
    return [float(np.asarray(shard.data)) for shard in x.addressable_shards]


@SCHEDULES
@pytest.mark.parametrize(
    ("mode", "expected"),
    [(True, [2.0] * 4), ("mean", [8.0] * 4), (False, [2.0, 4.0, 8.0, 18.0])],
    ids=str,
)
def test_after_two_steps_the_buffers_are_replica_0s_or_the_mean_or_each_replicas_own(
    group, schedule, mode, expected
):
    state = buffers(group, mode, schedule)
    assert on_each(state["seen"]) == expected
    assert on_each(state["count"]) == [2.0] * 4


ODD = {
    "zeros": np.array([-0.0, 0.0], np.float32),
    "small": np.array([1e-45, -1e-40], np.float32),  # below the normal numbers
    "nan": np.array([0x7FC12345, 0xFF800001], np.uint32).view(np.float32),  # with a payload
    "half": np.array([-0.0, 6e-8, 1 / 3], np.float16),
    "bfloat16": np.array([-0.0, 1e-40, 1 / 3], jnp.bfloat16),
    "float8": np.array([-0.0, 448, 2**-9], jnp.float8_e4m3fn),
    "float4": np.array([-0.0, 6, 0.5], jnp.float4_e2m1fn),
    "int4": np.array([-8, 7, 0], jnp.int4),
    "uint4": np.array([15, 0, 1], jnp.uint4),
    "complex": np.array([complex(-0.0, 1e-45), 1j], np.complex64),
    "flags": np.array([True, False]),
    "empty": np.zeros((0, 2), np.float32),
}


@SCHEDULES
def test_buffers_of_any_dtype_are_replica_0s_bit_for_bit(group, schedule):
    """Replica 0's rows are ones, the others' twos: only ones may be seen."""

    def loss(w: Any, x: Any, *, model_state: Any) -> Any:
        is_first = jnp.all(x == 1)
        leaves = {
            name: jnp.where(is_first, jnp.asarray(old), jnp.ones_like(old))
            for name, old in model_state["odd"].items()
        }
        key = jnp.where(is_first, jax.random.key(7), jax.random.key(8))
        return jnp.mean((x - w) ** 2), ({"odd": leaves, "key": key}, None)

    step = fddp.train_step(loss, optax.sgd(0.1), group=group(REPLICAS), schedule=schedule)
    state = step.init(np.float32(0), model_state={"odd": ODD, "key": jax.random.key(0)})
    state, _ = step(state, np.array([1, 2, 2, 2], np.float32))
    for name, value in ODD.items():
        for shard in state.model_state["odd"][name].addressable_shards:
            assert shard.data.dtype == value.dtype, name
            assert np.asarray(shard.data).tobytes() == value.tobytes(), name
    assert state.model_state["key"] == jax.random.key(7)


@SCHEDULES
def test_the_sum_of_buffers_of_16_bits_may_be_more_than_they_hold(group, schedule):
    loss = lambda w, x, *, model_state: (jnp.mean((x - w) ** 2), (model_state, None))  # noqa: E731
    step = fddp.train_step(
        loss, optax.sgd(0.1), group=group(REPLICAS), broadcast_buffers="mean", schedule=schedule
    )
    state, _ = step(
        step.init(np.float32(0), model_state=np.float16(20_000)), np.ones(REPLICAS, np.float32)
    )
    assert state.model_state.dtype == np.float16 and state.model_state == 20_000


@SCHEDULES
@pytest.mark.parametrize("dtype", [jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.float4_e2m1fn], ids=str)
def test_buffers_of_8_bits_and_less_are_averaged(group, schedule, dtype):
    """1, 2, 2 and 3 on the four replicas have the mean 2 in any float."""

    def loss(w: Any, x: Any, *, model_state: Any) -> Any:
        return jnp.mean((x - w) ** 2), (jnp.full_like(model_state, x[0]), None)

    options: Any = {"broadcast_buffers": "mean", "schedule": schedule}
    step = fddp.train_step(loss, optax.sgd(0.1), group=group(REPLICAS), **options)
    state = step.init(np.float32(0), model_state=np.zeros(2, dtype))
    state, _ = step(state, np.array([1, 2, 2, 3], np.float32))
    assert state.model_state.dtype == dtype
    assert np.asarray(state.model_state, np.float32).tolist() == [2.0, 2.0]


@SCHEDULES
def test_the_mean_of_buffers_in_64_bits_is_not_rounded_to_those_of_the_loss(group, schedule, x64):
    def loss(w: Any, x: Any, *, model_state: Any) -> Any:
        return jnp.mean((x - w) ** 2), (model_state + x[0].astype(jnp.float64) * 2.0**-40, None)

    options: Any = {"broadcast_buffers": "mean", "schedule": schedule}
    step = fddp.train_step(loss, optax.sgd(0.1), group=group(REPLICAS), **options)
    state = step.init(np.float32(0), model_state=np.float64(1))
    state, info = step(state, np.array([1, 2, 2, 3], np.float32))
    assert info.loss.dtype == np.float32
    assert float(state.model_state) == 1 + 2.0**-39


@SCHEDULES
def test_buffers_that_are_averaged_cost_no_message_of_their_own(group, schedule):
    step = fddp.train_step(
        noting, optax.sgd(0.1), group=group(REPLICAS), broadcast_buffers="mean", schedule=schedule
    )
    state = step.init(np.float32(0), model_state={"seen": np.float32(0), "count": np.int32(0)})
    _, info = step(state, np.ones(4, np.float32))
    assert len(info.sent) == len(step.plan.buckets) == 1


def test_averaged_batch_norm_statistics_are_those_of_all_rows(group):
    """Running means are linear in the rows; the variances of parts do not add up to that of the
    whole, as in DDP."""
    rows = np.random.default_rng(0).normal(size=(16, 3)).astype(np.float32)

    def loss(w: Any, x: Any, *, model_state: Any) -> Any:
        mean = jnp.mean(x, 0)
        return jnp.mean((x - mean) ** 2 * w), (0.9 * model_state + 0.1 * mean, None)

    step = fddp.train_step(loss, optax.sgd(0.1), group=group(REPLICAS), broadcast_buffers="mean")
    state, _ = step(step.init(np.float32(1), model_state=np.zeros(3, np.float32)), rows)
    np.testing.assert_allclose(state.model_state, 0.1 * rows.mean(0), rtol=1e-5, atol=1e-7)
    assert jax.tree.leaves(state.model_state)[0].sharding.is_fully_replicated


def test_a_seed_among_the_buffers_is_folded_with_the_replica_as_docs_keras_says(
    group: Callable[[int], fddp.Group],
):
    """A stand-in for Keras: a layer reads its seed from the buffers, and counts its draws there."""

    def stateless_call(w: Any, buffers: list[Any], x: Any) -> Any:
        (seed,) = buffers
        kept = jax.random.bernoulli(jax.random.wrap_key_data(seed), 0.5, x.shape)
        return kept * (x + w), [seed.at[1].add(1)]

    def loss(w: Any, x: Any, *, model_state: Any) -> Any:
        number = jax.lax.axis_index("replica").astype(jnp.uint32) * jnp.uint32(0x9E3779B1)
        out, buffers = stateless_call(w, [v.at[0].add(number) for v in model_state], x)
        masks = jax.lax.all_gather(out != 0, "replica")
        return jnp.mean(out), (buffers, {"masks": masks.astype(jnp.float32)})

    step = fddp.train_step(loss, optax.sgd(0.1), group=group(4), has_aux=True)
    seed = np.array([7, 0], np.uint32)
    state = step.init(np.float32(0), model_state=[seed])
    state, info = step(state, np.ones((128,), np.float32))
    assert len(np.unique(np.asarray(info.aux["masks"]), axis=0)) == 4
    np.testing.assert_array_equal(np.asarray(state.model_state[0]), [7, 1])
