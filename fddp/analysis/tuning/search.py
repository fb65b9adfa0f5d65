"""Finds the best bucket cap: measures a little, simulates all caps, and verifies the best by a run.

Small buckets leave early but cost a latency each; large ones wait for their last gradient. The
balance depends on network, model and hosts: the paper finds it only by a trial of each cap
(section 5.3).

Source: Li et al. (VLDB 2020), Fig. 7 and 8.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from operator import attrgetter
from typing import Any

import numpy as np
from jaxtyping import PyTree

from fddp.analysis.tuning.link import measure_link
from fddp.analysis.tuning.regrouping import (
    Typical,
    different,
    message_bytes,
    stage_seconds,
    total_seconds,
    typical,
)
from fddp.analysis.tuning.tuning import Candidate, Tuning
from fddp.buckets import BucketPlan, Caps, place_scalars, plan_with_table_rows, whole_forms
from fddp.comm import Group, verify
from fddp.jaxpr import refuse_deleted
from fddp.measuring import MeasuredStep, Measurement
from fddp.schedules import Pace, observed_pace, outline, simulate
from fddp.sharding import whole
from fddp.step import TrainState, check_state, refuse
from fddp.training import TrainStep

CAPS_MB = (0.0, 0.25, 0.5, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 25.0, 50.0, 100.0, 200.0)
TURNS = 3
LIMITS = ("first_bucket_mb", "last_bucket_mb")  # further options of the plan
GAIN = 0.02  # the least gain that pays for eager's extra memory and programs

Run = Callable[[], Measurement]


Look = tuple[Typical, tuple[Candidate, ...], Pace]
"""Typical step with a cap, the steps predicted from it with all caps, and its pace."""


def tune_here(
    step: TrainStep,
    state: TrainState,
    batch: PyTree,
    *,
    caps_mb: Sequence[Caps] = CAPS_MB,
    steps: int = 4,
) -> Tuning:
    """Finds the cap with the shortest staged step, and measures eager with it; see `fddp.tune`."""
    group = step.group
    _check(step, state, caps_mb)
    trial = Trial(step, state, batch, caps_mb, steps)
    caps = list(trial.plans({}))
    busy, candidates, pace = _search(trial.look, caps[len(caps) // 2])
    best = min(candidates, key=attrgetter("seconds"))
    prepared = partial(trial.prepared, step)
    schedule, staged_s, *eager = _measured(step, best.bucket_cap_mb, prepared)
    return Tuning(
        f"{group.size} replica{'s' * (group.size > 1)}, predicted from measurements",
        group.size,
        candidates,
        best,
        schedule,
        step.with_options(schedule=schedule, bucket_cap_mb=best.bucket_cap_mb),
        trial.link,
        pace,
        busy.idle,
        staged_s,
        *eager,
    )


class Trial:
    """Measured steps with some caps, and predictions for all."""

    def __init__(
        self, step: TrainStep, state: TrainState, batch: PyTree, caps_mb: Sequence[Caps], steps: int
    ) -> None:
        self._step = step
        self._state = state
        self._batches = [batch] * steps
        self._caps = [cap if isinstance(cap, int | float) else tuple(cap) for cap in caps_mb]
        self._solo = step.on(step.group.subgroup([step.group.rank]))
        params, model_state = whole((state.params, state.model_state))
        self._solo_state = self._solo.init(params, model_state=model_state, rng=state.rng)
        self.link = measure_link(step.group)
        finest, self._run_finest = self.prepared(self._solo, 0.0)
        self._run_finest()  # settles the order of readiness
        self._finest = finest.plan
        self._order = [i for bucket in finest.plan.buckets for i in bucket.leaves]

    def prepared(self, step: TrainStep, cap_mb: Caps, **overrides: Any) -> tuple[TrainStep, Run]:
        """Makes a staged step with a cap, and the run that measures it."""
        options: Any = {"schedule": "staged", "bucket_cap_mb": cap_mb} | overrides
        variant = step.with_options(**options)
        first = self._state if step.group is self._step.group else self._solo_state
        return variant, lambda: variant.measure(first, self._batches)

    def plans(self, touched: Mapping[int, int]) -> dict[Caps, BucketPlan]:
        """Plans the buckets of all caps that differ."""
        limits = {name: getattr(self._step.options, name) for name in LIMITS}
        forms = whole_forms(self._state.params)
        size = self._step.group.size
        plan_of = partial(plan_with_table_rows, forms, touched, size, order=self._order, **limits)
        plans = different({cap: plan_of(bucket_cap_mb=cap) for cap in self._caps})
        exact = self._finest.carrier.bucket is not None
        return {cap: place_scalars(plan, early=True, exact=exact) for cap, plan in plans.items()}

    def look(self, cap_mb: Caps) -> Look:
        """Runs steps with one cap, and predicts from them the steps with all caps."""
        group = self._step.group
        variant, run = self.prepared(self._step, cap_mb)
        runs = _in_turn(group, self._run_finest, self.prepared(self._solo, cap_mb)[1], run)
        buckets = variant.plan.buckets
        plans = self.plans({x.leaves[0]: x.rows.most for x in buckets if x.rows})
        fine, quiet, busy = (typical(group, run) for run in runs)
        pace = _pace(group, runs[-1], sum(quiet.stages), sum(map(self.link.seconds, busy.nbytes)))
        tail = sum(fine.nbytes) - sum(bucket.nbytes for bucket in self._finest.buckets)

        def candidate(cap_mb: Caps, plan: BucketPlan) -> Candidate:
            nbytes = message_bytes(plan, tail, group.size)
            total = total_seconds(fine, quiet, len(nbytes))
            stages = stage_seconds(fine.stages, self._order, plan, total=total)
            updates = stage_seconds(fine.updates, self._order, plan, total=sum(busy.updates))
            sends = [self.link.seconds(n) for n in nbytes]
            line = simulate(*outline(stages, sends, updates), pace)
            seconds = line.seconds + busy.idle, line.exposed
            return Candidate("staged", cap_mb, plan, *seconds, stages, updates, nbytes)

        return busy, tuple(candidate(cap, plan) for cap, plan in plans.items()), pace


def _measured(
    step: TrainStep, cap_mb: Caps, prepared: Callable[..., tuple[TrainStep, Run]]
) -> tuple[Any, ...]:
    """Measures a cap; returns the faster schedule, and the seconds of staged and of eager, if run.

    Eager is measured, as the overlap with the next forward pass is not simulated. In shards it is
    staged.
    """
    group = step.group
    runs = [prepared(cap_mb)[1]]
    if step.options.schedule == "auto" and not step.options.shard:
        runs += _eager(partial(prepared, cap_mb))
    measured = _in_turn(group, *runs)
    medians = [np.median([x.seconds for x in measured_steps]) for measured_steps in measured]
    staged_s, *eager = group.all_reduce(np.array(medians), op="max").tolist()
    schedule = "staged"
    if eager and eager[0] < (1 - GAIN) * staged_s:
        schedule = "eager"
    return schedule, staged_s, *eager


def _search(look: Callable[[Caps], Look], cap_mb: Caps) -> Look:
    """Looks at a cap, then at the best cap of the last look, until that has been looked at."""
    # Each simulation starts from a run with and without traffic, which shows how much computation
    # and traffic slow each other down. A hook's savings, and the cost of 16 bits sent as 32, count
    # as pace of the traffic. The pace depends a little on the cap.
    visited = set[Caps]()
    while True:
        visited.add(cap_mb)
        busy, candidates, pace = look(cap_mb)
        cap_mb = min(candidates, key=attrgetter("seconds")).bucket_cap_mb
        if cap_mb in visited:
            return busy, candidates, pace


def _check(step: TrainStep, state: TrainState, caps_mb: Sequence[Caps]) -> None:
    """Raises an error on every rank for an unsupported step, a wrong state, or no caps."""
    group = step.group
    schedule = step.options.schedule
    if group.size != group.processes or schedule not in ("staged", "auto"):
        raise ValueError(
            "tune simulates the staged schedule, for groups of one replica per process: got "
            f"schedule={schedule!r} and {group.size} replicas in {group.processes} processes. "
            "In a fused step XLA launches the buckets; use step.measure(state, batches) there, or "
            "give a target."
        )
    if count := step.options.virtual_replicas:
        refuse({"virtual_replicas": f"virtual_replicas={count}", "fddp.tune": "fddp.tune"})
    if not caps_mb:
        raise ValueError("caps_mb must hold at least one cap to choose from.")
    verify(group, "what to tune", lambda: check_state(state), lambda _: [f"schedule {schedule}"])
    refuse_deleted(state)


def _eager(prepared: Callable[..., tuple[TrainStep, Run]]) -> Sequence[Run]:
    """Returns a run of eager steps, which has compiled; empty if the options rule eager out."""
    try:
        _, run = prepared(schedule="eager")  # only checks the options
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
