"""The result of `fddp.tune`: the candidates, the best of them, and the step that uses it."""

from collections.abc import Sequence
from dataclasses import dataclass

from fddp.analysis.tuning.link import Link
from fddp.analysis.tuning.scaling import REPLICAS, Algorithm, Projection, hop_of, project, ring
from fddp.buckets import BucketPlan, Caps
from fddp.schedules import Pace
from fddp.step import ScheduleName
from fddp.training import TrainStep
from fddp.wording import preformatted, table


@dataclass(frozen=True)
class Candidate:
    """A schedule with a bucket cap, and the estimate for its step."""

    schedule: ScheduleName
    """The schedule, for `train_step`."""
    bucket_cap_mb: Caps
    """The cap in MiB, for `train_step`."""
    plan: BucketPlan
    """The buckets under this cap."""
    seconds: float
    """Duration of the step."""
    exposed_s: float
    """Seconds of traffic without computation."""
    stages: tuple[float, ...] = ()
    """Seconds of the stages without traffic; empty for a target, as are the next two fields."""
    updates: tuple[float, ...] = ()
    """Seconds of the updates, each after its all-reduce."""
    nbytes: tuple[int, ...] = ()
    """Bytes of each all-reduce."""


@dataclass(frozen=True)
class Tuning:
    """The estimates of several bucket caps and schedules, and the step with the best of them."""

    where: str
    """The machine and the kind of estimate: "h100:2x8, estimated at peak rates"."""
    replicas: int
    """Number of replicas."""
    candidates: tuple[Candidate, ...]
    """The estimates without duplicates; for a target the first is the original step's."""
    best: Candidate
    """The first candidate with the shortest step."""
    schedule: ScheduleName
    """The best schedule, for `train_step`. "eager" must save over 2 % of the staged step."""
    step: TrainStep
    """The step with the best cap and schedule; it continues from the original step's state."""
    link: Link | None = None
    """The measured cost of an all-reduce; None for a target, as are all further fields."""
    pace: Pace | None = None
    """The measured speeds of computation and communication while both run."""
    idle_s: float | None = None
    """Measured seconds of Python and of row placement in a step."""
    measured_s: float | None = None
    """Measured seconds of the staged step with the best cap."""
    eager_s: float | None = None
    """Measured seconds with schedule="eager" and the best cap; None if not tried or unsupported."""

    @property
    def bucket_cap_mb(self) -> Caps:
        """The best cap, for `train_step`."""
        return self.best.bucket_cap_mb

    @property
    def deviation(self) -> float | None:
        """Relative error of the best cap's prediction: 0.05 is 5 % above the measured step."""
        return self.measured_s and self.best.seconds / self.measured_s - 1

    def at_scale(
        self, replicas: Sequence[int] = REPLICAS, algorithm: Algorithm = ring
    ) -> tuple[Projection, ...]:
        """Projects the measured step with the best cap to other numbers of replicas.

        Args:
          replicas: the numbers of replicas.
          algorithm: the all-reduce: `ring` or `tree` of `fddp.analysis.tuning.scaling`, or a
            function of (hop, bytes, replicas) that returns seconds.

        Returns:
          A projection for each number of replicas.

        Raises:
          ValueError: nothing was measured, or on a single replica, so the link is unknown.
        """
        if self.link is None or self.idle_s is None:
            raise ValueError("at_scale projects a measured step: call fddp.tune without a target.")
        hop = hop_of(self.link, self.replicas, algorithm)
        best = self.best
        options = {"pace": self.pace, "replicas": replicas, "algorithm": algorithm}
        updates = (*best.updates[:-1], best.updates[-1] + self.idle_s)
        return project(best.stages, best.nbytes, hop, updates=updates, **options)

    def __str__(self) -> str:
        rows = [("schedule", "cap MiB", "buckets", "ms a step", "ms exposed", "")]
        for x in self.candidates:
            ms = f"{1e3 * x.seconds:.2f}", f"{1e3 * x.exposed_s:.2f}"
            mark = "best" * (x == self.best)
            rows.append(
                (x.schedule, cap_text(x.bucket_cap_mb), f"{len(x.plan.buckets)}", *ms, mark)
            )
        cap = cap_text(self.bucket_cap_mb)
        last = f"schedule={self.schedule!r}, bucket_cap_mb={cap}"
        return "\n".join([self.where, *table(rows), *self._measured(), last])

    _repr_html_ = preformatted

    def _measured(self) -> list[str]:
        """Describes the measurements; empty for a target."""
        if self.pace is None or self.measured_s is None:
            return []
        best = f"the best staged step takes {1e3 * self.measured_s:.1f} ms"
        lines = [
            f"an all-reduce takes {self.link}",
            f"while both run, computation has {self.pace.compute:.0%} of its speed, and traffic "
            f"{self.pace.communication:.0%}",
            f"{best}, predicted {self.deviation:+.1%}",
        ]
        if self.eager_s is not None:
            lines.append(f"the eager step takes {1e3 * self.eager_s:.1f} ms")
        if self.replicas == 1:
            lines.append("one replica sends nothing, so every cap fits: use mpiexec -n 2")
        return lines


def cap_text(cap: Caps) -> str:
    """Formats a cap, or the list of caps of successive buckets, as `train_step` takes it."""
    if isinstance(cap, int | float):
        return f"{cap:g}"
    return f"[{', '.join(map(cap_text, cap))}]"
