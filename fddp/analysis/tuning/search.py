"""Finds the best bucket cap: measures a little, simulates all caps, and verifies the best by a run.

Small buckets leave early but cost a latency each; large ones wait for their last gradient. The
balance depends on network, model and hosts: the paper finds it only by a trial of each cap
(section 5.3).

Source: Li et al. (VLDB 2020), Fig. 7 and 8.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from statistics import median_high
from typing import Any

import numpy as np
import optax

from fddp.analysis.tuning.link import Link, measure_link
from fddp.analysis.tuning.regrouping import (
    Typical,
    different,
    message_bytes,
    stage_seconds,
    total_seconds,
    typical,
)
from fddp.analysis.tuning.scaling import REPLICAS, Algorithm, Projection, hop_of, project, ring
from fddp.buckets import BucketPlan, place_scalars, plan_with_table_rows, whole_forms
from fddp.comm import Group, verify
from fddp.measuring import MeasuredStep, Measurement
from fddp.runtime import group_of
from fddp.schedules import Pace, observed_pace, outline, simulate
from fddp.step import refuse
from fddp.training import TrainStep, train_step
from fddp.wording import table

CAPS_MB = (0.0, 0.25, 0.5, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 25.0, 50.0, 100.0, 200.0)
TURNS = 3
LIMITS = ("first_bucket_mb", "last_bucket_mb", "groups")  # further options of the plan
GAIN = 0.02  # the least gain that pays for eager's extra memory and programs

Run = Callable[[], Measurement]


@dataclass(frozen=True)
class Candidate:
    """A bucket cap and its predicted step."""

    bucket_cap_mb: float
    stages: tuple[float, ...]
    """Seconds of the stages without traffic."""
    updates: tuple[float, ...]
    """Seconds of the updates, each after its all-reduce."""
    nbytes: tuple[int, ...]
    """Bytes of each all-reduce."""
    predicted_s: float
    """Predicted seconds of the step."""


Look = tuple[Typical, tuple[Candidate, ...], Pace]
"""Typical step with a cap, the steps predicted from it with all caps, and its pace."""


@dataclass(frozen=True)
class Tuning:
    """The measurements, the prediction for each cap, and the measured step with the best cap."""

    replicas: int
    """Number of replicas."""
    link: Link
    """The cost of an all-reduce among the replicas."""
    pace: Pace
    """The speeds of computation and communication while both run."""
    idle_s: float
    """Seconds of Python and of row placement in a step."""
    candidates: tuple[Candidate, ...]
    """The caps with their predicted steps."""
    best: Candidate
    """The candidate with the shortest step."""
    measured_s: float
    """Measured seconds of the step with the best cap."""
    eager_s: float | None = None
    """Measured seconds with schedule="eager" and the best cap; None if not tried or unsupported."""

    @property
    def bucket_cap_mb(self) -> float:
        """The best cap, for `train_step`."""
        return self.best.bucket_cap_mb

    @property
    def schedule(self) -> str:
        """The faster schedule, for `train_step`: "eager" if it saves over 2 %, else "staged"."""
        if self.eager_s is None or self.eager_s >= (1 - GAIN) * self.measured_s:
            return "staged"
        return "eager"

    @property
    def deviation(self) -> float:
        """Relative error of the best cap's prediction: 0.05 is 5 % above the measured step."""
        return self.best.predicted_s / self.measured_s - 1

    def at_scale(
        self, replicas: Sequence[int] = REPLICAS, algorithm: Algorithm = ring
    ) -> tuple[Projection, ...]:
        """Projects the step with the best cap to other numbers of replicas.

        Args:
          replicas: the numbers of replicas.
          algorithm: the all-reduce: `ring` or `tree` of `fddp.analysis.tuning.scaling`, or a
            function of (hop, bytes, replicas) that returns seconds.

        Returns:
          A projection for each number of replicas.

        Raises:
          ValueError: the measured group had a single replica, so the link is unknown.
        """
        hop = hop_of(self.link, self.replicas, algorithm)
        best = self.best
        options = {"pace": self.pace, "replicas": replicas, "algorithm": algorithm}
        updates = (*best.updates[:-1], best.updates[-1] + self.idle_s)
        return project(best.stages, best.nbytes, hop, updates=updates, **options)

    def __str__(self) -> str:
        rows = [("cap MiB", "buckets", "predicted ms", "")]
        for c in self.candidates:
            numbers = f"{c.bucket_cap_mb:7g}", f"{len(c.nbytes):7}", f"{1e3 * c.predicted_s:12.1f}"
            rows.append((*numbers, "best" * (c == self.best)))
        lines = [
            f"an all-reduce takes {self.link}",
            f"beside each other computation runs at {self.pace.compute:.0%} and traffic at "
            f"{self.pace.communication:.0%} of its speed alone",
            *table(rows),
            f"bucket_cap_mb={self.bucket_cap_mb:g}: measured {1e3 * self.measured_s:.1f} ms, "
            f"predicted {self.deviation:+.1%}",
        ]
        if self.eager_s is not None:
            lines.append(f"schedule={self.schedule!r}: eager takes {1e3 * self.eager_s:.1f} ms")
        if self.replicas == 1:
            advice = "one replica sends nothing, and any cap will do: start this under mpiexec -n 2"
            lines.append(advice)
        return "\n".join(lines)


