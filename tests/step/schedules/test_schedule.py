"""A step of one process ends, keeps precision, transfers nothing and raises as JAX does, on each
schedule."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tiers import crossed

import fddp
from fddp import hooks

pytestmark = pytest.mark.steps


def test_a_step_of_one_program_says_that_it_has_no_timeline(group):
    step = fddp.train_step(lambda w, x: jnp.mean((x - w) ** 2), optax.sgd(0.1), group=group(2))
    step(step.init(jnp.zeros(())), jnp.ones(4))
    with pytest.raises(ValueError, match="XLA sends this step's messages"):
        step.timeline()


def test_where_devices_share_a_processs_cores_a_step_has_ended_when_the_next_begins(group):
    """All threads of XLA:CPU would wait in all-reduces of different steps, with none left for a
    device."""
    step = fddp.train_step(lambda w, x: jnp.mean((x @ w) ** 2), optax.sgd(0.1), group=group(4))
    state = step.init(jnp.ones((512, 512)))
    for _ in range(3):
        state, info = step(state, np.ones((64, 512), np.float32))
        assert all(x.is_ready() for x in jax.tree.leaves((state, info)))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"hook": hooks.bf16()},
        {"find_unused_parameters": True},
    ],
    ids=["plain", "hook", "unused"],
)
def test_a_step_keeps_64_bits(group, x64, options):
    def loss(p, x):
        return jnp.mean((x @ p["a"]) ** 2) + jax.lax.cond(
            x[0, 0] > 9, lambda: jnp.sum(p["b"]), lambda: 0.0
        )

    step = fddp.train_step(loss, optax.sgd(0.1), group=group(2), bucket_cap_mb=0, **options)
    state, info = step(step.init({"a": np.full((3, 1), 1 / 3), "b": np.ones(2)}), np.ones((4, 3)))
    assert info.loss.dtype == np.float64
    # The sum of three thirds is 1, its square's gradient 2, which 16 bits hold.
    np.testing.assert_allclose(state.params["a"], np.full((3, 1), 1 / 3 - 0.2), rtol=1e-14)
    np.testing.assert_array_equal(state.params["b"], np.ones(2))


@crossed(
    options={"plain": {}, "hook": {"hook": hooks.bf16()}},
    schedule=["overlap", "after"],
    n=[1, 2],
)
def test_a_step_makes_no_transfer_that_nobody_asked_for(group, n, schedule, options):
    step = fddp.train_step(
        lambda w, x: jnp.mean((x - w) ** 2),
        optax.sgd(0.5),
        group=group(n),
        schedule=schedule,
        **options,
    )
    state = step.init(np.zeros(()))
    rows = group(n).placement.place(np.full(4, 2.0), group(n).placement.per_replica)
    with jax.transfer_guard("disallow"):
        for _ in range(2):
            state, _ = step(state, rows)
    assert float(state.params) == 2


def test_without_jit_a_step_runs_as_jax_runs_it(group):
    def loss(w, x):
        return jnp.mean((x - w) ** 2)

    step = fddp.train_step(loss, optax.sgd(0.5), group=group(1))
    state, _ = step(step.init(np.float32(0)), np.full(2, 2.0, np.float32))
    with jax.disable_jit():
        state, _ = step(state, np.full(2, 4.0, np.float32))
    assert float(state.params) == 4
    state, _ = step(state, np.full(2, 8.0, np.float32))
    assert float(state.params) == 8


def test_a_schedule_without_a_name_in_the_list_is_refused():
    with pytest.raises(
        ValueError, match="schedule must be 'auto', 'overlap', 'after' or 'eager', got 3"
    ):
        fddp.Options(schedule=3)  # pyright: ignore[reportArgumentType]


def test_an_error_inside_the_backward_pass_reaches_the_caller(group):
    def explode(_):
        raise RuntimeError("inside the backward pass")

    def loss_fn(w, x):
        jax.debug.callback(explode, w[0])
        return jnp.mean((x - w) ** 2)

    step = fddp.train_step(loss_fn, optax.sgd(0.1), group=group(1))
    with pytest.raises(Exception, match="inside the backward pass"):
        state, info = step(step.init(jnp.zeros(3)), jnp.ones((4, 3)))
        jax.block_until_ready((state, info))
        jax.effects_barrier()
