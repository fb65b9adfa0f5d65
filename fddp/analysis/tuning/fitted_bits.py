"""Chooses the bits of each bucket for `fddp.hooks.adaptive`, from the measured link and the measured stages of a step.

The choice stands outside of the hook: a hook is a pure function inside of a program, and sees neither the clock nor the
other buckets. When the link has changed, choose again and go on from the state with the new hook.

Source: Li et al., "PyTorch Distributed" (VLDB 2020), section 6.2.3.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from fddp.analysis.tuning.link import Link, measure_link
from fddp.analysis.tuning.regrouping import typical
from fddp.schedules import TaskList
from fddp.training import TrainStep
from fddp.wording import table

# The mean square of what is lost of a normal number, by bits: a block's largest is about three standard deviations.
LOST = {32: 0.0, 16: 2.0**-18 / 3, 8: (3 / 127) ** 2 / 12, 4: (3 / 7) ** 2 / 12, 1: 1 - 2 / math.pi}
EXPOSED = 0.05  # the share of a step that traffic may take behind the computing
STEPS = 5


@dataclass(frozen=True)
class FittedBits:
    """The bits of each bucket, and what they were chosen from; the same on all ranks."""

    link: Link
    """The cost of an all-reduce."""
    ready_s: tuple[float, ...]
    """Seconds from a step's begin until each bucket is ready, on the slowest rank."""
    until_s: float
    """Seconds until the last one is to be back."""
    nbytes: tuple[int, ...]
    """Bytes of each bucket in 32 bits."""
    bits: tuple[int, ...]
    """Bits of each number of a bucket: 32, 16, 8, 4 or 1."""

    def __str__(self) -> str:
        rows = [
            (str(k), f"{1e3 * ready:.1f}", f"{n:,}", str(each), f"{1e3 * self.link.seconds(n * each / 32):.1f}")
            for k, (ready, n, each) in enumerate(zip(self.ready_s, self.nbytes, self.bits))
        ]
        head = [f"an all-reduce takes {self.link}; all are to be back after {1e3 * self.until_s:.1f} ms"]
        return "\n".join([*head, *table([("bucket", "ready ms", "bytes", "bits", "ms"), *rows])])


def fit_bits(step: TrainStep, state: Any, batch: Any, *, exposed: float = EXPOSED) -> FittedBits:
    """Measures a step's stages and the link, and chooses for each bucket the bits whose traffic just fits.

    Every rank calls it. It runs the step a few times on the batch, and leaves the state alone.

    Args:
      step: a step whose schedule is staged or eager.
      state: its state, which is copied.
      batch: this process's rows.
      exposed: the share of a step's computing that traffic may take behind it.

    Returns:
      The bits; `train_step(…, hook=fddp.hooks.adaptive(fitted.bits))` uses them, and goes on from a state of any
      adaptive hook.

    Raises:
      ValueError: the step is one program, which has no stages; or exposed is below 0.

    Example:
      >>> import jax, fddp, jax.numpy as jnp, optax
      >>> group = fddp.mesh_group(jax.sharding.Mesh(jax.devices()[:1], "replica"))
      >>> loss = lambda w, x: jnp.mean((x @ w) ** 2)
      >>> step = fddp.train_step(loss, optax.sgd(0.1), group=group, schedule="staged")
      >>> fddp.fit_bits(step, step.init(jnp.ones(4)), jnp.ones((2, 4)), exposed=1000.0).bits
      (32,)
    """
    if not exposed >= 0:
        raise ValueError(f"fit_bits: exposed must be 0 or more, got {exposed!r}.")
    group = step.group
    made = _stages(step.tasks(state, batch))
    if step.is_one_program:
        raise ValueError("fit_bits measures stages, and this step is one program: make it with schedule='staged'.")
    seen = typical(group, step.measure(state, [batch] * STEPS).steps)
    ends = list(accumulate(seen.stages))
    plan = step.plan
    numbers = [n for n, message in enumerate(plan.messages) if message.bucket is not None and not message.rows]
    ready = tuple(ends[made[n]] for n in numbers)
    nbytes = tuple(plan.buckets[plan.messages[n].bucket or 0].nbytes for n in numbers)
    until = ends[-1] * (1 + exposed)
    link = measure_link(group) if group.size > 1 else Link(0.0, float("inf"))
    return FittedBits(link, ready, until, nbytes, fitting_bits(ready, until, nbytes, link.seconds))


def fitting_bits(
    ready_s: Sequence[float], until_s: float, nbytes: Sequence[float], seconds: Callable[[float], float]
) -> tuple[int, ...]:
    """Chooses the bits of each bucket with which all traffic just fits under what is computed, least error first.

    Messages leave one after the other, each when it is ready. As long as the last one comes back too late, that bucket
    is given the next fewer bits which costs the least error for each second that it saves.

    Args:
      ready_s: seconds from a step's begin until each bucket is ready, in the order in which they leave.
      until_s: seconds until the last one is to be back.
      nbytes: bytes of each bucket in 32 bits.
      seconds: (bytes) → seconds of a message of so many.

    Returns:
      The bits of each bucket: 32, 16, 8, 4 or 1; the fewest for all, where nothing fits.

    Example:
      >>> [fitting_bits([1.0, 2.0], until_s, [8e6, 8e6], lambda n: n / 8e6) for until_s in (3.0, 2.5, 2.25)]
      [(32, 32), (32, 16), (32, 8)]
    """
    steps = list(LOST)
    chosen = [32 for _ in nbytes]

    def back_s(bits: Sequence[int]) -> float:
        now = 0.0
        for ready, n, each in zip(ready_s, nbytes, bits):
            now = max(now, ready) + seconds(n * each / 32)
        return now

    while (late := back_s(chosen)) > until_s:
        found = list[tuple[float, int]]()
        for k, each in enumerate(chosen):
            fewer = steps[steps.index(each) + 1 :][:1]
            saved = late - back_s([*chosen[:k], *fewer, *chosen[k + 1 :]]) if fewer else 0.0
            if saved > 0:
                found.append((nbytes[k] * (LOST[fewer[0]] - LOST[each]) / saved, k))
        if not found:
            return tuple(chosen)
        k = min(found)[1]
        chosen[k] = steps[steps.index(chosen[k]) + 1]
    return tuple(chosen)


def _stages(listed: TaskList) -> list[int]:
    """The number of the stage that makes each message."""
    stages = [task.writes for task in listed.tasks if task.kind == "compute"]
    return [next(k for k, made in enumerate(stages) if one.reads[0] in made) for one in listed.messages]
