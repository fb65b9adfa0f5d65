"""Replicas are compared bit for bit, now and then: an error names the leaf and the rank that
differ."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fddp
from fddp.training.digests import _digest

DTYPES = (
    "float32",
    "bfloat16",
    "float16",
    "int32",
    "uint8",
    "int8",
    "bool",
    "float8_e4m3fn",
    "complex64",
)


def flipped(x: np.ndarray, bit: int) -> np.ndarray:
    data = bytearray(x.tobytes())
    data[bit // 8] ^= 1 << bit % 8
    return np.frombuffer(bytes(data), x.dtype).reshape(x.shape)


@pytest.mark.steps
@given(dtype=st.sampled_from(DTYPES), size=st.integers(1, 5), data=st.data())
def test_any_bit_that_flips_changes_the_digest(dtype: str, size: int, data: Any):
    kind = jnp.dtype(dtype)
    x = np.frombuffer(
        data.draw(st.binary(min_size=size * kind.itemsize, max_size=size * kind.itemsize)), kind
    )
    bit = data.draw(st.integers(0, x.nbytes * 8 - 1))
    if dtype == "bool":  # with one bit set in each byte
        x = x.view(np.uint8) % 2 == 1
        bit = bit // 8 * 8
    assert int(_digest(jnp.asarray(x))) != int(_digest(jnp.asarray(flipped(x, bit))))


def test_two_values_that_change_places_change_the_digest():
    assert int(_digest(jnp.array([1.0, 2.0]))) != int(_digest(jnp.array([2.0, 1.0])))


def make(group: fddp.Group) -> tuple[fddp.TrainStep, fddp.TrainState]:
    step = fddp.train_step(
        lambda p, x: jnp.mean((x @ p["w"] + p["b"]) ** 2),
        optax.adam(0.1),
        group=group,
        check_replicas_every=2,
    )
    return step, step.init({"w": np.ones((3, 4), np.float32), "b": np.zeros(4, np.float32)})


def with_one_bit(x: jax.Array, replica: int) -> jax.Array:
    """The array with another last bit on one replica."""
    shards = [np.asarray(shard.data) for shard in x.addressable_shards]
    shards[replica] = flipped(shards[replica], 8 * (x.nbytes - 4))
    arrays = [
        jax.device_put(part, shard.device) for part, shard in zip(shards, x.addressable_shards)
    ]
    return jax.make_array_from_single_device_arrays(x.shape, x.sharding, arrays)


X = np.ones((8, 3), np.float32)


def test_replicas_that_stay_equal_train_on(group: Callable[[int], fddp.Group]):
    step, state = make(group(4))
    for _ in range(4):
        state, _ = step(state, X)


def test_a_bit_that_flips_on_one_replica_is_found_and_named(group: Callable[[int], fddp.Group]):
    step, state = make(group(4))
    state, _ = step(state, X)
    state = state._replace(params=state.params | {"w": with_one_bit(state.params["w"], 2)})
    with pytest.raises(
        RuntimeError, match=r"after step 2: params/w of rank 0, replica 2 differs from the others'"
    ):
        step(state, X)


def test_the_state_of_the_optimizer_is_compared_too(group: Callable[[int], fddp.Group]):
    step, state = make(group(2))
    state, _ = step(state, X)
    (adam, tail) = state.opt_state
    state = state._replace(
        opt_state=(adam._replace(nu=adam.nu | {"b": with_one_bit(adam.nu["b"], 1)}), tail)
    )
    with pytest.raises(RuntimeError, match="opt_state/0/nu/b differs, without a majority"):
        step(state, X)


def test_replicas_that_are_not_equal_at_first_are_named_before_the_first_step(
    group: Callable[[int], fddp.Group],
):
    step, state = make(group(4))
    state = state._replace(params=state.params | {"b": with_one_bit(state.params["b"], 3)})
    with pytest.raises(
        RuntimeError, match="not equal before the first step: params/b of rank 0, replica 3 differs"
    ):
        step(state, X)
    assert not state.params["b"].is_deleted()


@pytest.mark.steps
@pytest.mark.parametrize(
    "optimizer", [optax.sgd(0.1), optax.sgd(0.1, momentum=0.9), optax.lars(0.1)]
)
def test_a_state_that_lies_in_shards_alone_has_nothing_to_compare(
    group: Callable[[int], fddp.Group], optimizer: Any
):
    loss_fn = lambda p, x: jnp.mean((x @ p["w"]) ** 2)  # noqa: E731
    options: Any = {"shard": "state", "check_replicas_every": 2}
    step = fddp.train_step(loss_fn, optimizer, group=group(2), **options)
    state = step.init({"w": np.ones((3, 4), np.float32)})
    for _ in range(4):
        state, _ = step(state, X)
    assert np.isfinite(np.asarray(fddp.whole(state.params, group=group(2))["w"])).all()


@pytest.mark.parametrize("every", [-1, 1.5, True])
def test_what_is_no_number_of_steps_is_refused(every: Any):
    with pytest.raises(ValueError, match="check_replicas_every must be a whole number"):
        fddp.train_step(lambda w, x: jnp.mean(w * x), optax.sgd(0.1), check_replicas_every=every)
