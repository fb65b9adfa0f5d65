"""Files that the profiler has written."""

import warnings
from pathlib import Path
from typing import Any, NamedTuple

import jax


class Event(NamedTuple):
    """Something that the profiler saw."""

    name: str
    start_ns: float
    duration_ns: float
    stats: dict[str, Any]
    """All else that the profiler tells of it."""


class Plane(NamedTuple):
    """The place of events: the host, or an accelerator."""

    name: str
    events: tuple[Event, ...]


def read_profile(path: str | Path) -> tuple[Plane, ...]:
    """Reads the file that `jax.profiler.trace` has written. Relies on the attributes of planes, lines and events.

    jaxlib 0.11 makes the type of an event's stats when it first needs it, and leaves its module out. Of that Python
    3.12 warns, and where warnings are errors jaxlib ends the process: this one must be none.

    Args:
      path: the file, `*.xplane.pb`.

    Returns:
      Its planes.
    """

    def event(seen: Any) -> Event:
        return Event(seen.name, seen.start_ns, seen.duration_ns, dict(seen.stats))

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "builtin type .* has no __module__ attribute", DeprecationWarning)
        return tuple(
            Plane(plane.name, tuple(event(seen) for line in plane.lines for seen in line.events))
            for plane in jax.profiler.ProfileData.from_file(str(path)).planes
        )
