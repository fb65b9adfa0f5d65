"""Chooses buckets for GPUs that are not attached: compiles a step and compares the estimates.

Small buckets leave early; large ones save latencies; some of XLA's schedulers do better with an
order of their own. The compiled program shows the balance for a machine.
"""

from collections.abc import Iterator, Sequence
from itertools import product
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import PyTree

from fddp.analysis.auditing.estimate import estimate
from fddp.analysis.auditing.report import moved
from fddp.analysis.auditing.targets import Target, read_target
from fddp.analysis.tuning.tuning import Candidate, Tuning, cap_text
from fddp.buckets import Caps
from fddp.comm import verify
from fddp.hlo import find_collectives, parse
from fddp.jax_internals import compile_to_read
from fddp.schedules import SCHEDULES, NamedSchedule, Timeline
from fddp.step import ScheduleName, TrainState
from fddp.training import TrainStep

ONE_PROGRAM: tuple[NamedSchedule, ...] = tuple(
    name for name, x in SCHEDULES.items() if x.one_program
)
# Large buckets, and equal ones without a smaller first and last bucket.
CAPS_MB: tuple[Caps, ...] = (100, (16,))


def tune_for(
    step: TrainStep,
    state: TrainState,
    batch: PyTree,
    target: str,
    *,
    caps_mb: Sequence[Caps] = CAPS_MB,
) -> Tuning:
    """Compiles a step for a target with several schedules and caps; chooses the shortest estimate.

    The ranks share the compilations. Estimates depend on shapes only, so all ranks choose the same.
    """
    group = step.group

    def find() -> tuple[list[OnTarget], dict[int, Timeline]]:
        variants = list(on_target(step, state, batch, read_target(target), caps_mb))
        local = range(group.rank, len(variants), group.processes)
        return variants, {k: variants[k].timeline() for k in local}

    def described(result: tuple[list[OnTarget], dict[int, Timeline]]) -> list[str]:
        plans = [f"{variant}, plan {variant.step.plan.digest}" for variant in result[0]]
        return [f"target {target}", repr(step.options), *plans]

    variants, local_lines = verify(group, "what to tune", find, described)
    numbers = np.zeros((len(variants), 2))
    for k, line in local_lines.items():
        numbers[k] = line.seconds, line.exposed
    candidates = list[Candidate]()
    for variant, seconds in zip(variants, group.all_reduce(numbers).tolist()):
        settings = variant.schedule, variant.bucket_cap_mb, variant.step.plan
        candidates.append(Candidate(*settings, *seconds))
    best = min(candidates, key=attrgetter("seconds"))
    best_step = step.with_options(schedule=best.schedule, bucket_cap_mb=best.bucket_cap_mb)
    where = f"{target}, estimated at peak rates"
    size = read_target(target).size
    return Tuning(where, size, tuple(candidates), best, best.schedule, best_step)


class OnTarget(NamedTuple):
    """A step on a target, not yet compiled."""

    schedule: ScheduleName
    bucket_cap_mb: Caps
    target: Target
    step: TrainStep
    state: Any
    batch: Any

    def timeline(self) -> Timeline:
        """Compiles the step and estimates its timeline."""
        module = parse(compile_to_read(self.step.lower(self.state, self.batch)).as_text() or "")
        return estimate(module, find_collectives(module), self.target)

    def __str__(self) -> str:
        return f"schedule={self.schedule!r}, bucket_cap_mb={cap_text(self.bucket_cap_mb)}"


def on_target(
    step: TrainStep,
    state: TrainState,
    batch: PyTree,
    target: Target,
    caps_mb: Sequence[Caps] = CAPS_MB,
) -> Iterator[OnTarget]:
    """Yields a step on a target with each schedule of one program and each cap.

    The original step is the first, and the first of several with equal plans stands for all.
    """
    options = step.options
    if options.schedule not in ("auto", *ONE_PROGRAM):
        raise ValueError(
            f"for a target tune compiles a step of one program, "
            f"got schedule={options.schedule!r}; give it 'fused'."
        )
    # The step's own schedule is the first: of equally long steps the first is chosen.
    current = options.schedule
    if current == "auto":
        current = "fused"
    schedules = sorted(ONE_PROGRAM, key=lambda schedule: schedule != current)
    digests = set[tuple[ScheduleName, str]]()
    for cap, schedule in product((options.bucket_cap_mb, *caps_mb), schedules):
        changed_step = step.with_options(schedule=schedule, bucket_cap_mb=cap)
        inputs = moved(changed_step, state, batch, target)
        variant = OnTarget(schedule, cap, target, *inputs)
        variant.step.tasks(variant.state, variant.batch)  # settles it
        if (schedule, variant.step.plan.digest) not in digests:
            digests.add((schedule, variant.step.plan.digest))
            yield variant
