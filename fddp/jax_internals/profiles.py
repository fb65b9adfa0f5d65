"""Reads the files of the profiler."""

import warnings
from pathlib import Path
from typing import Any

import jax


def read_profile(path: Path) -> list[tuple[str, str, float, float, dict[str, Any]]]:
    """Lists the events: name of the plane, name, start and length in seconds, and stats.

    Relies on the attributes of events, of whose stats' type Python 3.12 warns with jaxlib 0.11.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "builtin type .* has no __module__ attribute")
        return [
            (plane.name, x.name, x.start_ns / 1e9, x.duration_ns / 1e9, dict(x.stats))
            for plane in jax.profiler.ProfileData.from_file(str(path)).planes
            for line in plane.lines
            for x in line.events
        ]
