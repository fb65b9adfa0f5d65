"""Profiles a step of one program with XLA's profiler, and reads the profile as spans.

Each event with an HLO operation is a span; it is communication if the operation is a collective.
Loops and calls are skipped, since the operations inside them have their own events.
"""

import re
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jax

from fddp.jax_internals import Event, Plane, read_profile
from fddp.schedules import Span, Timeline

STEP = "fddp step"
# The names in HLO, mpi4jax, NCCL and JAX. Hooks also gather and scatter, and a loss may use any.
COLLECTIVE = re.compile(
    r"all[-_]?(reduce|gather|to[-_]?all)|reduce[-_]?scatter|SendRecv|psum"
    r"|\bp(max|min|permute|broadcast)|collective[-_]?(permute|broadcast)",
    re.IGNORECASE,
)
CONTAINER = re.compile(r"(while|call|conditional)(\.|$)")


def profiled(
    run: Callable[[Any], Any], batches: Iterable[Any]
) -> tuple[tuple[tuple[float, float], Timeline], ...]:
    """Runs a step on each batch under the profiler, and waits for the outputs of `run`.

    Returns the (start, end) of each step in seconds, and the timeline of this process's first
    device.
    """
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # Python's calls would fill the trace and slow the step
    with tempfile.TemporaryDirectory(prefix="fddp-profile-") as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            for batch in batches:
                with jax.profiler.TraceAnnotation(STEP):
                    jax.block_until_ready(run(batch))
        (path,) = Path(folder).rglob("*.xplane.pb")
        return read_steps(read_profile(path))


def read_steps(planes: Iterable[Plane]) -> tuple[tuple[tuple[float, float], Timeline], ...]:
    """Returns the steps of a profile, like `profiled`.

    Each accelerator has its own plane. All CPU devices share the host's plane, and their events
    differ by ordinal.
    """
    windows: list[tuple[float, float]] = []
    spans = defaultdict[tuple[bool, str], list[Span]](list)
    for plane in planes:
        on_host = not plane.name.startswith("/device:")
        for event in plane.events:
            if event.duration_ns <= 0:
                continue
            if event.name == STEP:
                windows.append(_times(event))
            elif "hlo_op" in event.stats and not CONTAINER.match(event.name):
                device = plane.name
                if on_host:
                    device = str(event.stats.get("device_ordinal", 0))
                spans[on_host, device].append(_span(event, str(event.stats["hlo_op"])))
    ordered = list[Span]()
    if spans:
        ordered = sorted(spans[min(spans)], key=lambda span: span.start)
    steps = list[tuple[tuple[float, float], Timeline]]()
    for start, end in sorted(windows):
        inside = tuple(span for span in ordered if start <= span.start < end)
        steps.append(((start, end), Timeline(inside)))
    return tuple(steps)


def _span(event: Event, operation: str) -> Span:
    kind = "compute"
    if COLLECTIVE.search(event.name) or COLLECTIVE.search(operation):
        kind = "communication"
    return Span(kind, operation, *_times(event))


def _times(event: Event) -> tuple[float, float]:
    return event.start_ns / 1e9, (event.start_ns + event.duration_ns) / 1e9
