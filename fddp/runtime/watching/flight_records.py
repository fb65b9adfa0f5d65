"""The last messages of all ranks before a job ended, and their first difference.

`python -m fddp flight` prints them.

Source: `fr_trace`, which reads the dumps of PyTorch's flight recorder.
"""

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from fddp.wording import printable

NAMED = 8  # ranks without a record


def read_flights(paths: Sequence[str | Path]) -> list[dict[str, Any]]:
    """Reads the watchers' records of the newest job, in files or folders, in order of rank."""
    records = list[dict[str, Any]]()
    for path in map(Path, paths):
        files = [path]
        if path.is_dir():
            files = sorted(path.glob("rank_*.json"))
        records += map(_record, files)
    if not records:
        raise ValueError(f"no record rank_*.json in {', '.join(map(str, paths)) or 'nothing'}.")
    # The start of a job, by rank 0's clock, identifies it.
    newest = max(record["began"] for record in records)
    newest_job = [record for record in records if record["began"] == newest]
    return sorted(newest_job, key=lambda record: record["rank"])


def flight_text(records: Sequence[dict[str, Any]]) -> str:
    """Describes the end of the job, the place of each rank, and the first message that differs."""
    return "\n".join(map(printable, _lines(records)))


def _lines(records: Sequence[dict[str, Any]]) -> Iterator[str]:
    yield f"the job ended: {records[0]['why']}"
    for record in records:
        text = "no message"
        for message in record["messages"][-1:]:
            text = f"last message {message['number']} of step {message['step']}: {_said(message)}"
            took_s = message["took_s"]
            text += ", not back" if took_s is None else f", in {1e3 * took_s:.1f} ms"
        yield f"rank {record['rank']}: {record['steps']} steps, {record['doing']}; {text}"
    present = {record["rank"] for record in records}
    missing = (rank for rank in range(records[0]["size"]) if rank not in present)
    ranks = [*map(str, islice(missing, NAMED + 1))]
    if len(ranks) > NAMED:
        ranks[NAMED] = "…"
    if ranks:
        yield f"no record of rank {', '.join(ranks)}"
    yield _difference(records)


def _difference(records: Sequence[dict[str, Any]]) -> str:
    """Describes the first recorded message that differs or is incomplete on a rank."""
    oldest = 0
    by_number = defaultdict[int, dict[int, dict[str, Any]]](dict)
    for record in records:
        numbers = [message["number"] for message in record["messages"]]
        oldest = max(oldest, min(numbers, default=0))  # earlier ones are overwritten on a rank
        for number, message in zip(numbers, record["messages"]):
            by_number[number][record["rank"]] = message
    for number in sorted(by_number):
        if number < oldest:
            continue
        messages = by_number[number]
        words = {record["rank"]: "not sent" for record in records}
        words |= {rank: _said(message) for rank, message in messages.items()}
        if len(set(words.values())) > 1:
            texts = "; ".join(f"rank {rank} {text}" for rank, text in words.items())
            return f"first difference, in message {number}: {texts}"
        pending = [str(rank) for rank, message in messages.items() if message["took_s"] is None]
        if pending:
            text = next(iter(words.values()))
            return f"message {number}, {text}, did not complete on rank {', '.join(pending)}"
    return "no difference among the recorded messages"


def _said(message: Mapping[str, Any]) -> str:
    return f"{message['name']}, {message['nbytes']} bytes"


def _record(file: Path) -> dict[str, Any]:
    try:
        record = json.loads(file.read_text())
        flight_text([record])
        _ = record["rank"] + record["began"]
    except Exception as error:  # no JSON, or JSON of another structure
        raise ValueError(f"{file} is not a record of a rank: {error!r:.200}.") from None
    return record
