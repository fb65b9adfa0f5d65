"""A profiler's trace has the tasks of a step by name, on every thread with tasks."""

from collections import Counter
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fddp
from fddp.jax_internals import read_profile
from fddp.schedules.tasks import Communicate

PARAMS = {"first": np.ones((4, 3), np.float32), "second": np.ones(3, np.float32)}
ROWS = np.ones((8, 4), np.float32)


def net(params: Any, batch: Any) -> jax.Array:
    return jnp.mean((jnp.tanh(batch @ params["first"]) @ params["second"]) ** 2)


@pytest.mark.quick("{'schedule': 'eager', 'shard': 'state'}")
@pytest.mark.steps
@pytest.mark.parametrize(
    "options",
    [
        {"schedule": "after"},
        {"schedule": "staged"},
        {"schedule": "eager"},
        {"schedule": "eager", "shard": "state"},
    ],
    ids=str,
)
def test_a_trace_has_every_task_of_a_step_by_name(group, tmp_path: Path, options: dict[str, Any]):
    step = fddp.train_step(net, optax.adam(0.1), group=group(2), bucket_cap_mb=0, **options)
    state, _ = step(step.init(PARAMS), ROWS)
    tasks = step.tasks(state, ROWS).tasks
    profiler_options = jax.profiler.ProfileOptions()
    profiler_options.python_tracer_level = 0
    with jax.profiler.trace(str(tmp_path), profiler_options=profiler_options):
        state, _ = step(state, ROWS)
        jax.block_until_ready(state)
    (path,) = tmp_path.rglob("*.xplane.pb")
    shown = Counter(event.name for plane in read_profile(path) for event in plane.events)
    assert len(tasks) >= 4
    assert {task.name for task in tasks} <= set(shown)
    # A message is on its way once; a computation shows where it is launched and where it is
    # waited for.
    assert all(shown[task.name] == 1 for task in tasks if isinstance(task, Communicate))
