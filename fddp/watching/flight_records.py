"""Tells what the ranks of a job sent last before it ended, and where they first differ: `python -m fddp flight`.

Source: `fr_trace`, which reads the dumps of PyTorch's flight recorder.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from types import NoneType
from typing import Any

from fddp.wording import printable

RECORD = {"rank": int, "size": int, "why": str, "steps": int, "doing": str, "began": (float, int), "messages": list}
MESSAGE = {"number": int, "step": int, "name": str, "nbytes": int, "took_s": (float, int, NoneType)}
NAMED = 8  # ranks without a record


def read_flights(paths: Sequence[str | Path]) -> list[dict[str, Any]]:
    """Reads the records that the watchers wrote when a job ended.

    A folder that was kept may hold records of earlier jobs, of ranks that wrote none when the last one ended.

    Args:
      paths: files, or folders of `rank_*.json`.

    Returns:
      A record for each rank of the newest job, in order.

    Raises:
      ValueError: there is none, or a file is no such record.
    """
    inside = [sorted(path.glob("rank_*.json")) if path.is_dir() else [path] for path in map(Path, paths)]
    records = [_record(file) for files in inside for file in files]
    if not records:
        raise ValueError(f"no record rank_*.json in {', '.join(map(str, paths)) or 'nothing'}.")
    # A job is known by the time at which it began, by rank 0's clock.
    newest = max(record["began"] for record in records)
    newest_job = [record for record in records if record["began"] == newest]
    return sorted(newest_job, key=lambda record: record["rank"])


def told(records: Sequence[dict[str, Any]]) -> str:
    """Tells in words what the records say together.

    Args:
      records: from `read_flights`.

    Returns:
      Why the job ended, where each rank was, and the first message in which they differ.

    Example:
      >>> sent = lambda name: [{"number": 0, "step": 1, "name": name, "nbytes": 8, "began_s": -1.0, "took_s": 0.5}]
      >>> one = {"size": 2, "why": "rank 1 died", "steps": 1, "doing": "step"}
      >>> print(told([one | {"rank": 0, "messages": sent("bucket 0")}, one | {"rank": 1, "messages": sent("tail")}]))
      the job ended: rank 1 died
      rank 0: 1 steps, step; last message 0 of step 1: bucket 0, 8 bytes, in 500.0 ms
      rank 1: 1 steps, step; last message 0 of step 1: tail, 8 bytes, in 500.0 ms
      first difference, in message 0: rank 0 bucket 0, 8 bytes; rank 1 tail, 8 bytes
    """
    return "\n".join(map(printable, _lines(records)))


def _lines(records: Sequence[dict[str, Any]]) -> Iterator[str]:
    yield f"the job ended: {records[0]['why']}"
    for record in records:
        last = record["messages"][-1:]
        sent = [f"; last message {one['number']} of step {one['step']}: {_said(one)}, {_took(one)}" for one in last]
        yield f"rank {record['rank']}: {record['steps']} steps, {record['doing']}{''.join(sent) or '; no message'}"
    present = {record["rank"] for record in records}
    missing = [*islice((rank for rank in range(records[0]["size"]) if rank not in present), NAMED + 1)]
    if missing:
        yield f"no record of rank {', '.join(map(str, missing[:NAMED]))}{', …' * (len(missing) > NAMED)}"
    yield _difference(records)


def _difference(records: Sequence[dict[str, Any]]) -> str:
    """The first message that not all ranks sent alike, of those that are kept."""
    rings = {record["rank"]: {one["number"]: one for one in record["messages"]} for record in records}
    kept = max((min(ring) for ring in rings.values() if ring), default=0)
    for number in sorted({number for ring in rings.values() for number in ring if number >= kept}):
        sent = {rank: ring.get(number) for rank, ring in rings.items()}
        words = {rank: _said(one) if one else "not sent" for rank, one in sent.items()}
        if len(set(words.values())) > 1:
            return f"first difference, in message {number}: " + "; ".join(f"rank {r} {w}" for r, w in words.items())
        open_ = [rank for rank, one in sent.items() if one and one["took_s"] is None]
        if open_:
            return f"message {number}, {words[open_[0]]}, did not come back on rank {', '.join(map(str, open_))}"
    return "no difference among the messages that are kept"


def _said(one: dict[str, Any]) -> str:
    return f"{one['name']}, {one['nbytes']} bytes"


def _took(one: dict[str, Any]) -> str:
    return "not back" if one["took_s"] is None else f"in {1e3 * one['took_s']:.1f} ms"


def _record(file: Path) -> dict[str, Any]:
    try:
        record = json.loads(file.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{file} is no record of a rank: {error}.") from None
    if isinstance(record, dict):
        record.setdefault("began", 0.0)  # fddp 0.2 did not write it down
    if not _has(record, RECORD) or not all(_has(one, MESSAGE) for one in record["messages"]):
        raise ValueError(f"{file} is no record of a rank.")
    return record


def _has(record: Any, fields: Mapping[str, Any]) -> bool:
    """Whether a value is a mapping with fields of these types."""
    return isinstance(record, dict) and all(isinstance(record.get(name, ...), kind) for name, kind in fields.items())
