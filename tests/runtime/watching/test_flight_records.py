"""Records of a job that ended: `python -m fddp flight`."""

import json
import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from fddp.runtime.watching.flight_records import flight_text, read_flights
from fddp.runtime.watching.watcher.rank import WatchedRank

REPORT = {"rank": 0, "steps": 3, "before": 0, "doing": "step"}


def watched(flight: Path) -> WatchedRank:
    """A rank without messages."""
    job = {"rank": 0, "size": 1, "flight": str(flight), "began": 1.0}
    return WatchedRank(job | {"memory": -1, "parent": os.getppid()})


def message(
    number: int, name: str = "bucket 0", nbytes: int = 8, took_s: float | None = 0.001
) -> dict[str, Any]:
    return {
        "number": number,
        "step": 3,
        "name": name,
        "nbytes": nbytes,
        "began_s": -1.0,
        "took_s": took_s,
    }


def record(rank: int, *messages: dict[str, Any], size: int = 2) -> dict[str, Any]:
    return {
        "rank": rank,
        "size": size,
        "why": "rank 1 died",
        "steps": 3,
        "doing": "step",
        "began": 0.0,
        "messages": list(messages),
    }


def last_line(*records: dict[str, Any]) -> str:
    return flight_text(records).splitlines()[-1]


def test_the_first_message_that_ranks_sent_differently_is_named():
    same = [message(number) for number in range(5)]
    for differing in (message(5, name="tail"), message(5, nbytes=16)):
        line = last_line(
            record(0, *same, message(5), message(6)), record(1, *same, differing, message(6))
        )
        assert line.startswith("first difference, in message 5: rank 0 bucket 0, 8 bytes; rank 1 ")


def test_a_message_that_one_rank_never_sent_is_the_difference():
    line = last_line(record(0, message(0), message(1, took_s=None)), record(1, message(0)))
    assert line == "first difference, in message 1: rank 0 bucket 0, 8 bytes; rank 1 not sent"


def test_a_message_that_did_not_come_back_is_named():
    line = last_line(record(0, message(7, took_s=None)), record(1, message(7, took_s=None)))
    assert line == "message 7, bucket 0, 8 bytes, did not complete on rank 0, 1"


def test_what_only_some_still_remember_is_no_difference():
    assert last_line(record(0, message(3), message(4)), record(1, message(4))) == (
        "no difference among the recorded messages"
    )


def test_a_rank_without_a_record_is_named():
    assert "no record of rank 1" in flight_text([record(0, message(0))])


def test_of_a_folder_that_was_kept_only_the_newest_jobs_records_are_read(tmp_path: Path):
    jobs = [(4, 100.5, range(4)), (4, 200.5, (0, 1, 2)), (2, 300.5, (0, 1))]
    for size, began, ranks in jobs:
        for rank in ranks:
            flight_record = record(rank, message(size), size=size) | {"began": began}
            (tmp_path / f"rank_{rank}.json").write_text(json.dumps(flight_record))
        flights = read_flights([tmp_path])
        assert [(flight["rank"], flight["size"], flight["began"]) for flight in flights] == [
            (rank, size, began) for rank in ranks
        ]
    (tmp_path / "rank_1.json").unlink()
    assert "no record of rank 1" in flight_text(read_flights([tmp_path]))


def test_records_are_read_from_a_folder_and_others_refused(tmp_path: Path):
    for rank in (1, 0):
        (tmp_path / f"rank_{rank}.json").write_text(json.dumps(record(rank)))
    assert [flight["rank"] for flight in read_flights([tmp_path])] == [0, 1]
    with pytest.raises(ValueError, match="not a record"):
        read_flights([tmp_path / "rank_0.json", tmp_path.parent / "nothing.json"])
    messages = {"messages": [{"number": "1"}]}
    for text in (
        "{}",
        "5",
        "[1]",
        "[" * 9_000,
        json.dumps(record(2) | messages),
        json.dumps(record(2) | {"size": "2"}),
    ):
        (tmp_path / "rank_2.json").write_text(text)
        with pytest.raises(ValueError, match=r"rank_2.json is not a record of a rank"):
            read_flights([tmp_path])
    with pytest.raises(ValueError, match="no record"):
        read_flights([])


def test_a_record_of_huge_numbers_and_codes_for_the_terminal_is_told_in_few_words():
    first = record(0, message(0), message(10**12), size=10**12) | {"why": "\x1b[2Jrank 1 died"}
    lines = flight_text([first, record(5, message(0), size=10**12)]).splitlines()
    assert lines[0] == "the job ended: ?[2Jrank 1 died"
    assert "no record of rank 1, 2, 3, 4, 6, 7, 8, 9, …" in lines
    assert lines[-1].startswith("first difference, in message 1000000000000: rank 0 bucket 0")


def test_a_record_takes_the_place_of_a_link_and_is_for_its_owner_alone(tmp_path: Path):
    folder = tmp_path / "flight"
    target = tmp_path / "other"
    write = partial(watched(folder).record, REPORT, "rank 0 died")
    assert write()
    assert folder.stat().st_mode & 0o777 == 0o700
    (folder / "rank_0.json").unlink()
    target.write_text("mine")
    (folder / "rank_0.json").symlink_to(target)
    write()
    assert target.read_text() == "mine"
    assert [flight["why"] for flight in read_flights([folder])] == ["rank 0 died"]


def test_a_folder_that_cannot_be_made_has_no_record(tmp_path: Path):
    (tmp_path / "file").touch()
    assert not watched(tmp_path / "file" / "flight").record(REPORT, "rank 0 died")
