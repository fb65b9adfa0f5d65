"""Watched steps in turns, on each host: shared by bench/breakdown.py and bench/ladder.py."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

import fddp
from bench.problems import Problem
from fddp.measuring.measurement import Measurement
from fddp.measuring.measurement import watch as timed
from fddp.schedules.timeline import Timeline

OPTIMIZER = optax.sgd(1e-3)


class Way(NamedTuple):
    """A way of training."""

    run: Callable[[Any], Any]
    """Takes a step on a batch."""
    batch: Any
    timeline: Callable[[], Timeline]
    """The times at which the last step computed and communicated."""
    all_reduces: tuple[int, ...]
    """Bytes of each, by the plan."""


def way(task: Problem, group: fddp.Group, batch: Any = None, **options: Any) -> Way:
    """Makes a way of training with fddp, and takes its first step; `batch` defaults to the
    problem's own."""
    step = fddp.train_step(task.loss_fn, OPTIMIZER, group=group, has_aux=True, **options)
    state = step.init(task.params, model_state=task.model_state)

    def run(batch: Any) -> Any:
        nonlocal state
        state, info = step(state, batch)
        return state, info

    batch = task.batch if batch is None else batch
    jax.block_until_ready(run(batch))
    return Way(run, batch, step.timeline, tuple(bucket.nbytes for bucket in step.plan.buckets))


def watch(
    ways: Mapping[str, Way], group: fddp.Group, *, rounds: int
) -> tuple[dict[str, Measurement], dict[str, Any]]:
    """Lets ways take turns, a step each.

    Args:
      ways: by name.
      group: the replicas.
      rounds: how many turns count; two more go before.

    Returns:
      This rank's measurements, and the seconds of the slower rank in each round, by name.
    """
    steps = {name: [] for name in ways}
    for turn in range(-2, rounds):
        for name, (run, batch, timeline, _) in ways.items():
            group.barrier()
            watched = timed(run, [batch], timeline).steps
            steps[name] += watched if turn >= 0 else ()
    seconds = {
        name: group.all_reduce(np.array([s.seconds for s in measured_steps]), op="max")
        for name, measured_steps in steps.items()
    }
    return {
        name: Measurement(tuple(measured_steps)) for name, measured_steps in steps.items()
    }, seconds