def tune_here(
    loss_fn: Callable[..., Any],
    optimizer: optax.GradientTransformation,
    params: Any,
    batch: Any,
    *,
    group: Group | None = None,
    has_aux: bool = False,
    model_state: Any = None,
    rng: Any = None,
    caps_mb: Sequence[float] = CAPS_MB,
    steps: int = 4,
    **options: Any,
) -> Tuning:
    """Finds the cap with the shortest staged step, and measures eager with it; see `fddp.tune`."""
    group = group_of("tune", group)
    schedule = _schedule(group, caps_mb, options)
    limits = {name: options[name] for name in LIMITS if name in options}
    solo = group.subgroup([group.rank])

    def prepared(group: Group, cap_mb: float, **overrides: Any) -> tuple[TrainStep, Run]:
        settings = options | {"schedule": "staged", "bucket_cap_mb": cap_mb} | overrides
        step = train_step(loss_fn, optimizer, group=group, has_aux=has_aux, **settings)
        state = step.init(params, model_state=model_state, rng=rng)
        return step, lambda: step.measure(state, [batch] * steps)

    link = measure_link(group)
    finest, run_finest = prepared(solo, 0.0, groups=None)
    run_finest()  # settles the order of readiness
    order = [i for bucket in finest.plan.buckets for i in bucket.leaves]
    forms = whole_forms(finest.shapes(params, model_state=model_state, rng=rng).params)

    def planned(touched: Mapping[int, int]) -> dict[float, BucketPlan]:
        plan_of = partial(plan_with_table_rows, forms, touched, group.size, order=order, **limits)
        plans = different({cap: plan_of(bucket_cap_mb=cap) for cap in caps_mb})
        exact = finest.plan.carrier.bucket is not None
        return {cap: place_scalars(plan, early=True, exact=exact) for cap, plan in plans.items()}

    def look(cap_mb: float) -> Look:
        """Runs steps with one cap, and predicts from them the steps with all caps."""
        step, run = prepared(group, cap_mb)
        runs = _in_turn(group, run_finest, prepared(solo, cap_mb)[1], run)
        buckets = step.plan.buckets
        plans = planned({x.leaves[0]: x.rows.most for x in buckets if x.rows})
        fine, quiet, busy = (typical(group, run) for run in runs)
        pace = _pace(group, runs[-1], sum(quiet.stages), sum(map(link.seconds, busy.nbytes)))
        tail = sum(fine.nbytes) - sum(bucket.nbytes for bucket in finest.plan.buckets)

        def candidate(cap_mb: float, plan: BucketPlan) -> Candidate:
            nbytes = message_bytes(plan, tail, group.size)
            total = total_seconds(fine, quiet, len(nbytes))
            stages = stage_seconds(fine.stages, order, plan, total=total)
            updates = stage_seconds(fine.updates, order, plan, total=sum(busy.updates))
            line = simulate(*outline(stages, [link.seconds(n) for n in nbytes], updates), pace)
            return Candidate(cap_mb, stages, updates, nbytes, line.seconds + busy.idle)

        return busy, tuple(candidate(cap, plan) for cap, plan in plans.items()), pace

    busy, candidates, pace = _search(look, median_high(planned({})))
    best = min(candidates, key=attrgetter("predicted_s"))
    # Eager is measured: the overlap with the next forward pass is not simulated. In shards it is
    # staged.
    runs = [prepared(group, best.bucket_cap_mb)[1]]
    if schedule == "auto" and not options.get("shard"):
        runs += _eager(partial(prepared, group, best.bucket_cap_mb))
    medians = [np.median([step.seconds for step in steps]) for steps in _in_turn(group, *runs)]
    slowest = group.all_reduce(np.array(medians), op="max").tolist()
    return Tuning(group.size, link, pace, busy.idle, candidates, best, *slowest)


