"""Reads the files of the profiler."""

import warnings
from pathlib import Path
from typing import Any, NamedTuple

import jax


class Event(NamedTuple):
    """An event in a profile."""

    name: str
    start_ns: float
    duration_ns: float
    stats: dict[str, Any]
    """The remaining attributes, by name."""


class Plane(NamedTuple):
    """The events of the host or of an accelerator."""

    name: str
    events: tuple[Event, ...]


def read_profile(path: str | Path) -> tuple[Plane, ...]:
    """Reads a file `*.xplane.pb` of `jax.profiler.trace`.

    Relies on the attributes of planes, lines and events. On first use jaxlib 0.11 makes a type
    without `__module__` for an event's stats, and Python 3.12 warns. The warning is suppressed: as
    an error it would end the process.
    """

    def event(x: Any) -> Event:
        return Event(x.name, x.start_ns, x.duration_ns, dict(x.stats))

    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", "builtin type .* has no __module__ attribute", DeprecationWarning
        )
        return tuple(
            Plane(plane.name, tuple(event(x) for line in plane.lines for x in line.events))
            for plane in jax.profiler.ProfileData.from_file(str(path)).planes
        )
