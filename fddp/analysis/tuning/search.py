"""Finds the best bucket cap: measures a little, simulates every cap from that, and checks the best one by a run.

Small buckets leave early but pay a latency each; large ones wait for their last gradient. Where the balance lies
depends on the network, the model and the hosts: in the paper nothing but trying each cap finds it (section 5.3).

Source: Li et al. (VLDB 2020), Fig. 7 and 8.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median_high
from typing import Any

import numpy as np
import optax

from fddp.analysis.tuning.link import Link, measure_link
from fddp.analysis.tuning.regrouping import Typical, different, joined, message_bytes, total_seconds, typical
from fddp.analysis.tuning.scaling import REPLICAS, Algorithm, Projection, hop_of, project, ring
from fddp.buckets import BucketPlan, place_scalars, plan_with_table_rows, whole_forms
from fddp.comm import Group, verify
from fddp.measuring import MeasuredStep, Measurement
from fddp.runtime import group_of
from fddp.schedules import TRIED, Pace, observed_pace, outline, simulate
from fddp.step import refuse
from fddp.training import TrainStep, train_step

CAPS_MB = (0.0, 0.25, 0.5, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 25.0, 50.0, 100.0, 200.0)
TURNS = 3
GAIN = 0.02  # the least for which eager is worth its memory and its programs

Run = Callable[[], Measurement]


@dataclass(frozen=True)
class Candidate:
    """A bucket cap, and the step that it would make."""

    bucket_cap_mb: float
    stages: tuple[float, ...]
    """Seconds that the stages take alone."""
    updates: tuple[float, ...]
    """Seconds of the updates, each after its all-reduce."""
    nbytes: tuple[int, ...]
    """Bytes of each all-reduce."""
    predicted_s: float
    """The whole step."""


@dataclass(frozen=True)
class Tuning:
    """The measurements, the prediction for every cap, and how well the prediction for the best one held."""

    replicas: int
    """The number of replicas that took part."""
    link: Link
    """The cost of an all-reduce among them."""
    pace: Pace
    """The speeds of computation and communication while both are under way."""
    idle_s: float
    """Seconds of Python, and of placing rows."""
    candidates: tuple[Candidate, ...]
    """The caps, and what a step with each is predicted to take."""
    best: Candidate
    """The one with the shortest step."""
    measured_s: float
    """The step with the best cap, really run."""
    eager_s: float | None = None
    """The same with schedule="eager", run in turn with it; None where that was not to be tried, or does not go."""

    @property
    def bucket_cap_mb(self) -> float:
        """The best cap, for `train_step`."""
        return self.best.bucket_cap_mb

    @property
    def schedule(self) -> str:
        """The faster schedule, for `train_step`: "eager" where it saves more than 2 %, else "staged"."""
        return "staged" if self.eager_s is None or self.eager_s >= (1 - GAIN) * self.measured_s else "eager"

    @property
    def deviation(self) -> float:
        """The error of the prediction for the best cap, as a share of the measured step: 0.05 is 5 % too long."""
        return self.best.predicted_s / self.measured_s - 1

    def at_scale(self, replicas: Sequence[int] = REPLICAS, algorithm: Algorithm = ring) -> tuple[Projection, ...]:
        """Projects the step with the best cap to other numbers of replicas; see `fddp.analysis.tuning.scaling`.

        Args:
          replicas: how many.
          algorithm: of the all-reduces: `ring`, `tree` or one like them.

        Returns:
          A projection for each number of replicas.

        Raises:
          ValueError: a single replica was measured, which says nothing of a link.
        """
        hop = hop_of(self.link, self.replicas, algorithm)
        one = self.best
        updates = (*one.updates[:-1], one.updates[-1] + self.idle_s)
        return project(
            one.stages, one.nbytes, hop, updates=updates, pace=self.pace, replicas=replicas, algorithm=algorithm
        )

    def __str__(self) -> str:
        head = (
            f"an all-reduce takes {self.link}",
            f"beside each other computation runs at {self.pace.compute:.0%} and traffic at "
            f"{self.pace.communication:.0%} of its speed alone",
            "cap MiB  buckets  predicted ms",
        )
        rows = [
            f"{c.bucket_cap_mb:7g}  {len(c.nbytes):7}  {1e3 * c.predicted_s:12.1f}{'  best' * (c == self.best)}"
            for c in self.candidates
        ]
        foot = (
            f"bucket_cap_mb={self.bucket_cap_mb:g}: measured {1e3 * self.measured_s:.1f} ms, "
            f"predicted {self.deviation:+.1%}"
        )
        eager = [f"schedule={self.schedule!r}: eager takes {1e3 * (self.eager_s or 0.0):.1f} ms"] * (
            self.eager_s is not None
        )
        alone = ["one replica sends nothing, and any cap will do: start this under mpiexec -n 2"] * (self.replicas == 1)
        return "\n".join([*head, *rows, foot, *eager, *alone])


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
    """Finds the bucket cap with the shortest step under the staged schedule, and whether eager is faster still.

    It measures all-reduces of several sizes, the stages of the finest cut without traffic, and a cap with and without
    traffic, which tells how computation and traffic slow each other down. From these it simulates every cap's step:
    first from a look at a middle cap, then at the one that seemed best, until the best is one that was looked at. The
    savings of a hook, and the cost of 16 bits that travel as 32, count as pace of the traffic. With the best cap staged
    and eager take turns: overlap with the next forward pass is measured, not simulated. All ranks find the same.

    Args:
      loss_fn: as for `train_step`.
      optimizer: as for `train_step`.
      params: as for `step.init`; the measurements leave them alone.
      batch: this process's rows, as for a step.
      group: replicas, one per process; None: those of `fddp.init()`.
      has_aux: as for `train_step`.
      model_state: as for `step.init`.
      rng: as for `step.init`.
      caps_mb: caps to choose from, MiB; of those that give one plan the smallest stands for all.
      steps: steps of each of the three turns of a measurement.
      **options: further options of `train_step`; with schedule="staged" eager is not tried.

    Returns:
      The tuning; `train_step(…, bucket_cap_mb=tuning.bucket_cap_mb, schedule=tuning.schedule)` uses it.

    Raises:
      ValueError: several replicas per process, or another schedule than staged, or no caps.

    Example:
      >>> import jax, fddp, jax.numpy as jnp, optax
      >>> from fddp.analysis.tuning.search import tune_here
      >>> group = fddp.mesh_group(jax.sharding.Mesh(jax.devices()[:1], "replica"))
      >>> loss = lambda p, x: jnp.mean((jnp.tanh(x @ p["a"]) @ p["b"]) ** 2)
      >>> params = {"a": jnp.ones((4, 8)), "b": jnp.ones((8, 1))}
      >>> tuning = tune_here(loss, optax.sgd(0.1), params, jnp.ones((2, 4)), group=group)
      >>> [(c.bucket_cap_mb, len(c.nbytes)) for c in tuning.candidates]
      [(0.0, 2), (0.25, 1)]
    """
    group = group_of("tune", group)
    schedule = _schedule(group, caps_mb, options)
    bucketing = {name: options[name] for name in ("first_bucket_mb", "last_bucket_mb", "groups") if name in options}
    alone = group.subgroup([group.rank])

    def made(group: Group, cap_mb: float, **other: Any) -> tuple[TrainStep, Run]:
        settings = options | {"schedule": "staged", "bucket_cap_mb": cap_mb} | other
        step = train_step(loss_fn, optimizer, group=group, has_aux=has_aux, **settings)
        state = step.init(params, model_state=model_state, rng=rng)
        return step, lambda: step.measure(state, [batch] * steps)

    link = measure_link(group)
    finest, run_finest = made(alone, 0.0, groups=None)
    run_finest()  # settles the order of readiness
    order = [i for bucket in finest.plan.buckets for i in bucket.leaves]
    forms = whole_forms(finest.shapes(params, model_state=model_state, rng=rng).params)

    def planned(touched: Mapping[int, int]) -> dict[float, BucketPlan]:
        plan_of = partial(plan_with_table_rows, forms, touched, group.size, order=order, **bucketing)
        found = different({cap: plan_of(bucket_cap_mb=cap) for cap in caps_mb})
        exact = finest.plan.carrier.bucket is not None
        return {cap: place_scalars(plan, early=True, exact=exact) for cap, plan in found.items()}

    def look(cap_mb: float) -> tuple[Typical, tuple[Candidate, ...], Pace]:
        """Runs a cap for real, and predicts every other one from that."""
        step, run = made(group, cap_mb)
        runs = _in_turn(group, run_finest, made(alone, cap_mb)[1], run)
        plans = planned({bucket.leaves[0]: bucket.rows.most for bucket in step.plan.buckets if bucket.rows})
        fine, quiet, busy = (typical(group, run) for run in runs)
        pace = _pace(group, runs[-1], sum(quiet.stages), sum(map(link.seconds, busy.nbytes)))
        more = sum(fine.nbytes) - sum(bucket.nbytes for bucket in finest.plan.buckets)

        def candidate(cap_mb: float, plan: BucketPlan) -> Candidate:
            nbytes = message_bytes(plan, more, group.size)
            stages = joined(fine.stages, order, plan, total=total_seconds(fine, quiet, len(nbytes)))
            updates = joined(fine.updates, order, plan, total=sum(busy.updates))
            line = simulate(*outline(stages, [link.seconds(n) for n in nbytes], updates), pace)
            return Candidate(cap_mb, stages, updates, nbytes, line.seconds + busy.idle)

        return busy, tuple(candidate(cap, plan) for cap, plan in plans.items()), pace

    # The pace depends a little on the cap: so the look at the chosen cap itself decides.
    chosen = median_high(planned({}))
    seen = set[float]()
    while True:
        seen.add(chosen)
        busy, candidates, pace = look(chosen)
        best = min(candidates, key=lambda one: one.predicted_s)
        chosen = best.bucket_cap_mb
        if chosen in seen:
            break
    runs = [made(group, chosen)[1], *(_eager(partial(made, group, chosen)) if schedule == "auto" else ())]
    seconds = [np.median([step.seconds for step in steps]) for steps in _in_turn(group, *runs)]
    took = group.all_reduce(np.array(seconds), op="max").tolist()
    return Tuning(group.size, link, pace, busy.idle, candidates, best, *took)


def _schedule(group: Group, caps_mb: Sequence[float], options: Mapping[str, Any]) -> str:
    """The schedule that was asked for, the same on all ranks; refuses what cannot be tuned."""
    schedule = options.get("schedule", "auto")
    if group.size != group.processes or schedule not in ("staged", "auto"):
        raise ValueError(
            "tune simulates the staged schedule, for groups of one replica per process: got "
            f"schedule={schedule!r} and {group.size} replicas in {group.processes} processes. "
            "In a fused step XLA launches the buckets; look at step.measure(state, batches) there."
        )
    if count := options.get("virtual_replicas"):
        refuse({"virtual_replicas": f"virtual_replicas={count}", "fddp.tune": "fddp.tune"})
    if not caps_mb:
        raise ValueError("caps_mb must hold at least one cap to choose from.")
    verify(group, "what to tune", lambda: [f"schedule {schedule}"])
    return schedule


def _eager(made: Callable[..., tuple[TrainStep, Run]]) -> Sequence[Run]:
    """A run of eager steps that have tried their orders; none where an option, a hook say, rules eager out."""
    try:
        _, run = made(schedule="eager")
    except ValueError:
        return ()
    for _ in range(-(-TRIED // len(run().steps))):
        run()
    return (run,)


def _pace(group: Group, steps: Sequence[MeasuredStep], stages: float, sends: float) -> Pace:
    """The mean pace over ranks. A rank that comes first to an all-reduce waits for the others, which is no traffic."""
    took = np.array([[span.seconds for span in step.timeline.communication] for step in steps])
    waited = np.sum(took - group.all_reduce(took, op="min"), axis=1)
    paces = [
        observed_pace(step.timeline, stages + sum(span.seconds for span in step.timeline.updates), sends + wait)
        for step, wait in zip(steps, waited.tolist())
    ]
    return Pace(*(group.all_reduce(np.median(np.array(paces), axis=0)) / group.processes).tolist())


def _in_turn(group: Group, *runs: Run) -> list[list[MeasuredStep]]:
    """Steps of several runs, a few at a time, so that a slow moment of the machine hits all alike."""
    found: list[list[MeasuredStep]] = [[] for _ in runs]
    for _ in range(TURNS):
        for steps, run in zip(found, runs):
            group.lane.wait()  # what an eager step has left under way belongs to no other run
            group.barrier()
            steps += run().steps
    return found
