"""Finds the best bucket cap for GPUs that are not here: compiles a step with a few, and compares their estimates.

Between hosts many small buckets hide more; on one host XLA hides a few large ones under the update, and each bucket
that is spared is a latency less. Which is better the compiled program tells.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from fddp.analysis.auditing.estimate import estimate
from fddp.analysis.auditing.report import moved
from fddp.analysis.auditing.targets import Target, read_target
from fddp.buckets import Caps
from fddp.comm import verify
from fddp.hlo import find_collectives, parse
from fddp.training import TrainStep
from fddp.wording import table

CAPS_MB = (25.0, 100.0, 1000.0)


class Estimated(NamedTuple):
    """A bucket cap, and the estimate of the step that XLA makes of it."""

    bucket_cap_mb: Caps
    """MiB, as of `train_step`."""
    buckets: int
    """The number of buckets under this cap."""
    seconds: float
    """The whole step."""
    exposed_s: float
    """Seconds of traffic with no computation over it."""


@dataclass(frozen=True)
class Choice:
    """The estimates for each cap, and the step with the best one."""

    target: str
    """The machine that was compiled for: "h100:2x8"."""
    candidates: tuple[Estimated, ...]
    """The caps, and what a step with each is estimated to take; caps that give one plan stand here once."""
    step: TrainStep
    """The step with the best cap; it goes on from the state of the step that was given."""

    @property
    def best(self) -> Estimated:
        """The candidate with the shortest step; of several the first."""
        return _best(self.candidates)

    @property
    def bucket_cap_mb(self) -> Caps:
        """The best cap, for `train_step`."""
        return self.best.bucket_cap_mb

    def __str__(self) -> str:
        def row(one: Estimated) -> tuple[str, ...]:
            mark = "best" if one == self.best else ""
            return _shown(one.bucket_cap_mb), str(one.buckets), _ms(one.seconds), _ms(one.exposed_s), mark

        head = ("cap MiB", "buckets", "ms a step", "ms exposed", "")
        cap = f"bucket_cap_mb={_shown(self.bucket_cap_mb)}"
        return "\n".join([f"{self.target}, estimated at peak rates", *table([head, *map(row, self.candidates)]), cap])


def tune_for(step: TrainStep, state: Any, batch: Any, target: str, *, caps_mb: Sequence[Caps] = CAPS_MB) -> Choice:
    """Compiles a step for a target with each cap, and takes the one whose estimate is the shortest.

    Each rank compiles some of the candidates. Estimates are made of forms alone, and all ranks get the same ones: so
    all choose the same.

    Args:
      step: as for `fddp.audit`.
      state: likewise.
      batch: likewise.
      target: likewise.
      caps_mb: caps to choose from, beside the step's own, MiB.

    Returns:
      The choice.

    Raises:
      ValueError: as `fddp.audit`, or no caps; on every rank.
      RuntimeError: a rank has no compiler for the target; on every rank.
    """
    group = step.group

    def find() -> tuple[list[_Plan], dict[int, Estimated]]:
        plans = _different(step, state, batch, read_target(target), caps_mb)
        mine = range(group.rank, len(plans), group.processes)
        return plans, {k: plans[k].estimated() for k in mine}

    def described(found: tuple[list[_Plan], dict[int, Estimated]]) -> list[str]:
        plans, _ = found
        return [f"target {target}", repr(step.options), *(f"cap {one.cap}: plan {one.digest}" for one in plans)]

    plans, mine = verify(group, "what to tune", find, described)
    numbers = np.zeros((len(plans), 2))
    for k, one in mine.items():
        numbers[k] = one.seconds, one.exposed_s
    took = group.all_reduce(numbers).tolist()
    candidates = tuple(Estimated(one.cap, one.buckets, *seconds) for one, seconds in zip(plans, took))
    return Choice(target, candidates, step.with_cap(_best(candidates).bucket_cap_mb))


class _Plan(NamedTuple):
    """A cap, and the step that it makes on the target, not yet compiled."""

    cap: Caps
    step: TrainStep
    state: Any
    batch: Any
    target: Target

    @property
    def digest(self) -> str:
        return self.step.plan.digest

    @property
    def buckets(self) -> int:
        return len(self.step.plan.buckets)

    def estimated(self) -> Estimated:
        """Compiles it."""
        module = parse(self.step.lower(self.state, self.batch).compile().as_text() or "")
        line = estimate(module, find_collectives(module), self.target)
        return Estimated(self.cap, self.buckets, line.seconds, line.exposed)


def _different(step: TrainStep, state: Any, batch: Any, target: Target, caps_mb: Sequence[Caps]) -> list[_Plan]:
    """Finds the caps that give different plans, the step's own first."""
    if not caps_mb:
        raise ValueError("caps_mb must hold at least one cap to choose from.")
    found = dict[str, _Plan]()
    for cap in (step.options.bucket_cap_mb, *caps_mb):
        one = _Plan(cap, *moved(step.with_cap(cap), state, batch, target), target)
        one.step.tasks(one.state, one.batch)  # settles it
        found.setdefault(one.digest, one)
    return list(found.values())


def _best(candidates: Sequence[Estimated]) -> Estimated:
    """The shortest; of several the first."""
    return min(candidates, key=lambda one: one.seconds)


def _shown(cap: Caps) -> str:
    """A cap, or the caps of each bucket in turn, as `train_step` takes them."""
    return f"{cap:g}" if isinstance(cap, int | float) else f"[{', '.join(map(_shown, cap))}]"


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.2f}"
