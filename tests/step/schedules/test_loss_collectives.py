"""A step whose loss has collectives is that of one device on the joined batch, in float64."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from on_ranks.collectives import LOSSES, ROWS, normalized
from tiers import crossed
from trees import close

import fddp

DRAW = np.random.default_rng(0)
PARAMS = {name: DRAW.normal(size=(6, 6)) for name in ("image", "text", "first", "second")}


def batch(replicas: int) -> Any:
    draw = np.random.default_rng(1)
    return {name: draw.normal(size=(ROWS * replicas, 6)) for name in ("image", "text")}


@pytest.mark.steps
@crossed(
    loss={loss.__name__: loss for loss in LOSSES},
    replicas=[1, 2, 3, 8],
)
def test_a_loss_with_collectives_is_that_of_the_joined_batch(group, x64, loss, replicas):
    value, grads = jax.value_and_grad(loss)(PARAMS, batch(replicas), None)
    f = fddp.value_and_grad(
        lambda p, rows: loss(p, rows, "replica"),
        group=group(replicas),
        bucket_cap_mb=0,
    )
    got, summed_grads = f(PARAMS, batch(replicas))
    np.testing.assert_allclose(got, value, rtol=1e-10)
    close(summed_grads, jax.tree.map(jnp.asarray, grads))


@pytest.mark.steps
def test_the_plan_names_the_kinds_of_collectives_that_the_loss_holds(group):
    step = fddp.train_step(
        lambda p, rows: normalized(p, rows, "replica"), optax.sgd(0.1), group=group(2)
    )
    step(step.init(PARAMS), batch(2))
    assert "the loss has collectives of its own: psum\n" in f"{step.plan}"


@pytest.mark.steps
@pytest.mark.parametrize("replicas", [1, 2])
def test_a_print_of_a_collective_is_shown_once_per_replica(group, capfd, replicas):
    def loss(p, x):
        hidden = x @ p["a"]
        mean = jax.lax.pmean(jnp.mean(hidden), "replica")
        jax.debug.print("mean {}", mean)
        jax.lax.axis_index("replica")  # its result is unused
        return jnp.mean(((hidden - mean) @ p["b"]) ** 2)

    f = fddp.value_and_grad(loss, group=group(replicas), bucket_cap_mb=0)
    jax.block_until_ready(f({"a": jnp.ones((4, 8)), "b": jnp.ones((8, 2))}, jnp.ones((4, 4))))
    jax.effects_barrier()
    assert capfd.readouterr().out.count("mean 4.0") == replicas
