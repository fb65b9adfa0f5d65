"""Writes a checkpoint jointly: each rank on a background thread, and rank 0 finishes it.

A rank reports the end of its part by a small file. Only rank 0 waits for the others, and it calls
no collective, so a dead rank cannot hang it.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path
from shutil import rmtree
from typing import Any, NamedTuple

from fddp.checkpoints.files import (
    Listed,
    Pieces,
    digest_of,
    finish,
    remove_unfinished,
    write,
    write_at_once,
)
from fddp.checkpoints.folder import Folder, remark
from fddp.checkpoints.stored_pieces import Leaf, is_distributed, local_pieces, stored_form

WAIT_S = 600.0
ENDING_S = 10.0  # after an error in training, which may have ended the other ranks, too
LONGEST_PAUSE_S = 0.5


class Saved(NamedTuple):
    """One rank's part of a checkpoint to be written."""

    arrays: list[tuple[str, Pieces]]
    """Names of arrays, and this rank's pieces of them."""
    listed: Listed
    """The checkpoint's list, without files."""
    writers: Sequence[int]
    """The ranks that write."""


def copy_part(folder: Folder, leaves: Mapping[str, Leaf], values: Mapping[str, Any]) -> Saved:
    """Copies this rank's part of a state, to be saved with `values`; every rank calls it."""
    group = folder.group
    arrays = list[tuple[str, Pieces]]()
    for name, leaf in leaves.items():
        pieces = local_pieces(group, leaf)
        if not folder.shared and is_distributed(group, leaf):
            gathered = group.all_gather_object(pieces)
            pieces = list(chain.from_iterable(gathered)) if group.rank == 0 else ()
        if pieces:
            arrays.append((name, pieces))
    all_write = folder.shared and any(is_distributed(group, leaf) for leaf in leaves.values())
    forms = {name: stored_form(group, leaf) for name, leaf in leaves.items()}
    writers = range(group.processes if all_write else 1)
    return Saved(arrays, Listed(values, forms, {}), writers)


def write_part(
    folder: Folder, staging: Path, saved: Saved, keep: int, ending: Callable[[], bool]
) -> Exception | None:
    """Writes this rank's part; rank 0 finishes. Returns the error that it printed, or None."""
    rank = folder.group.rank
    failure = None
    try:
        staging.mkdir(exist_ok=True)
        if rank == 0:
            remove_unfinished(folder.path, folder.token)
        write(_part(staging, rank), (saved.arrays.pop() for _ in range(len(saved.arrays))))
        write_at_once(_report(staging, rank), digest_of(_part(staging, rank)))
    except Exception as error:  # training continues, and a later save may find more space
        failure = error
        with suppress(OSError):
            _part(staging, rank).unlink(missing_ok=True)
            _report(staging, rank).touch()  # an empty report is that of a failure
    if rank == 0:
        try:
            listed = saved.listed._replace(files=_collected(staging, saved.writers, ending))
            finish(folder.path, staging, listed, keep)
        except Exception as error:
            failure = failure or error
            rmtree(staging, ignore_errors=True)
    if failure is None:
        return None
    part = f"rank {rank}'s part of " if rank else ""
    remark(
        f"{part}the checkpoint of step {saved.listed.values['step']} could not be written: "
        f"{type(failure).__name__}: {failure}"
    )
    return failure.with_traceback(None)  # a traceback would keep the arrays alive


def _collected(staging: Path, ranks: Sequence[int], ending: Callable[[], bool]) -> dict[str, str]:
    """Waits for the reports of all ranks, removes them, and returns the digests of the files."""
    # `ending` returns True once training has ended with an error.
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
    digests = dict[str, str]()
    for rank in ranks:
        digest = _report(staging, rank).read_text()
        if not digest:
            raise RuntimeError(f"rank {rank} could not write its part, and has printed the reason")
        digests[_part(staging, rank).name] = digest
        _report(staging, rank).unlink()
    return digests


def _missing(staging: Path, ranks: Sequence[int]) -> list[int]:
    # Opening a folder makes a network file system ask its server; a test of a path may be cached.
    reports = {*staging.iterdir()}
    return [rank for rank in ranks if _report(staging, rank) not in reports]


def _part(staging: Path, rank: int) -> Path:
    return staging / f"{rank}.npz"


def _report(staging: Path, rank: int) -> Path:
    return staging / f"{rank}.written"
