"""Hooks of few bits send NumPy's codes by the same rule, in as many bytes, and remember the
residual."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fddp
from fddp import hooks
from fddp.hooks import GradBucket
from fddp.hooks.codes import decode, encode

pytestmark = pytest.mark.steps

DRAW = np.random.default_rng(7)


def test_numbers_of_four_bits_lie_in_pairs_the_first_one_low():
    words = np.asarray(encode(jnp.array([7.0, -7, 1, -2]), 4, 4))
    assert words[:2].tolist() == [7 | (16 - 7) << 4, 1 | (16 - 2) << 4]
    assert words[2:].view(np.float32).tolist() == [1]
    assert decode(jnp.asarray(words), 4, 4).tolist() == [7, -7, 1, -2]


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_block_with_a_number_that_is_not_finite_arrives_as_nan(bits: int, bad: float):
    numbers = jnp.array([1.0] * 8 + [bad] + [2.0] * 7)
    got = np.asarray(decode(encode(numbers, bits, 8), bits, 8))
    assert np.isfinite(got[:8]).all() and np.isnan(got[8:]).all()


### Sums of hooks, against NumPy


def nearest(rows: np.ndarray, bits: int, block: int) -> np.ndarray:
    """The decoded numbers for rows of padded numbers."""
    blocks = rows.reshape(-1, block)
    scale = np.abs(blocks).max(-1, keepdims=True) / (2 ** (bits - 1) - 1)
    return (np.round(blocks / np.where(scale == 0, 1, scale)) * scale).reshape(rows.shape)


@pytest.mark.parametrize("bits", [8, 4])
def test_sums_and_errors_are_those_of_the_rule(group: Any, bits: int):
    """Four steps of three replicas: the errors of the messages and of the sum both return."""
    replicas = group(3)
    size = 43
    block = 8
    hook = hooks.quantize(bits=bits, block=block)
    steps = DRAW.normal(size=(4, 3, size)).astype(np.float32)
    form = jax.ShapeDtypeStruct((size,), np.float32)
    per_replica = replicas.placement.per_replica

    def on_replica(row: Any, memory: Any) -> Any:
        memory = jax.tree.map(lambda x: x[0], memory)
        total, (memory,) = hook.apply(replicas.communicator, GradBucket(row[0], (form,)), (memory,))
        return total, jax.tree.map(lambda x: x[None], memory)

    program = replicas.placement.program(
        on_replica, (per_replica, per_replica), (jax.sharding.PartitionSpec(), per_replica)
    )
    memory = jax.tree.map(lambda x: jnp.stack([x] * 3), hook.init(form))
    length = -(-size // (3 * block)) * block
    residual = np.zeros((3, 3 * length))
    summed = np.zeros(3 * length)
    for rows in steps:
        got, memory = program(rows, memory)
        target = np.pad(rows, ((0, 0), (0, 3 * length - size))) + residual
        stood = np.stack([nearest(x.reshape(3, -1), bits, block).reshape(-1) for x in target])
        residual = np.where(np.arange(3 * length) < size, target - stood, 0)
        total = np.where(np.arange(3 * length) < size, stood.sum(0) + summed, 0)
        answer = nearest(total, bits, block)
        summed = np.where(np.arange(3 * length) < size, total - answer, 0)
        np.testing.assert_allclose(got, answer[:size], rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(memory["sent"], residual[:, :size], rtol=1e-3, atol=1e-5)
        np.testing.assert_allclose(np.sum(memory["summed"], 0), summed[:size], rtol=1e-3, atol=1e-5)


def test_what_is_lost_comes_later_under_another_plan_too(group: Any):
    """The messages received so far, plus the residuals of numbers and of sums, are all
    gradients."""
    weights = DRAW.normal(size=(2, 700)).astype(np.float32)
    rows = np.array([1.0, 3.0], np.float32)

    def loss(params: Any, x: Any) -> Any:
        return jnp.mean(x) * sum(jnp.vdot(params[name], w) for name, w in zip("ab", weights))

    step = fddp.train_step(loss, optax.sgd(1.0), group=group(2), hook=hooks.quantize(bits=4))
    state = step.init({"a": np.zeros(700, np.float32), "b": np.zeros(700, np.float32)})
    for count in range(1, 5):
        state, _ = step(state, rows)
        step = step.with_options(bucket_cap_mb=0) if count == 2 else step
    for name, w in zip("ab", weights):
        remembered = sum(
            np.sum(x.reshape(2, -1), 0) for x in jax.tree.leaves(state.hook_state[name])
        )
        np.testing.assert_allclose(
            -state.params[name] + remembered / 2, 4 * 2.0 * w, rtol=1e-3, atol=1e-3
        )


@pytest.mark.parametrize(
    ("hook", "of_256"),
    [(hooks.quantize(bits=8), 256 + 4), (hooks.quantize(bits=4), 128 + 4)],
    ids=str,
)
def test_bytes_are_those_of_the_code(group: Any, hook: fddp.Hook, of_256: int):
    step = fddp.train_step(lambda w, x: jnp.mean(x @ w), optax.sgd(0.1), group=group(2), hook=hook)
    _, info = step(step.init(np.ones(1024, np.float32)), np.ones((2, 1024), np.float32))
    # Each of two replicas sends the other two blocks of four, and then the sum of its own two.
    assert int(info.sent[0]) == 2 * 2 * of_256


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: hooks.quantize(bits=2), "bits must be 8 or 4, got 2"),
        (
            lambda: hooks.quantize(bits=4, block=7),
            "block must be a multiple of 2, so that numbers fill bytes, got 7",
        ),
    ],
)
def test_what_does_not_fill_bytes_is_refused(call: Any, message: str):
    with pytest.raises(ValueError, match=message):
        call()
