"""Reports of the ranks that write a checkpoint jointly, as small files in its folder.

Only rank 0 waits for the other ranks, on a background thread. It calls no collective, so a dead
rank cannot hang it.
"""

import json
import os
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np

from fddp.checkpoints.files import digests, write_at_once
from fddp.comm import Group

WAIT_S = 600.0
ENDING_S = 10.0  # after an error in training, which may have ended the other ranks, too
LONGEST_PAUSE_S = 0.5


def part(staging: Path, rank: int) -> Path:
    """The folder of a rank's part."""
    return staging / str(rank)


def report(staging: Path, rank: int) -> None:
    """Reports that a rank has written its part, with the digests of its files."""
    write_at_once(_done(staging, rank), json.dumps(digests(staging, part(staging, rank))))


def report_failure(staging: Path, rank: int, error: Exception) -> None:
    """Removes the unfinished part of a rank, as the disk may be full, and reports the error."""
    shutil.rmtree(part(staging, rank), ignore_errors=True)
    with suppress(OSError):  # an empty file is a report, too
        staging.mkdir(exist_ok=True)
        _failed(staging, rank).touch()
        _failed(staging, rank).write_text(f"{type(error).__name__}: {error}")


def collect_reports(
    staging: Path, ranks: Sequence[int], ending: Callable[[], bool]
) -> dict[str, str]:
    """Waits for the reports of all ranks, removes them, and returns the digests of the files.

    Raises RuntimeError if a rank failed, once no rank writes any more, and TimeoutError if a rank
    does not report. `ending` returns True once training has ended with an error.
    """
    begin = time.monotonic()
    pause = 0.01
    while missing := _missing(staging, ranks):
        waited = time.monotonic() - begin
        if waited > (ENDING_S if ending() else WAIT_S):
            raise TimeoutError(
                f"rank {missing[0]} has not written its part, {waited:.0f} s after rank 0's"
            )
        time.sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE_S)
    files = dict[str, str]()
    for rank in ranks:
        if _failed(staging, rank).exists():
            raise RuntimeError(
                f"rank {rank} could not write its part: {_failed(staging, rank).read_text()}"
            )
        files |= json.loads(_done(staging, rank).read_bytes())
        _done(staging, rank).unlink()
    return files


def not_seen(group: Group, meeting: Path) -> list[int]:
    """Finds the ranks whose files rank 0 does not see; every rank calls it, and all get the same.

    `meeting` is an empty folder of a new name that rank 0 has made; it is removed.
    """
    with suppress(OSError):
        (meeting / str(group.rank)).touch()
    group.barrier()
    visible = group.broadcast(
        np.array([os.access(meeting / str(rank), os.F_OK) for rank in range(group.processes)])
    )
    if group.rank == 0:
        shutil.rmtree(meeting, ignore_errors=True)
    return np.flatnonzero(~visible).tolist()


def _missing(staging: Path, ranks: Sequence[int]) -> list[int]:
    """The ranks that have not reported yet."""
    # Opening a folder makes a network file system ask its server; a test of a path may be cached.
    reports = {path.name for path in staging.iterdir()}
    return [
        rank
        for rank in ranks
        if not reports & {_done(staging, rank).name, _failed(staging, rank).name}
    ]


def _done(staging: Path, rank: int) -> Path:
    return staging / f"{rank}.json"


def _failed(staging: Path, rank: int) -> Path:
    return staging / f"{rank}.failed"
