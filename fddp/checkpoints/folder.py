"""The folder of checkpoints as the ranks of a group see it."""

import errno
import os
import re
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

from fddp.checkpoints.reports import not_seen
from fddp.checkpoints.stored_arrays import check_installed
from fddp.comm import Group, nothing_to_compare, verify


class Folder(NamedTuple):
    """A folder of checkpoints, for the ranks of a group."""

    group: Group
    path: Path
    shared: bool
    """True if all ranks write into the folder that rank 0 reads; else only rank 0 uses it."""
    opened: float
    """Time of opening."""
    refusal: str = ""
    """Reason for which the folder cannot be written; "" if it can."""


def located(path: str | PathLike[str]) -> Path:
    """Returns the absolute path of a user's folder; refuses an empty path and a URL."""
    if not isinstance(path, str | PathLike):
        raise TypeError(f"Checkpoints: path must be a str or a path, got {path!r}.")
    name = os.fsdecode(path)
    if re.match(r"$|[A-Za-z][\w+.-]+:/", name):  # of "gs://…" a Path leaves "gs:/…"
        raise ValueError(
            f"Checkpoints: path must be a folder of a file system, got {name!r}: give the mount "
            "point of a bucket, and '.' for the current folder."
        )
    return Path(name).expanduser().absolute()


def met(group: Group, path: Path, token: str, shard: str | None) -> Folder:
    """Opens a folder and finds out whether all ranks see it; every rank calls it.

    `token` is a unique word, equal on all ranks, and `shard` the step's option: with it all ranks
    must see the folder. From a read-only folder rank 0 reads for all ranks.
    """
    meeting = path / f"met.{token}"
    folder = Folder(group, path, False, time.time())

    def open_folder() -> str:
        check_installed()
        try:
            if group.rank == 0:
                path.mkdir(parents=True, exist_ok=True)
                meeting.mkdir()
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS) or not path.is_dir():
                raise
            return str(error.strerror)
        return ""

    if refusal := group.broadcast_object(on_all(folder, open_folder)):
        return folder._replace(refusal=refusal)
    blind = not_seen(group, meeting)
    if blind and shard:
        raise ValueError(
            f"Checkpoints: ranks {blind} do not see {path} as rank 0 does, or may not write there. "
            f"With shard={shard!r} each rank writes its part: give a folder that all hosts share."
        )
    return folder._replace(shared=not blind)


def on_all(folder: Folder, act: Callable[[], Any]) -> Any:
    """Runs `act`, without collectives in it, on every rank; if a rank fails, all ranks raise."""
    return verify(folder.group, f"checkpoints in {folder.path}", act, nothing_to_compare)


def on_rank_0(folder: Folder, act: Callable[[], Any]) -> Any:
    """Runs `act` as `on_all` does, but only on rank 0; returns None on the other ranks."""
    return on_all(folder, act if folder.group.rank == 0 else lambda: None)


def remark(line: str) -> None:
    """Prints a line to stderr."""
    with suppress(OSError):  # stderr may be on the disk that is full
        print(f"fddp: {line}", file=sys.stderr, flush=True)
