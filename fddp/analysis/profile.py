"""Profiles a step of one program with XLA's profiler, and reads the profile as spans.

Each event with an HLO operation is a span; it is communication if the operation is a collective.
Loops and calls are skipped, since the operations inside them have their own events.
"""

import re
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import jax

from fddp.jax_internals import Event, Plane, read_profile
from fddp.program import Span, Timeline

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


def read_steps(planes: Iterable[Plane]) -> tuple[MeasuredStep, ...]:
    """Returns the steps of a profile.

    Each accelerator has its own plane. All CPU devices share the host's plane, and their events
    differ by ordinal.
    """
    windows = list[Span]()
    spans = defaultdict[tuple[bool, str], list[Span]](list)
    for plane in planes:
        on_host = not plane.name.startswith("/device:")
        for event in plane.events:
            if event.duration_ns <= 0:
                continue
            if event.name == STEP:
                windows.append(_span(event, "step"))
            elif "hlo_op" in event.stats and not CONTAINER.match(event.name):
                device = str(event.stats.get("device_ordinal", 0)) if on_host else plane.name
                named = f"{event.name} {event.stats['hlo_op']}"
                kind = "communication" if COLLECTIVE.search(named) else "compute"
                spans[on_host, device].append(_span(event, kind))
    of_device = spans[min(spans)] if spans else []
    windows.sort(key=lambda step: step.start)
    return tuple(
        MeasuredStep(w.seconds, Timeline(tuple(x for x in of_device if w.start <= x.start < w.end)))
        for w in windows
    )


def _span(event: Event, kind: str) -> Span:
    end_ns = event.start_ns + event.duration_ns
    name = str(event.stats.get("hlo_op", event.name))
    return Span(kind, name, event.start_ns / 1e9, end_ns / 1e9)
