"""Parameters in shards travel in the bits in which the loss reads them, and the loss is the same bit for bit."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from trees import same_bits

import fddp
from fddp.jaxpr import read_in

pytestmark = pytest.mark.steps

Groups = Callable[[int], fddp.Group]
WIDTH = 8
DRAW = np.random.default_rng(2)
PARAMS = {name: DRAW.normal(size=(WIDTH, WIDTH)).astype(np.float32) for name in "ab"}
ROWS = DRAW.normal(size=(3, 6, WIDTH)).astype(np.float32)
GATHERED = 2 * WIDTH * WIDTH  # numbers


def loss_fn(p: Any, x: Any) -> Any:
    return jnp.mean((jnp.tanh(x @ p["a"]) @ p["b"] - 1) ** 2)


def apart(p: Any, x: Any) -> Any:
    """In 16 bits with the one half of its parameters, in 32 with the other."""
    return jnp.mean((jnp.tanh(x.astype(jnp.bfloat16) @ p["a"].astype(jnp.bfloat16)) @ p["b"] - 1) ** 2)


def trained(group: fddp.Group, loss: Any, **options: Any) -> tuple[list[float], Any, int]:
    step = fddp.train_step(loss, optax.adam(0.05), group=group, bucket_cap_mb=0, **options)
    state = step.init(PARAMS)
    losses = list[float]()
    sent = 0
    for rows in ROWS:
        state, info = step(state, rows)
        losses.append(float(info.loss))
        sent = int(np.sum(info.sent))
    return losses, fddp.whole(state.params), sent


@pytest.mark.parametrize("schedule", ["fused", pytest.param("staged", marks=pytest.mark.slow), "eager"])
def test_gathers_take_half_the_bytes_and_the_loss_has_the_same_bits(group: Groups, schedule: Any):
    loss = fddp.mixed_precision(loss_fn, jnp.bfloat16)
    step = {"shard": "state", "schedule": schedule}
    losses, params, sent = trained(group(2), loss, **step)
    # A second use of the parameters, in 32 bits and of no weight, keeps the gathers whole.
    whole = lambda p, x: loss(p, x) + 0 * (jnp.sum(p["a"]) + jnp.sum(p["b"]))  # noqa: E731
    wanted, masters, before = trained(group(2), whole, **step)
    assert losses == wanted
    same_bits(params, masters)
    assert params["a"].dtype == np.float32
    # Of two replicas each sends its half of what is gathered.
    assert before - sent == GATHERED // 2 * (4 - 2)


def test_parameters_that_are_gathered_twice_take_half_the_bytes_both_times(group: Groups):
    loss = fddp.mixed_precision(loss_fn, jnp.bfloat16)
    given: dict[str, Any] = {"shard": "state", "reshard_after_forward": True}
    losses, _, sent = trained(group(2), loss, **given)
    wanted, _, whole = trained(group(2), loss_fn, **given)
    np.testing.assert_allclose(losses, wanted, rtol=0.02)
    assert 0 < whole - sent <= 2 * GATHERED // 2 * (4 - 2)


def test_a_parameter_that_is_read_whole_travels_whole(group: Groups):
    _, _, half = trained(group(2), apart, shard="state")
    _, _, whole = trained(group(2), loss_fn, shard="state")
    assert whole - half == GATHERED // 4 * (4 - 2)


def test_a_later_batch_that_reads_more_is_refused(group: Groups):
    narrow = fddp.mixed_precision(loss_fn, jnp.bfloat16)
    step = fddp.train_step(
        lambda p, x: narrow(p, x) if len(x) == 3 else loss_fn(p, x), optax.sgd(0.1), group=group(2), shard="state"
    )
    state, _ = step(step.init(PARAMS), ROWS[0])
    with pytest.raises(ValueError, match="a is read as float32, and the first batch's loss read it as bfloat16"):
        step(state, ROWS[0][:4])


@pytest.mark.parametrize(
    ("f", "dtypes"),
    [
        (lambda x: jnp.sum(x.astype(jnp.bfloat16)), [jnp.bfloat16]),
        (lambda x: jnp.sum(x.astype(jnp.bfloat16)) + x[0], [None]),
        (lambda x: jnp.sum(x.astype(jnp.bfloat16)) + jnp.sum(x.astype(jnp.float16)), [None]),
        (lambda x: jnp.sum(x.astype(jnp.int8)), [None]),
        (lambda x: 1.0, [None]),
        (lambda x: jax.jit(lambda x: x.astype(jnp.float16))(x), [jnp.float16]),
        (lambda x: jax.checkpoint(lambda x: jnp.sin(x.astype(jnp.float16)))(x), [jnp.float16]),
        (
            lambda x: jax.lax.scan(lambda c, row: (c + row.astype(jnp.bfloat16), None), jnp.bfloat16(0), x)[0],
            [jnp.bfloat16],
        ),
        (lambda x: jax.lax.scan(lambda c, row: (c + row, None), jnp.float32(0), x)[0], [None]),
    ],
)
def test_a_program_tells_in_which_bits_it_reads_its_inputs(f: Any, dtypes: Any):
    assert read_in(jax.make_jaxpr(f)(jnp.ones(4))) == [None if one is None else np.dtype(one) for one in dtypes]
