"""Measures the shares of computation, communication and idleness in a step's time.

Source: the columns of Li et al. (VLDB 2020), Fig. 6; `DDPLoggingData` in PyTorch's `logger.cpp`.
"""

import re
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from pathlib import Path
from statistics import median
from time import monotonic
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from fddp.buckets import whole_forms
from fddp.comm import verify
from fddp.jax_internals import read_profile, without_context_mesh
from fddp.jaxpr import refuse_deleted
from fddp.step import TrainState, check_state, check_step
from fddp.step.schedules import Span, Timeline
from fddp.training import TrainStep
from fddp.wording import check_has, preformatted, table

STEP = "fddp step"
# The names in HLO, mpi4jax, NCCL and JAX. Hooks also gather and scatter, and a loss may use any.
COLLECTIVE = re.compile(
    r"all[-_]?(reduce|gather|to[-_]?all)|reduce[-_]?scatter|SendRecv|psum"
    r"|\bp(max|min|permute|broadcast)|collective[-_]?(permute|broadcast)",
    re.IGNORECASE,
)
CONTAINER = re.compile(r"(while|call|conditional)(\.|$)")


class MeasuredStep(NamedTuple):
    """A step from its call to its result."""

    seconds: float
    timeline: Timeline


@dataclass(frozen=True)
class Measurement:
    """The times of this process's steps; compute, non-compute and idle add up to 100 %."""

    steps: tuple[MeasuredStep, ...]
    """The measured steps."""
    facts: dict[str, Any]
    """What DDP logs of a step (`_get_ddp_logging_data`) and does not take as an option, by DDP's
    names: `world_size`, `backend_name`, `bucket_sizes` in bytes and launch order,
    `grad_ready_order`, `num_parameter_tensors`, `total_parameter_size_bytes`. And of this replica:
    `held` and `whole`, the bytes of each field of its state, in shards and without; `sent`, the
    bytes of the last step's messages in both directions; `skipped_steps`; `watchers_said`, the last
    finding of the watchers of all ranks."""

    @property
    def step_ms(self) -> float:
        """Median time of a step, in milliseconds."""
        return 1e3 * median(step.seconds for step in self.steps)

    @property
    def compute_percent(self) -> float:
        """Share of the time with computation, overlapped by communication or not."""
        return self._percent(self._sum("computing"))

    @property
    def non_compute_percent(self) -> float:
        """Share of the time with communication and without computation: exposed communication."""
        return self._percent(self._sum("exposed"))

    @property
    def idle_percent(self) -> float:
        """Share of the time without both: in Python, placing rows, launching programs."""
        return 100.0 - self.compute_percent - self.non_compute_percent

    @property
    def overlap_percent(self) -> float:
        """Share of the communication that computation overlaps; 0 without communication."""
        return self._percent(self._sum("overlap"), self._sum("communicating"))

    @property
    def all_reduces(self) -> int:
        """Number of messages of a step, including those skipped because no rank needs them."""
        # The sums in the rounds of a loop share a name.
        return max(len({x.name for x in step.timeline.communication}) for step in self.steps)

    def __str__(self) -> str:
        shares = (
            ("compute", self.compute_percent, "something is computed"),
            ("non-compute", self.non_compute_percent, "something is sent, nothing computed"),
            ("idle", self.idle_percent, "neither"),
            ("overlap", self.overlap_percent, "of the communication lies under computation"),
        )
        rows = [(name, f"{share:6.1f}%", meaning) for name, share, meaning in shares]
        rows.append(("all-reduces", f"{self.all_reduces:6}", "in a step"))
        head = f"{len(self.steps)} steps, {self.step_ms:.2f} ms each (median)"
        facts = table([(name, f"{x!s:.80}" or "-") for name, x in self.facts.items()])
        return "\n".join([head, *table(rows), *facts])

    _repr_html_ = preformatted

    def _sum(self, quantity: str) -> float:
        return sum(getattr(step.timeline, quantity) for step in self.steps)

    def _percent(self, part: float, total: float | None = None) -> float:
        total = sum(step.seconds for step in self.steps) if total is None else total
        return 100.0 * part / total if total else 0.0


