"""Finds the best buckets for GPUs that are not here: compiles a step with a few, and compares their estimates.

Small buckets leave early, and large ones spare latencies; some of XLA's schedulers do better in an order of their own.
Which counts for more on a machine the compiled program tells.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple

import numpy as np

from fddp.analysis.auditing.estimate import estimate
from fddp.analysis.auditing.report import moved
from fddp.analysis.auditing.targets import Target, read_target
from fddp.buckets import BucketPlan, Caps
from fddp.comm import verify
from fddp.hlo import find_collectives, parse
from fddp.jax_internals import compile_to_read
from fddp.schedules import Timeline
from fddp.step import ScheduleName
from fddp.training import TrainStep
from fddp.wording import table

ONE_PROGRAM: tuple[ScheduleName, ...] = ("fused", "held", "unordered")
# Large buckets, and equal ones, with no smaller one first and last.
CAPS_MB: tuple[Caps, ...] = (100, (16,))


class Estimated(NamedTuple):
    """A schedule with a bucket cap, and the estimate of the step that XLA makes of it."""

    schedule: ScheduleName
    """The schedule, for `train_step`."""
    bucket_cap_mb: Caps
    """The cap in MiB, for `train_step`."""
    plan: BucketPlan
    """The buckets under this cap."""
    seconds: float
    """The whole step."""
    exposed_s: float
    """Seconds of traffic with no computation over it."""

    def __str__(self) -> str:
        return _named(self.schedule, self.bucket_cap_mb)


@dataclass(frozen=True)
class Choice:
    """The estimates of a few schedules and caps for one machine, and the step with the best."""

    target: str
    """The machine that was compiled for: "h100:2x8"."""
    candidates: tuple[Estimated, ...]
    """The estimates, first that of the step as it was given; steps that are alike stand here once."""
    best: Estimated
    """The one with the shortest step; of several the first."""
    step: TrainStep
    """The step under that schedule, with that cap; it goes on from the state of the step that was given."""

    @property
    def schedule(self) -> ScheduleName:
        """The best schedule, for `train_step`."""
        return self.best.schedule

    @property
    def bucket_cap_mb(self) -> Caps:
        """The best cap, for `train_step`."""
        return self.best.bucket_cap_mb

    def __str__(self) -> str:
        head = ("schedule", "cap MiB", "buckets", "ms a step", "ms exposed", "")
        rows = [(*_row(one), "best" if one == self.best else "") for one in self.candidates]
        return "\n".join([f"{self.target}, estimated at peak rates", *table([head, *rows]), str(self.best)])


def tune_for(step: TrainStep, state: Any, batch: Any, target: str, *, caps_mb: Sequence[Caps] = CAPS_MB) -> Choice:
    """Compiles a step for a target with a few schedules and caps, and takes the one whose estimate is the shortest.

    Each rank compiles some of them. Estimates are made of forms alone, and all ranks get the same ones: so all choose
    the same.

    Args:
      step: as for `fddp.audit`.
      state: likewise.
      batch: likewise.
      target: likewise.
      caps_mb: caps to choose from, beside the step's own, MiB.

    Returns:
      The choice.

    Raises:
      ValueError: as `fddp.audit`; on every rank.
      RuntimeError: a rank has no compiler for the target; on every rank.
    """
    group = step.group

    def find() -> tuple[list[OnTarget], dict[int, Timeline]]:
        every = list(on_target(step, state, batch, read_target(target), caps_mb))
        mine = range(group.rank, len(every), group.processes)
        return every, {k: every[k].timeline() for k in mine}

    def described(found: tuple[list[OnTarget], dict[int, Timeline]]) -> list[str]:
        return [f"target {target}", repr(step.options), *(f"{one}, plan {one.step.plan.digest}" for one in found[0])]

    every, mine = verify(group, "what to tune", find, described)
    numbers = np.zeros((len(every), 2))
    for k, line in mine.items():
        numbers[k] = line.seconds, line.exposed
    took = zip(every, group.all_reduce(numbers).tolist())
    candidates = tuple(Estimated(one.schedule, one.bucket_cap_mb, one.step.plan, *both) for one, both in took)
    best = min(candidates, key=lambda one: one.seconds)
    return Choice(target, candidates, best, step.with_options(schedule=best.schedule, bucket_cap_mb=best.bucket_cap_mb))


class OnTarget(NamedTuple):
    """A step on a target, not yet compiled."""

    schedule: ScheduleName
    bucket_cap_mb: Caps
    target: Target
    step: TrainStep
    state: Any
    batch: Any

    def timeline(self) -> Timeline:
        """Compiles the step, and estimates when it would compute and communicate."""
        module = parse(compile_to_read(self.step.lower(self.state, self.batch)).as_text() or "")
        return estimate(module, find_collectives(module), self.target)

    def __str__(self) -> str:
        return _named(self.schedule, self.bucket_cap_mb)


def on_target(
    step: TrainStep, state: Any, batch: Any, target: Target, caps_mb: Sequence[Caps] = CAPS_MB
) -> Iterator[OnTarget]:
    """Moves a step to a target, under each schedule of one program and with each cap.

    Args:
      step: as for `tune_for`.
      state: likewise.
      batch: likewise.
      target: the machine.
      caps_mb: caps beside the step's own, MiB.

    Yields:
      The steps, first the one that was given; of those with one plan the first.

    Raises:
      ValueError: the step's schedule is several programs.
      RuntimeError: there is no compiler for the target.
    """
    options = step.options
    if options.schedule not in ("auto", *ONE_PROGRAM):
        raise ValueError(
            f"for a target tune compiles a step of one program, got schedule={options.schedule!r}; give it 'fused'."
        )
    # The given ones come first: of steps that take equally long the first is chosen.
    given = "fused" if options.schedule == "auto" else options.schedule
    schedules = sorted(ONE_PROGRAM, key=lambda one: one != given)
    seen = set[tuple[ScheduleName, str]]()
    for cap, schedule in product((options.bucket_cap_mb, *caps_mb), schedules):
        one = OnTarget(
            schedule, cap, target, *moved(step.with_options(schedule=schedule, bucket_cap_mb=cap), state, batch, target)
        )
        one.step.tasks(one.state, one.batch)  # settles it
        if (schedule, one.step.plan.digest) not in seen:
            seen.add((schedule, one.step.plan.digest))
            yield one


def _named(schedule: ScheduleName, cap: Caps) -> str:
    return f"schedule={schedule!r}, bucket_cap_mb={_shown(cap)}"


def _row(one: Estimated) -> tuple[str, ...]:
    took = (f"{1e3 * seconds:.2f}" for seconds in (one.seconds, one.exposed_s))
    return one.schedule, _shown(one.bucket_cap_mb), str(len(one.plan.buckets)), *took


def _shown(cap: Caps) -> str:
    """A cap, or the caps of each bucket in turn, as `train_step` takes them."""
    return f"{cap:g}" if isinstance(cap, int | float) else f"[{', '.join(map(_shown, cap))}]"
