"""A loss's collectives travel between stages, and the step is that of one device on the joined batch, in float64."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from on_ranks.collectives import LOSSES, ROWS, clip
from trees import close

import fddp

DRAW = np.random.default_rng(0)
PARAMS = {name: DRAW.normal(size=(6, 6)) for name in ("image", "text", "first", "second")}


def batch(replicas: int) -> Any:
    draw = np.random.default_rng(1)
    return {name: draw.normal(size=(ROWS * replicas, 6)) for name in ("image", "text")}


@pytest.mark.steps
@pytest.mark.parametrize("schedule", ["staged", "eager"])
@pytest.mark.parametrize("replicas", [1, 2, 3, 8])
@pytest.mark.parametrize("loss", LOSSES)
def test_a_loss_with_collectives_is_that_of_the_joined_batch(group, x64, loss, replicas, schedule):
    value, grads = jax.value_and_grad(loss)(PARAMS, batch(replicas), None)
    f = fddp.value_and_grad(
        lambda p, rows: loss(p, rows, "replica"), group=group(replicas), schedule=schedule, bucket_cap_mb=0
    )
    got, found = f(PARAMS, batch(replicas))
    np.testing.assert_allclose(got, value, rtol=1e-10)
    close(found, jax.tree.map(jnp.asarray, grads))


@pytest.mark.steps
def test_each_collective_is_a_task_by_its_name_and_a_span(group):
    step = fddp.train_step(
        lambda p, rows: clip(p, rows, "replica"), optax.sgd(0.1), group=group(2), schedule="staged", bucket_cap_mb=0
    )
    params, rows = jax.tree.map(np.float32, (PARAMS, batch(2)))
    state = step.init(params)
    tasks = step.tasks(state, rows).tasks
    spoken = [task.name for task in tasks if getattr(task, "speaks", False)]
    assert spoken[0].startswith("all_gather") and any(name.startswith("psum_scatter") for name in spoken)
    made = {name: at for at, task in enumerate(tasks) for name in task.writes}
    for at, task in enumerate(tasks):  # no task stands before what it waits for
        assert all(made[name] < at for name in task.reads if name in made)
    step(state, rows)
    assert set(spoken) <= {span.name for span in step.timeline().communication}