def measure(step: TrainStep, state: TrainState, batches: Iterable[Any]) -> Measurement:
    """Runs a step on each batch and measures its computation, communication and idle time.

    The first batch runs an additional time, to compile. The times are those of `step.timeline()`.
    Where XLA sends the messages, steps run under its profiler, which makes them a little slower.

    Args:
      step: from `train_step`.
      state: from `step.init` or the last step; it is copied, and the trained state is discarded.
      batches: as for steps; the same number on every rank.

    Returns:
      The measurement; `print` shows a table, and `.facts` holds what DDP logs.

    Raises:
      ValueError: no batches, or different numbers of batches on the ranks.
    """
    check_step("fddp.measure", step)
    check_has("__iter__", "fddp.measure: batches", batches, "a sequence of batches")
    batches = list(batches)
    described = lambda _: [f"{len(batches)} batches"]  # noqa: E731
    verify(step.group, "state or batches", lambda: check_state(state), described)
    if not batches:
        raise ValueError("there is nothing to measure: batches is empty.")
    refuse_deleted(state)
    current = without_context_mesh(jax.jit(partial(jax.tree.map, jnp.copy)))(state)
    sent: Any = None

    def run(batch: PyTree) -> None:
        nonlocal current, sent
        current, info = step(current, batch)
        sent = info.sent
        jax.block_until_ready((current, info))

    run(batches[0])
    if step.settled.runner.timeline is None:
        return Measurement(profiled(run, batches), _facts(step, sent))
    steps = list[MeasuredStep]()
    for batch in batches:
        start = monotonic()
        run(batch)
        end = monotonic()
        line = step.timeline()
        if step.settled.is_one_program:  # behind the last message it computes to its end
            last = Span("update", "end", max(start, line.end), end)
            line = replace(line, spans=(*line.spans, last))
        steps.append(MeasuredStep(end - start, line))
    return Measurement(tuple(steps), _facts(step, sent))


def _facts(step: TrainStep, sent: Any) -> dict[str, Any]:
    plan = step.plan
    return {
        "world_size": step.group.size,
        "backend_name": step.group.backend,
        "bucket_sizes": tuple(bucket.nbytes for bucket in plan.buckets),
        "grad_ready_order": tuple(name for bucket in plan.buckets for name in bucket.names),
        "num_parameter_tensors": len(plan.leaves),
        "total_parameter_size_bytes": sum(leaf.nbytes for leaf in plan.leaves),
        "held": bytes_of(step.local_form),
        "whole": bytes_of(whole_forms(step.local_form)),
        "sent": int(np.asarray(sent).sum(dtype=np.uint64)),
        "skipped_steps": step.skips.count,
        "watchers_said": step.group.journal.finding().words,
    }


def bytes_of(state: TrainState) -> dict[str, int]:
    return {
        name: sum(prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(tree))
        for name, tree in state._asdict().items()
    }


### XLA's profile of a step


def profiled(run: Callable[[Any], None], batches: Iterable[Any]) -> tuple[MeasuredStep, ...]:
    """Runs a step, which waits for its outputs, on each batch under the profiler."""
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # Python's calls would fill the trace and slow the step
    with tempfile.TemporaryDirectory(prefix="fddp-profile-") as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            for batch in batches:
                with jax.profiler.TraceAnnotation(STEP):
                    run(batch)
        (path,) = Path(folder).rglob("*.xplane.pb")
        return read_steps(read_profile(path))


def read_steps(events: Iterable[Any]) -> tuple[MeasuredStep, ...]:
    """Returns the steps of a profile, from the events of `read_profile`.

    Each accelerator has its own plane. All CPU devices share the host's plane, and their events
    differ by ordinal.
    """
    windows = list[Span]()
    spans = defaultdict[tuple[bool, str], list[Span]](list)
    for plane, name, start, seconds, stats in events:
        if name == STEP:
            windows.append(Span("step", STEP, start, start + seconds))
        elif "hlo_op" in stats and seconds and not CONTAINER.match(name):
            on_host = not plane.startswith("/device:")
            device = str(stats.get("device_ordinal", 0)) if on_host else plane
            kind = "communication" if COLLECTIVE.search(f"{name} {stats['hlo_op']}") else "compute"
            spans[on_host, device].append(Span(kind, str(stats["hlo_op"]), start, start + seconds))
    of_device = spans[min(spans)] if spans else []
    windows.sort(key=lambda step: step.start)
    return tuple(
        MeasuredStep(w.seconds, Timeline(tuple(x for x in of_device if w.start <= x.start < w.end)))
        for w in windows
    )
