"""Finds the bucket cap with the shortest step: measures a step with each.

Small buckets leave early but cost a latency each; large ones wait for their last gradient. The
balance depends on network, model and hosts: the paper finds it only by a trial of each cap
(section 5.3).

Source: Li et al. (VLDB 2020), Fig. 7 and 8.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from fddp.buckets import Caps
from fddp.comm import verify
from fddp.jax_internals import without_context_mesh
from fddp.jaxpr import refuse_deleted
from fddp.step import TrainState, check_state, check_step
from fddp.training import TrainStep
from fddp.wording import check_whole, preformatted, table

CAPS_MB = (0.25, 1.0, 2.0, 4.0, 8.0, 16.0, 25.0, 50.0, 100.0)
TURNS = 3


class Candidate(NamedTuple):
    """A bucket cap, and the duration of a step with it."""

    bucket_cap_mb: Caps
    """The cap in MiB, for `train_step`; of caps with equal buckets the first."""
    buckets: int
    """Number of buckets."""
    seconds: float
    """Median over turns of the seconds of a step, on the slowest rank."""


@dataclass(frozen=True)
class Tuning:
    """The measured bucket caps, and the step with the best of them; `print` shows a table."""

    candidates: tuple[Candidate, ...]
    """Caps with different buckets, in the order of `caps_mb`."""
    best: Candidate
    """The candidate with the shortest step."""
    step: TrainStep
    """The step with the best cap; it continues from the original step's state."""

    @property
    def bucket_cap_mb(self) -> Caps:
        """The best cap, for `train_step`."""
        return self.best.bucket_cap_mb

    def __str__(self) -> str:
        rows = [("cap MiB", "buckets", "ms a step", "")]
        for cap, buckets, seconds in self.candidates:
            mark = "best" * (cap == self.bucket_cap_mb)
            rows.append((str(cap), str(buckets), f"{1e3 * seconds:.2f}", mark))
        return "\n".join([*table(rows), f"bucket_cap_mb={self.bucket_cap_mb}"])

    _repr_html_ = preformatted


@without_context_mesh
def tune(
    step: TrainStep,
    state: TrainState,
    batch: PyTree,
    *,
    caps_mb: Sequence[Caps] = CAPS_MB,
    steps: int = 4,
) -> Tuning:
    """Measures a step with each bucket cap, and returns the step with the best cap.

    The caps alternate, so that a slow moment of the machine affects all of them. Each cap with
    other buckets compiles a step.

    Args:
      step: from `train_step`.
      state: from `step.init` or the last step; it is copied.
      batch: as for a step.
      caps_mb: the candidate caps in MiB.
      steps: steps in each of the three turns of a cap.

    Returns:
      A `Tuning`, equal on all ranks. `train_step(…, bucket_cap_mb=tuning.bucket_cap_mb)` uses the
      result in the next run.

    Raises:
      ValueError: no caps, a cap out of its range, or arguments that differ between ranks.
      TypeError: `step` is not a step, or `state` not a state.

    Example:
      >>> import fddp, jax.numpy as jnp, optax
      >>> loss = lambda p, x: jnp.mean((jnp.tanh(x @ p["a"]) @ p["b"]) ** 2)
      >>> step = fddp.train_step(loss, optax.sgd(0.1))
      >>> state = step.init({"a": jnp.ones((4, 8)), "b": jnp.ones((8, 1))})
      >>> tuning = fddp.tune(step, state, jnp.ones((8, 4)), caps_mb=[0, 0.25, 25], steps=1)
      >>> [(c.bucket_cap_mb, c.buckets) for c in tuning.candidates]
      [(0, 2), (0.25, 1)]
    """
    check_step("fddp.tune", step)

    def prepared() -> list[tuple[Caps, TrainStep]]:
        check_state(state)
        if not isinstance(caps_mb, Sequence) or not caps_mb:
            raise ValueError(f"caps_mb must hold at least one cap to choose from, got {caps_mb!r}.")
        check_whole("steps", steps, 1)
        caps = [cap if isinstance(cap, int | float) else tuple(cap) for cap in caps_mb]
        return [(cap, step.with_options(bucket_cap_mb=cap)) for cap in caps]

    def described(trials: list[tuple[Caps, TrainStep]]) -> list[str]:
        return [f"caps {[cap for cap, _ in trials]}, {steps} steps each"]

    trials = verify(step.group, "what to tune", prepared, described)
    refuse_deleted(state)
    variants = dict[str, tuple[Caps, TrainStep]]()
    for cap, variant in trials:
        variant.settle(state, batch)
        variants.setdefault(variant.plan.digest, (cap, variant))
    turns = list[list[float]]()
    for _ in range(TURNS):
        turns.append([_seconds(x, state, batch, steps) for _, x in variants.values()])
    slowest = step.group.all_reduce(np.median(np.array(turns), axis=0), op="max").tolist()
    candidates = tuple(
        Candidate(cap, len(variant.plan.buckets), duration)
        for (cap, variant), duration in zip(variants.values(), slowest)
    )
    best = min(candidates, key=lambda candidate: candidate.seconds)
    return Tuning(candidates, best, dict(variants.values())[best.bucket_cap_mb])


def _seconds(step: TrainStep, state: TrainState, batch: PyTree, steps: int) -> float:
    """Returns the mean duration of a step, after one that may compile."""
    state = jax.jit(partial(jax.tree.map, jnp.copy))(state)
    state, info = step(state, batch)
    jax.block_until_ready((state, info))
    step.group.barrier()
    start = perf_counter()
    for _ in range(steps):
        state, info = step(state, batch)
    jax.block_until_ready((state, info))
    return (perf_counter() - start) / steps
