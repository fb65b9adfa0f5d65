"""Reports of ranks that write a checkpoint together, as small files beside what they write.

Rank 0 alone waits for others, in a thread beside training. No collective is called there, so a rank that is dead hangs
nobody.
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
ENDING_S = 10.0  # where training has ended with an error, so that the others may have ended, too
LONGEST_PAUSE_S = 0.5


def part(begun: Path, rank: int) -> Path:
    """The folder of one rank's part."""
    return begun / str(rank)


def report(begun: Path, rank: int) -> None:
    """Says that a rank has written its part.

    Args:
      begun: the checkpoint.
      rank: of the group.
    """
    write_at_once(_done(begun, rank), json.dumps(digests(begun, part(begun, rank))))


def report_failure(begun: Path, rank: int, error: Exception) -> None:
    """Says that a rank could not write its part, and removes what there is of it, as the disk may be full.

    Args:
      begun: the checkpoint.
      rank: of the group.
      error: the reason.
    """
    shutil.rmtree(part(begun, rank), ignore_errors=True)
    with suppress(OSError):  # an empty file says it, too
        begun.mkdir(exist_ok=True)
        _failed(begun, rank).touch()
        _failed(begun, rank).write_text(f"{type(error).__name__}: {error}")


def collected(begun: Path, ranks: Sequence[int], ending: Callable[[], bool]) -> dict[str, str]:
    """Waits until all ranks have written their parts, or could not: then nobody writes there any more.

    Args:
      begun: the checkpoint.
      ranks: who writes.
      ending: whether training has ended with an error.

    Returns:
      The digest of each file that they have written; their reports are removed.

    Raises:
      RuntimeError: a rank could not.
      TimeoutError: a rank says nothing.
    """
    begin = time.monotonic()
    pause = 0.01
    while missing := _missing(begun, ranks):
        waited = time.monotonic() - begin
        if waited > (ENDING_S if ending() else WAIT_S):
            raise TimeoutError(f"rank {missing[0]} has not written its part, {waited:.0f} s after rank 0's")
        time.sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE_S)
    files = dict[str, str]()
    for rank in ranks:
        if _failed(begun, rank).exists():
            raise RuntimeError(f"rank {rank} could not write its part: {_failed(begun, rank).read_text()}")
        files |= json.loads(_done(begun, rank).read_bytes())
        _done(begun, rank).unlink()
    return files


def not_seen(group: Group, met: Path) -> list[int]:
    """Finds the ranks that do not write where rank 0 reads; every rank calls it.

    Args:
      group: the ranks.
      met: an empty folder that rank 0 has made, of a new name; it is removed.

    Returns:
      Those ranks, the same on all.
    """
    with suppress(OSError):
        (met / str(group.rank)).touch()
    group.barrier()
    there = group.broadcast(np.array([os.access(met / str(rank), os.F_OK) for rank in range(group.processes)]))
    if group.rank == 0:
        shutil.rmtree(met, ignore_errors=True)
    return np.flatnonzero(~there).tolist()


def _missing(begun: Path, ranks: Sequence[int]) -> list[int]:
    """The ranks that have reported nothing yet."""
    # The whole folder is read, as a network's file system looks up at its server what is opened anew.
    there = {path.name for path in begun.iterdir()}
    return [rank for rank in ranks if not there & {_done(begun, rank).name, _failed(begun, rank).name}]


def _done(begun: Path, rank: int) -> Path:
    return begun / f"{rank}.json"


def _failed(begun: Path, rank: int) -> Path:
    return begun / f"{rank}.failed"
