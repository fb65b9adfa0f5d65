"""The folder of checkpoints as the ranks of a group see it, and its newest intact checkpoint."""

import errno
import os
import re
import secrets
import shutil
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from io import BytesIO
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fddp.checkpoints.files import Listed, Read, numbers, open_reader, read_list, wrong
from fddp.checkpoints.stored_pieces import field_of, words_of
from fddp.comm import Group, nothing_to_compare, verify


class Folder(NamedTuple):
    """A folder of checkpoints, for the ranks of a group."""

    group: Group
    path: Path
    token: str
    """A unique word, equal on all ranks."""
    shared: bool = False
    """True if all ranks write into the folder that rank 0 reads; else only rank 0 uses it."""


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


def met(group: Group, path: Path, shard: str | None) -> Folder:
    """Opens a folder; finds out if all ranks see it, as `shard` needs; every rank calls it."""
    token = group.broadcast(np.frombuffer(secrets.token_bytes(4), np.uint8)).tobytes().hex()
    meeting = path / f"met.{token}"
    folder = Folder(group, path, token)

    def open_folder() -> bool:
        try:
            path.mkdir(parents=True, exist_ok=True)
            meeting.mkdir()
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS) or not path.is_dir():
                raise
            return False
        return True

    if not from_rank_0(folder, open_folder):  # it is read-only: rank 0 reads for all ranks
        return folder
    sees = False
    with suppress(OSError):
        (meeting / str(group.rank)).touch()
        sees = True
    visible = group.all_gather(np.array(sees))
    if group.rank == 0:
        shutil.rmtree(meeting, ignore_errors=True)
    blind = np.flatnonzero(~visible).tolist()
    if blind and shard:
        paths = group.all_gather_object(str(path))
        cure = "give a folder that all hosts share"
        if len(set(paths)) > 1:
            cure = (
                f"they have different paths, such as {paths[blind[0]]}: give all ranks the path "
                "of rank 0, group.broadcast_object(path)"
            )
        raise ValueError(
            f"Checkpoints: ranks {blind} do not see {paths[0]} as rank 0 does, or may not write "
            f"there. With shard={shard!r} each rank writes its part: {cure}."
        )
    return folder._replace(shared=not blind)


def on_all(folder: Folder, act: Callable[[], Any]) -> Any:
    """Runs `act`, without collectives in it, on every rank; if a rank fails, all ranks raise."""
    return verify(folder.group, f"checkpoints in {folder.path}", act, nothing_to_compare)


def from_rank_0(folder: Folder, act: Callable[[], Any]) -> Any:
    """Runs `act` as `on_all` does, but only on rank 0; returns its result on every rank."""
    result = on_all(folder, act if folder.group.rank == 0 else lambda: None)
    return folder.group.broadcast_object(result)


def remark(line: str) -> None:
    with suppress(OSError):  # stderr may be on the disk that is full
        print(f"fddp: {line}", file=sys.stderr, flush=True)


### Reading


def newest(folder: Folder, wait: Callable[[], object]) -> tuple[int, Listed] | None:
    """Finds the newest intact checkpoint; None without any; rank 0 reports damaged ones."""

    def listings() -> list[tuple[int, Listed | str]]:
        wait()  # for rank 0's writer
        return [(number, read_list(folder.path / str(number))) for number in numbers(folder.path)]

    damaged = list[str]()
    checkpoint = None
    for number, listing in from_rank_0(folder, listings):
        damage = _damage(folder, number, listing) if isinstance(listing, Listed) else listing
        if not damage:
            checkpoint = number, listing
            break
        damaged.append(f"step {number} ({damage})")
    if checkpoint and damaged and folder.group.rank == 0:
        remark(f"checkpoints in {folder.path} that are not whole: {'; '.join(damaged)}.")
    if damaged and checkpoint is None:
        raise RuntimeError(
            f"none of the checkpoints in {folder.path} is whole: {'; '.join(damaged)}; to start "
            "from scratch move them away."
        )
    return checkpoint


def source(folder: Folder, number: int, listed: Listed) -> Read:
    """Makes the `Read` of a checkpoint; if only rank 0 sees the folder, it broadcasts the files."""
    paths = [folder.path / str(number) / name for name in listed.files]
    if folder.shared:
        return open_reader(paths, listed.forms)
    data = from_rank_0(folder, lambda: [path.read_bytes() for path in paths])
    return open_reader(map(BytesIO, data), listed.forms)


def _damage(folder: Folder, number: int, listed: Listed) -> str:
    """Compares files with their digests, divided among ranks; "" if all files match."""
    group = folder.group
    files = sorted(listed.files.items())
    if folder.shared:
        files = files[group.rank :: group.processes]
    elif group.rank != 0:
        files = []
    damage = wrong(folder.path / str(number), dict(files))
    return next(filter(None, group.all_gather_object(damage)), "")


def report_restored(folder: Folder, number: int, listed: Listed, local: Sequence[str]) -> None:
    """Reports on rank 0 the restored step, and the `local` fields that are not restored."""
    if folder.group.rank != 0:
        return
    remark(f"training goes on from step {number}, from {folder.path}.")
    if (saved_replicas := listed.values["replicas"]) != folder.group.size:
        line = f"it was on {saved_replicas} replicas and is on {folder.group.size}"
        if lost := words_of([name for name in listed.forms if field_of(name) in local]):
            line += f"; not restored: {lost}"
        remark(f"{line}.")
