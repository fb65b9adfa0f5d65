"""The log of merges: one JSON line per merge, from which `fddp.replay_islands` repeats a run.

An asynchronous run depends on the order of arrivals. The order of its merges determines all else.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple


class Merged(NamedTuple):
    """A merge, with its contributions in the order of addition."""

    version: int
    """Version of its result."""
    islands: tuple[int, ...]
    began: tuple[int, ...]
    """Version that each island trained from."""
    weights: tuple[float, ...]
    """Weight of each contribution, before the discount."""
    steps: tuple[int, ...]
    """Total number of steps of each island."""


class Meeting(NamedTuple):
    """A meeting, at which all islands receive one version."""

    met: int


# A line of the log.
Line = Merged | Meeting


def serialize(line: Line) -> str:
    """Serializes a line of the log.

    >>> serialize(Merged(3, (2, 0), (1, 2), (8.0, 8.0), (4, 6)))
    '{"version": 3, "islands": [2, 0], "began": [1, 2], "weights": [8.0, 8.0], "steps": [4, 6]}'
    """
    return json.dumps(line._asdict())


def read_log(log: str | Path | Iterable[Line]) -> list[Line]:
    """Reads the lines of a log file; parsed lines pass unchanged."""
    if not isinstance(log, str | Path):
        return list(log)
    return [
        _read(text, f"{log}, line {number}")
        for number, text in enumerate(Path(log).read_text().splitlines(), 1)
    ]


def _read(text: str, where: str) -> Line:
    try:
        fields = json.loads(text)
        if fields.keys() == {"met"}:
            return Meeting(fields["met"])
        lists = {name: tuple(x) for name, x in fields.items() if name != "version"}
        return Merged(fields["version"], **lists)
    except (ValueError, TypeError, AttributeError, KeyError) as error:
        raise ValueError(f"{where} is not a line of a log of merges ({error}): {text!r}.") from None
