"""Runs XLA's profiler on a step that is one program, and reads its operations and all-reduces as spans.

An event of the profile that names an HLO operation is a span; it is communication if that operation is a collective.
Operations that only contain others (loops, calls) are passed over: what runs inside them has events of its own.
"""

import re
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jax

from fddp.jax_internals import Event, Plane, read_profile
from fddp.schedules import Span, Timeline

STEP = "fddp step"
# As HLO, mpi4jax, NCCL and JAX name them; hooks gather and scatter too, and a loss sends what it likes.
COLLECTIVE = re.compile(
    r"all[-_]?(reduce|gather|to[-_]?all)|reduce[-_]?scatter|SendRecv|psum"
    r"|\bp(max|min|permute|broadcast)|collective[-_]?(permute|broadcast)",
    re.IGNORECASE,
)
CONTAINER = re.compile(r"(while|call|conditional)(\.|$)")


def profiled(run: Callable[[Any], Any], batches: Iterable[Any]) -> tuple[tuple[tuple[float, float], Timeline], ...]:
    """Runs steps under the profiler.

    Args:
      run: runs a step on a batch; what it returns is waited for.
      batches: one for each step.

    Returns:
      For each step its start and end in seconds, and what this process's first device did in between.
    """
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # Python's own calls would fill the trace and slow the step
    with tempfile.TemporaryDirectory(prefix="fddp-profile-") as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            for batch in batches:
                with jax.profiler.TraceAnnotation(STEP):
                    jax.block_until_ready(run(batch))
        (path,) = Path(folder).rglob("*.xplane.pb")
        return read_steps(read_profile(path))


def read_steps(planes: Iterable[Plane]) -> tuple[tuple[tuple[float, float], Timeline], ...]:
    """Finds the steps in a profile.

    An accelerator has a plane of its own; what CPU devices do is on the host's plane, told apart by their ordinals.

    Args:
      planes: of the profile.

    Returns:
      As for `profiled`.
    """
    windows: list[tuple[float, float]] = []
    spans: dict[tuple[bool, str], list[Span]] = {}
    for plane in planes:
        for event in (event for event in plane.events if event.duration_ns > 0):
            if event.name == STEP:
                windows.append(_times(event))
            elif "hlo_op" in event.stats and not CONTAINER.match(event.name):
                on_host = not plane.name.startswith("/device:")
                device = str(event.stats.get("device_ordinal", 0)) if on_host else plane.name
                spans.setdefault((on_host, device), []).append(_span(event, str(event.stats["hlo_op"])))
    mine = sorted(spans[min(spans)], key=lambda span: span.start) if spans else []
    return tuple(
        ((start, end), Timeline(tuple(span for span in mine if start <= span.start < end)))
        for start, end in sorted(windows)
    )


def _span(event: Event, operation: str) -> Span:
    sent = COLLECTIVE.search(event.name) or COLLECTIVE.search(operation)
    return Span("communication" if sent else "compute", operation, *_times(event))


def _times(event: Event) -> tuple[float, float]:
    return event.start_ns / 1e9, (event.start_ns + event.duration_ns) / 1e9