def _search(look: Callable[[float], Look], cap_mb: float) -> Look:
    """Looks at a cap, then at the best cap of the last look, until that has been looked at."""
    # Each simulation starts from a run with and without traffic, which shows how much computation
    # and traffic slow each other down. A hook's savings, and the cost of 16 bits sent as 32, count
    # as pace of the traffic. The pace depends a little on the cap.
    visited = set[float]()
    while True:
        visited.add(cap_mb)
        busy, candidates, pace = look(cap_mb)
        cap_mb = min(candidates, key=attrgetter("predicted_s")).bucket_cap_mb
        if cap_mb in visited:
            return busy, candidates, pace


def _schedule(group: Group, caps_mb: Sequence[float], options: Mapping[str, Any]) -> str:
    """Returns the schedule, equal on all ranks; raises ValueError for unsupported arguments."""
    schedule = options.get("schedule", "auto")
    if group.size != group.processes or schedule not in ("staged", "auto"):
        raise ValueError(
            "tune simulates the staged schedule, for groups of one replica per process: got "
            f"schedule={schedule!r} and {group.size} replicas in {group.processes} processes. "
            "In a fused step XLA launches the buckets; use step.measure(state, batches) there."
        )
    if count := options.get("virtual_replicas"):
        refuse({"virtual_replicas": f"virtual_replicas={count}", "fddp.tune": "fddp.tune"})
    if not caps_mb:
        raise ValueError("caps_mb must hold at least one cap to choose from.")
    verify(group, "what to tune", lambda: [f"schedule {schedule}"])
    return schedule


def _eager(prepared: Callable[..., tuple[TrainStep, Run]]) -> Sequence[Run]:
    """Returns a run of eager steps, which has compiled; empty if eager is unsupported."""
    try:
        _, run = prepared(schedule="eager")
    except ValueError:
        return ()
    run()
    return (run,)


def _pace(group: Group, steps: Sequence[MeasuredStep], stages: float, sends: float) -> Pace:
    """Returns the mean pace over ranks; the wait for a later rank does not count as traffic."""
    durations = np.array([[span.seconds for span in step.timeline.communication] for step in steps])
    waits = np.sum(durations - group.all_reduce(durations, op="min"), axis=1)
    paces = list[Pace]()
    for step, wait in zip(steps, waits.tolist()):
        updates = sum(span.seconds for span in step.timeline.updates)
        paces.append(observed_pace(step.timeline, stages + updates, sends + wait))
    return Pace(*(group.all_reduce(np.median(np.array(paces), axis=0)) / group.processes).tolist())


def _in_turn(group: Group, *runs: Run) -> list[list[MeasuredStep]]:
    """Interleaves runs, a few steps at a time, so that a slow moment of the machine hits all."""
    measured: list[list[MeasuredStep]] = [[] for _ in runs]
    for _ in range(TURNS):
        for steps, run in zip(measured, runs):
            group.lane.wait()  # pending messages of an eager step belong to no other run
            group.barrier()
            steps += run().steps
    return measured
