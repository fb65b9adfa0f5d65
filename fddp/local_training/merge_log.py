"""The written order of merges: a line of JSON for each, with which a run can be made again.

An asynchronous run depends on who came first. With the order of its merges all else is determined.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple


class Merged(NamedTuple):
    """One merge; the contributions in the order in which they were added."""

    version: int
    """The version that it made."""
    islands: tuple[int, ...]
    began: tuple[int, ...]
    """The version that each island began from."""
    weights: tuple[float, ...]
    """The weight of each contribution, before it is discounted by its age."""
    steps: tuple[int, ...]
    """The number of steps that each island had made in all."""


class Meeting(NamedTuple):
    """A meeting: all islands took this version."""

    met: int


# A line of the log.
Line = Merged | Meeting


def written(line: Line) -> str:
    """Writes a line of the log.

    Args:
      line: a merge, or a meeting.

    Returns:
      JSON.

    Example:
      >>> written(Merged(3, (2, 0), (1, 2), (8.0, 8.0), (4, 6)))
      '{"version": 3, "islands": [2, 0], "began": [1, 2], "weights": [8.0, 8.0], "steps": [4, 6]}'
    """
    return json.dumps(line._asdict())


def read_log(log: str | Path | Iterable[Line]) -> list[Line]:
    """Reads a log.

    Args:
      log: its file, or its lines.

    Returns:
      The lines.

    Raises:
      ValueError: a line is none.
    """
    if not isinstance(log, str | Path):
        return list(log)
    return [_read(text, f"{log}, line {number}") for number, text in enumerate(Path(log).read_text().splitlines(), 1)]


def _read(text: str, where: str) -> Line:
    try:
        fields = json.loads(text)
        if fields.keys() == {"met"}:
            return Meeting(fields["met"])
        lists = {name: tuple(x) for name, x in fields.items() if name != "version"}
        return Merged(fields["version"], **lists)
    except (ValueError, TypeError, AttributeError, KeyError) as error:
        raise ValueError(f"{where} is no line of a log of merges ({error}): {text!r}.") from None
