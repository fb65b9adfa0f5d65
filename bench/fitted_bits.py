"""Chooses the bits of each bucket for `fddp.hooks.adaptive` from the link and a step's stages.

A hook is a pure function inside a program, without access to the clock or to other buckets, so the
choice is made outside. `fit_bits` measures stages and link. `refit_bits` reads the timelines of a
training's last steps, and chooses again if link or computation has changed.

Source: Li et al., "PyTorch Distributed" (VLDB 2020), section 6.2.3.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, compress
from typing import Any

import numpy as np
from jaxtyping import PyTree

from bench.bits_on_paper import SimulatedMessage, fitting_bits
from fddp.analysis.tuning.link import Link, measure_link
from fddp.comm import of_one_replica
from fddp.hooks import adaptive
from fddp.schedules import Communicate, TaskList, Timeline
from fddp.step import TrainState, check_step
from fddp.training import TrainStep
from fddp.wording import table

EXPOSED = 0.05  # exposed traffic as a share of a step's computation
STEPS = 5


@dataclass(frozen=True)
class FittedBits:
    """The bits of each bucket, and the measurements behind them; equal on all ranks."""

    link: Link
    """The cost of an all-reduce."""
    messages: tuple[SimulatedMessage, ...]
    """The sums of buckets in launch order, with their times on the slowest rank."""
    bits: tuple[int, ...]
    """Bits of each number of a bucket: 32, 16, 8, 4 or 1."""

    def __str__(self) -> str:
        rows = [("bucket", "bytes", "bits", "ready ms", "takes ms", "due ms")]
        for bucket, ready_s, due_s, nbytes in self.messages:
            bits = self.bits[bucket]
            takes_s = self.link.seconds(nbytes * bits / 32)
            ms = f"{1e3 * ready_s:.1f}", f"{1e3 * takes_s:.1f}", f"{1e3 * due_s:.1f}"
            rows.append((str(bucket), f"{nbytes:,}", str(bits), *ms))
        return "\n".join([f"an all-reduce takes {self.link}", *table(rows)])


def fit_bits(
    step: TrainStep, state: TrainState, batch: PyTree, *, exposed: float = EXPOSED
) -> FittedBits:
    """Measures a step's stages and the link, and chooses the most bits that fit for each bucket.

    Every rank calls it. It runs the step a few times on the batch and leaves the state unchanged. A
    bucket is due at the end of the step's computation. In an eager step it is due at the first read
    of its results in the next step's forward pass.

    Args:
      step: a step with schedule "staged" or "eager".
      state: the step's state; it is copied.
      batch: this process's rows.
      exposed: the allowed exposed traffic, as a share of a step's computation.

    Returns:
      The bits. `step.with_options(hook=fddp.hooks.adaptive(fitted.bits))` uses them, and continues
      from a state of any adaptive hook.

    Raises:
      ValueError: the step is one program, so it has no stages; or exposed is below 0.

    Example:
      >>> import jax, fddp, jax.numpy as jnp, optax
      >>> group = fddp.mesh_group(jax.sharding.Mesh(jax.devices()[:1], "replica"))
      >>> loss = lambda w, x: jnp.mean((x @ w) ** 2)
      >>> step = fddp.train_step(loss, optax.sgd(0.1), group=group, schedule="staged")
      >>> fit_bits(step, step.init(jnp.ones(4)), jnp.ones((2, 4)), exposed=1000.0).bits
      (32,)
    """
    _check("fit_bits", step, exposed)
    task_list = step.tasks(state, batch)
    _refuse_one_program("fit_bits", step)
    lines = [measured.timeline for measured in step.measure(state, [batch] * STEPS).steps]
    messages = _messages(step, task_list, lines, exposed)
    link = Link(0.0, float("inf"))
    if step.group.size > 1:
        link = measure_link(step.group)
    bits = fitting_bits(messages, lambda k, bits: link.seconds(messages[k].nbytes * bits / 32))
    return FittedBits(link, messages, bits)


def refit_bits(step: TrainStep, *, exposed: float = EXPOSED) -> TrainStep:
    """Chooses the bits of an adaptive hook again, from the timelines of the last steps.

    Every rank calls it at the same step, now and then. It runs nothing; ranks exchange a few
    numbers. It estimates other bits by the time per byte of messages with those bits, or else in
    proportion to the message's own time. The proportion overestimates the time of more bits, since
    latency and coding do not grow. On a fast link with slow coding a call may therefore try fewer
    bits in vain; the next call restores the former bits.

    Args:
      step: a step with the hook `fddp.hooks.adaptive(bits)` and schedule "staged" or "eager".
      exposed: the allowed exposed traffic, as a share of a step's computation.

    Returns:
      The same step if its bits are right. Otherwise a step with other bits; it continues from the
      state, and its first batch compiles it.

    Raises:
      ValueError: the hook is not adaptive, the step has run fewer than two times or is one program,
        or exposed is below 0; on every rank.

    Example:
      >>> import jax, fddp, jax.numpy as jnp, optax
      >>> group = fddp.mesh_group(jax.sharding.Mesh(jax.devices()[:1], "replica"))
      >>> hook, loss = fddp.hooks.adaptive([8]), lambda w, x: jnp.mean((x @ w) ** 2)
      >>> step = fddp.train_step(loss, optax.sgd(0.1), group=group, schedule="staged", hook=hook)
      >>> state = step.init(jnp.ones(4))
      >>> for _ in range(3):
      ...     state, info = step(state, jnp.ones((2, 4)))
      >>> refit_bits(step, exposed=1000.0).options.hook
      Hook(adaptive(32))
    """
    _check("refit_bits", step, exposed)
    hook = step.options.hook
    if not (hook and hook.bits):
        raise ValueError(
            f"refit_bits chooses the bits of fddp.hooks.adaptive, and this step's hook is {hook}."
        )
    if step.steps:
        _refuse_one_program("refit_bits", step)
    if not step.lately:
        raise ValueError(
            "refit_bits reads the last steps, and the first step, which compiles, does not count."
        )
    task_list = _first_tasks(step)
    lines = list(step.lately)
    messages = _messages(step, task_list, lines, exposed)
    current = [_bits_of(hook.bits, message.bucket) for message in messages]
    durations = _took(step, task_list, lines)
    # By bits: seconds and bytes of all messages with those bits.
    totals_s = defaultdict[int, float](float)
    totals = Counter[int]()
    for duration, message, bits in zip(durations, messages, current):
        totals_s[bits] += duration
        totals[bits] += message.nbytes

    def seconds(k: int, bits: int) -> float:
        if bits == current[k]:
            return durations[k]
        if bits in totals:
            return messages[k].nbytes * (totals_s[bits] / max(1, totals[bits]))
        return durations[k] * bits / current[k]

    bits = fitting_bits(messages, seconds)
    if bits == tuple(_bits_of(hook.bits, bucket) for bucket in range(len(bits))):
        return step
    return step.with_options(hook=adaptive(bits))


def _bits_of(hook_bits: Sequence[int], bucket: int) -> int:
    """Returns the bits of a bucket; the last entry holds for all later buckets."""
    return hook_bits[min(bucket, len(hook_bits) - 1)]


def _check(call: str, step: TrainStep, exposed: float) -> None:
    check_step(call, step)
    if not exposed >= 0:
        raise ValueError(f"{call}: exposed must be 0 or more, got {exposed!r}.")


def _refuse_one_program(call: str, step: TrainStep) -> None:
    if step.settled.is_one_program:
        raise ValueError(
            f"{call} needs stages, and this step is one program: create it with schedule='staged'."
        )


def _sums(task_list: TaskList) -> list[Communicate]:
    """Returns the sums of buckets in launch order."""
    sums = list[Communicate]()
    for message in task_list.messages:
        reduction = message.reduction
        if reduction.bucket is not None and reduction.collective != "all_gather":
            sums.append(message)
    return sums


def _messages(
    step: TrainStep, task_list: TaskList, lines: Sequence[Timeline], exposed: float
) -> tuple[SimulatedMessage, ...]:
    """Returns the sums of buckets with their times on the slowest rank."""
    stages = [task for task in task_list.tasks if task.kind == "compute"]
    seconds = np.median([[span.seconds for span in line.compute] for line in lines], axis=0)
    ends = list(accumulate(step.group.all_reduce(seconds, op="max").tolist()))
    starts = [0.0, *ends]
    deadline = ends[-1] * (1 + exposed)
    # An eager step promises the results of its updates, and the next step's stages wait for them.
    promised = step.settled.runner.promises

    def timed(communicate: Communicate) -> SimulatedMessage:
        bucket = communicate.reduction.bucket or 0
        writes = [communicate.reads[0] in stage.writes for stage in stages]
        ready = ends[writes.index(True)]
        due = deadline
        if promised:
            results = {value.replaces for value in _made_of(task_list, communicate)}
            reads = [bool(results.intersection(stage.reads)) for stage in stages]
            due += min(compress(starts, reads), default=0.0)
        return SimulatedMessage(bucket, ready, due, step.plan.buckets[bucket].nbytes)

    return tuple(map(timed, _sums(task_list)))


def _made_of(task_list: TaskList, message: Communicate) -> set[Any]:
    """Returns the sum of a message and the results of the updates that read it."""
    results = set[Any](message.writes[:1])
    for task in task_list.tasks:
        if task.kind == "update" and results.intersection(task.reads):
            results.update(task.writes)
    return results


def _took(step: TrainStep, task_list: TaskList, lines: Sequence[Timeline]) -> list[float]:
    """Returns the seconds of each sum of a bucket, without the wait for slower ranks."""
    # A message that crosses the border of eager steps has a span in each of two timelines.
    names = [message.name for message in _sums(task_list)]
    rows = list[list[float]]()
    for line in lines:
        seconds = defaultdict[str, float](float)
        for span in line.communication:
            seconds[span.name] += span.seconds
        rows.append([seconds[name] / names.count(name) for name in names])
    return step.group.all_reduce(np.median(rows, axis=0), op="min").tolist()


def _first_tasks(step: TrainStep) -> TaskList:
    """Lists the tasks of the first step."""
    settled = step.settled
    assert settled.first is not None
    state, pending, shards, _, rows = settled.first
    replicas = step.group.placement.replicas_in_array
    return settled.runner.tasks(state, *of_one_replica((pending, shards, rows), replicas))
