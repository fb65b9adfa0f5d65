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
    """Whether all ranks write where rank 0 reads; else rank 0 alone uses it."""
    opened: float
    """The time at which it was opened."""
    refusal: str = ""
    """The reason why nothing can be written there; "" where it can."""


def located(path: str | PathLike[str]) -> Path:
    """Finds the folder that a user's path names, and refuses an empty path and a URL."""
    if not isinstance(path, str | PathLike):
        raise TypeError(f"Checkpoints: path must be a str or a path, got {path!r}.")
    name = os.fsdecode(path)
    if re.match(r"$|[A-Za-z][\w+.-]+:/", name):  # of "gs://…" a Path leaves "gs:/…"
        raise ValueError(
            f"Checkpoints: path must be a folder of a file system, got {name!r}: give the path at which a bucket is "
            "mounted, and '.' for the current folder."
        )
    return Path(name).expanduser().absolute()


def met(group: Group, path: Path, token: str, shard: str | None) -> Folder:
    """Opens a folder, and finds who sees it; every rank calls it.

    Args:
      group: the ranks.
      path: the folder.
      token: a word that was never used before, the same on all ranks.
      shard: what of a state lies in shards, as the user says it.

    Returns:
      The folder; a read-only folder can be restored from, and rank 0 reads for all ranks.

    Raises:
      ValueError: something lies in shards, and a rank does not see the folder; on every rank.
      ModuleNotFoundError: TensorStore is not installed.
      RuntimeError: rank 0 cannot open the folder; on every rank.
    """
    meeting = path / f"met.{token}"
    alone = Folder(group, path, False, time.time())

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

    if refusal := group.broadcast_object(on_all(alone, open_folder)):
        return alone._replace(refusal=refusal)
    blind = not_seen(group, meeting)
    if blind and shard:
        raise ValueError(
            f"Checkpoints: ranks {blind} do not see {path} as rank 0 does, or may not write there. With "
            f"shard={shard!r} each rank writes its part: give a folder that all hosts share."
        )
    return alone._replace(shared=not blind)


def on_all(folder: Folder, act: Callable[[], Any]) -> Any:
    """Acts on every rank, which calls it; an error of one is everybody's.

    Args:
      folder: what the ranks are at, for the error.
      act: may raise; sends nothing.

    Returns:
      This rank's finding.
    """
    return verify(folder.group, f"checkpoints in {folder.path}", act, nothing_to_compare)


def on_rank_0(folder: Folder, act: Callable[[], Any]) -> Any:
    """Lets rank 0 act for all, which call it; its error is everybody's.

    Args:
      folder: as for `on_all`.
      act: likewise.

    Returns:
      What rank 0 finds, and None on the others.
    """
    return on_all(folder, act if folder.group.rank == 0 else lambda: None)


def say(line: str) -> None:
    """Tells the user."""
    with suppress(OSError):  # the disk that is full may be that of stderr
        print(f"fddp: {line}", file=sys.stderr, flush=True)
