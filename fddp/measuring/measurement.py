"""Measures the shares of computation, communication and idleness in a step's time.

Source: the columns of Li et al. (VLDB 2020), Fig. 6; the temporal breakdown of Holistic Trace
Analysis.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from fddp.comm import verify
from fddp.jax_internals import without_context_mesh
from fddp.jaxpr import refuse_deleted
from fddp.measuring.plots import draw, figure
from fddp.measuring.profile import profiled
from fddp.schedules import Span, Timeline
from fddp.step import TrainState, check_state, check_step
from fddp.wording import check_has, preformatted, table

if TYPE_CHECKING:  # a step measures itself
    from fddp.training import TrainStep

ROWS = {"step": 0, "compute": 1, "update": 1, "communication": 2}  # by kind of span
NAMES = ("step", "compute", "communication")


@dataclass(frozen=True)
class MeasuredStep:
    """A step from its call to its result; times in seconds of the spans' clock."""

    start: float
    end: float
    timeline: Timeline

    @property
    def seconds(self) -> float:
        return self.end - self.start

    @property
    def idle(self) -> float:
        """Seconds without computation or communication: Python, row placement, launch delays."""
        return self.seconds - self.timeline.computing - self.timeline.exposed


@dataclass(frozen=True)
class Measurement:
    """The times of this process's steps; compute, non-compute and idle add up to 100 %."""

    steps: tuple[MeasuredStep, ...]
    """The measured steps."""

    @property
    def step_ms(self) -> float:
        """Median time of a step, in milliseconds."""
        return 1e3 * median(step.seconds for step in self.steps)

    @property
    def compute_percent(self) -> float:
        """Share of the time with computation, overlapped by communication or not."""
        return self._percent(self._sum("computing"), self._seconds)

    @property
    def non_compute_percent(self) -> float:
        """Share of the time with communication and without computation: exposed communication."""
        return self._percent(self._sum("exposed"), self._seconds)

    @property
    def idle_percent(self) -> float:
        """Share of the time without computation or communication."""
        return self._percent(sum(step.idle for step in self.steps), self._seconds)

    @property
    def overlap_percent(self) -> float:
        """Share of the communication that computation overlaps; 0 without communication."""
        return self._percent(self._sum("overlap"), self._sum("communicating"))

    @property
    def overhead_percent(self) -> float:
        """Exposed communication, as a share of the steps' time without it."""
        return self._percent(self._sum("exposed"), self._seconds - self._sum("exposed"))

    @property
    def all_reduces(self) -> int:
        """Number of messages of a step, including those skipped because no rank needs them."""
        # In an eager step two messages may share a name: the end of the last step's, and its own.
        names = [{span.name for span in step.timeline.communication} for step in self.steps]
        return max(map(len, names))

    @property
    def all_reduce_ms(self) -> float:
        """Mean milliseconds of a step with an all-reduce pending."""
        return 1e3 * self._sum("communicating") / len(self.steps)

    def trace(self, path: str | Path) -> Path:
        """Writes the steps as a Chrome trace, for ui.perfetto.dev or chrome://tracing.

        Args:
          path: the output file.

        Returns:
          The path.
        """
        zero = min(step.start for step in self.steps)
        spans = list[Span]()
        for k, step in enumerate(self.steps):
            spans += [Span("step", f"step {k}", step.start, step.end), *step.timeline.spans]
        events = list[dict[str, Any]]()
        for tid, row in enumerate(NAMES):
            events.append({"ph": "M", "tid": tid, "name": "thread_name", "args": {"name": row}})
        for span in spans:
            event = {"ph": "X", "tid": ROWS[span.kind], "cat": span.kind, "name": span.name}
            event |= {"ts": 1e6 * (span.start - zero), "dur": 1e6 * span.seconds}  # microseconds
            events.append(event | {"args": {"bytes": span.nbytes}})
        trace = {"traceEvents": [event | {"pid": 0} for event in events], "displayTimeUnit": "ms"}
        Path(path).write_text(json.dumps(trace))
        return Path(path)

    def picture(self, path: str | Path) -> Path:
        """Draws the step of median duration; needs matplotlib.

        Args:
          path: the output file; its suffix sets the format: ".png".

        Returns:
          The path.
        """
        typical = sorted(self.steps, key=lambda step: step.seconds)[len(self.steps) // 2]
        sheet, (axis,) = figure(1)
        draw(axis, {f"{1e3 * typical.seconds:.1f} ms": typical.timeline})
        axis.set_title("computing (above) and sending (below)", loc="left")
        sheet.savefig(path, dpi=120)
        return Path(path)

    def __str__(self) -> str:
        overhead = self.overhead_percent
        shares = (
            ("compute", self.compute_percent, "something is computed"),
            ("non-compute", self.non_compute_percent, "something is sent, nothing computed"),
            ("idle", self.idle_percent, "neither"),
            ("overlap", self.overlap_percent, "of the communication lies under computation"),
            ("communication overhead", overhead, "more time than with all of it there"),
        )
        rows = [(name, f"{share:6.1f}%", meaning) for name, share, meaning in shares]
        rows.append(("all-reduces", f"{self.all_reduces:6}", f"{self.all_reduce_ms:.2f} ms a step"))
        head = f"{len(self.steps)} steps, {self.step_ms:.2f} ms each (median)"
        return "\n".join([head, *table(rows)])

    _repr_html_ = preformatted

    @property
    def _seconds(self) -> float:
        return sum(step.seconds for step in self.steps)

    def _sum(self, quantity: str) -> float:
        return sum(getattr(step.timeline, quantity) for step in self.steps)

    @staticmethod
    def _percent(part: float, total: float) -> float:
        if not total:
            return 0.0
        return 100.0 * part / total


def measure(step: "TrainStep", state: TrainState, batches: Iterable[Any]) -> Measurement:
    """Runs a step on each batch and measures its computation, communication and idle time.

    The first batch runs an additional time, to compile. A schedule of several programs records its
    own timeline. A step of one program runs under XLA's profiler, which makes it a little slower.

    Args:
      step: from `train_step`.
      state: from `step.init` or the last step; it is copied, and the trained state is discarded.
      batches: as for steps; the same number on every rank.

    Returns:
      The measurement; `print` shows a table, `.trace(path)` writes a file for Perfetto.

    Raises:
      ValueError: no batches, or different numbers of batches on the ranks.
    """
    check_step("fddp.measure", step)
    check_has("__iter__", "fddp.measure: batches", batches, "a sequence of batches")
    batches = list(batches)
    count = [f"{len(batches)} batches"]
    verify(step.group, "state or batches", lambda: check_state(state), lambda _: count)
    if not batches:
        raise ValueError("there is nothing to measure: batches is empty.")
    refuse_deleted(state)
    current = without_context_mesh(jax.jit(partial(jax.tree.map, jnp.copy)))(state)

    def run(batch: PyTree) -> Any:
        nonlocal current
        current, info = step(current, batch)
        # A step of several programs returns at its end, or leaves pending work to the next (eager).
        if step.settled.is_one_program:
            return current, info
        return info

    jax.block_until_ready(run(batches[0]))
    timeline = step.timeline
    if step.settled.is_one_program:
        timeline = None
    return watch(run, batches, timeline)


def watch(
    run: Callable[[Any], Any], batches: Sequence[Any], timeline: Callable[[], Timeline] | None
) -> Measurement:
    """Runs any step on each batch, waits for the outputs of `run`, and measures the time.

    `timeline` returns the last step's timeline; if it is None, XLA's profiler records them all.
    """
    if timeline is None:
        return Measurement(
            tuple(MeasuredStep(*window, line) for window, line in profiled(run, batches))
        )
    steps: list[MeasuredStep] = []
    for batch in batches:
        start = perf_counter()
        jax.block_until_ready(run(batch))
        steps.append(MeasuredStep(start, perf_counter(), timeline()))
    return Measurement(tuple(steps))
