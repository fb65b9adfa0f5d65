"""Momentum through a hook, with a variance that is frozen, is the algorithm of 1-bit Adam."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fddp
from fddp import hooks

pytestmark = pytest.mark.steps

SIZE = 32
START = 3
RATE = 0.05
B1 = 0.9
B2 = 0.99
EPS = 1e-8
ROWS = np.random.default_rng(5).normal(size=(8, 2, SIZE)).astype(np.float32)


class Frozen(NamedTuple):
    step: Any
    momentum: Any
    variance: Any


def one_bit_adam() -> optax.GradientTransformation:
    """Adam without bias correction, with a frozen variance, and with its momentum from the hook
    from then on."""

    def init(params: Any) -> Frozen:
        return Frozen(
            jnp.zeros((), jnp.int32), *(jax.tree.map(jnp.zeros_like, params) for _ in range(2))
        )

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        warm = state.step < START
        m = jax.tree.map(
            lambda m, g: jnp.where(warm, B1 * m + (1 - B1) * g, g), state.momentum, updates
        )
        v = jax.tree.map(
            lambda v, g: jnp.where(warm, B2 * v + (1 - B2) * g**2, v), state.variance, updates
        )
        return jax.tree.map(lambda m, v: -RATE * m / (jnp.sqrt(v) + EPS), m, v), Frozen(
            state.step + 1, m, v
        )

    return optax.GradientTransformation(init, update)


def coded(x: np.ndarray, block: int) -> np.ndarray:
    blocks = x.reshape(-1, block)
    return (np.where(blocks >= 0, 1, -1) * np.abs(blocks).mean(1, keepdims=True)).reshape(x.shape)


@pytest.mark.parametrize("schedule", ["fused", "eager"])
def test_it_is_the_algorithm_of_the_paper(group: Any, schedule: Any):
    """Warm-up with Adam, then m + δ of each worker in signs, their mean + δ of the server in signs
    again."""
    target = np.linspace(-1, 1, SIZE).astype(np.float32)
    loss = lambda w, x: jnp.mean(jnp.sum((w - target + x) ** 2, 1)) / 2  # noqa: E731
    hook = hooks.momentum(hooks.sign(block=8), start=START, b1=B1)
    step = fddp.train_step(loss, one_bit_adam(), group=group(2), hook=hook, schedule=schedule)
    state = step.init(np.zeros(SIZE, np.float32))
    nbytes = []
    w, m, v = np.zeros((3, SIZE))
    worker = np.zeros((2, SIZE))
    server = np.zeros(SIZE)
    for k, rows in enumerate(ROWS):
        state, info = step(state, rows)
        nbytes.append(int(info.sent[0]))
        grads = w - target + rows
        if k < START:
            m = B1 * m + (1 - B1) * grads.mean(0)
            v = B2 * v + (1 - B2) * grads.mean(0) ** 2
        else:
            sum_with_error = B1 * m + (1 - B1) * grads + worker
            words = np.stack([coded(x, 8) for x in sum_with_error])
            worker = sum_with_error - words
            mean = words.mean(0) + server
            m = coded(mean, 8)
            server = mean - m
        w = w - RATE * m / (np.sqrt(v) + EPS)
        np.testing.assert_allclose(state.params, w, rtol=2e-4, atol=2e-5)
    # Two replicas: 4 bytes a number, then a bit and its share of a scale.
    assert nbytes == [SIZE * 4] * START + [SIZE // 8 * (1 + 4)] * (len(ROWS) - START)


def test_momentum_of_plain_sums_is_momentum(group: Any):
    """If the hook loses nothing, the place of the momentum does not matter."""
    hook = hooks.momentum(hooks.allreduce(), start=0, b1=0.5)
    loss = lambda w, x: jnp.mean(x @ w)  # noqa: E731
    step = fddp.train_step(loss, optax.sgd(1.0), group=group(2), hook=hook)
    plain = fddp.train_step(
        loss, optax.chain(optax.ema(0.5, debias=False), optax.sgd(1.0)), group=group(2)
    )
    got, want = (trainer.init(np.zeros(SIZE, np.float32)) for trainer in (step, plain))
    for rows in ROWS:
        got, _ = step(got, rows)
        want, _ = plain(want, rows)
    np.testing.assert_allclose(got.params, want.params, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [({"start": -1}, "start"), ({"start": 0, "b1": 1.0}, "b1 must be 0 or more")],
)
def test_numbers_out_of_range_are_refused(arguments: Any, message: str):
    with pytest.raises(ValueError, match=message):
        hooks.momentum(hooks.sign(), **arguments)
