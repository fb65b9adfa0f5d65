"""The files of checkpoints: each checkpoint is a folder that is complete or does not exist.

A checkpoint is written under a temporary name, and renamed once it is complete: a killed process
leaves older checkpoints unchanged. It contains a list of all files and their digests, and is intact
if the list exists and all digests match. Digests are compared before any array is read: a reader
may return wrong numbers from damaged files, or fail with an obscure error.
"""

import errno
import json
import os
import re
import shutil
import stat
import time
from collections.abc import Collection, Mapping, Sequence
from hashlib import blake2b, file_digest
from io import BufferedReader
from pathlib import Path
from typing import Any, NamedTuple

LIST = "fddp.json"
BEGUN = re.compile(
    r"(\d+)\.(orbax-checkpoint-tmp(-\d+)?|begun\.[0-9a-f]{8}\.\d+(\.replaced)?)|met\.[0-9a-f]{8}"
)
"""Names of unfinished folders, unlike those of a user's files; Orbax wrote older checkpoints."""


class Listed(NamedTuple):
    """The list of a checkpoint."""

    values: Mapping[str, Any]
    """Values saved with the arrays."""
    forms: Mapping[str, tuple[str, Sequence[int]]]
    """Name of an array → its dtype and dims."""
    files: Mapping[str, str]
    """Path of a file in the checkpoint → its digest."""
    cuts: Mapping[str, Sequence[tuple[int, int]]] = {}
    """Name of an array → for each dim the number of parts, and the length of a part. Such an array
    is stored part after part, as the devices of a replica held it."""


def swept(path: Path, token: str, quiet_s: float) -> list[str]:
    """Removes unfinished folders that killed processes left; returns the names of active ones.

    A folder is active if a file in it changed within `quiet_s` seconds: another job may be writing
    it. The folders of this job have `token` in their names and stay.
    """
    active = list[str]()
    for staging in path.iterdir():
        if not BEGUN.fullmatch(staging.name) or f".{token}" in staging.name:
            continue
        changed = max(file.lstat().st_mtime for file in (staging, *staging.rglob("*")))
        if time.time() - changed < quiet_s:
            active.append(staging.name)
        else:
            shutil.rmtree(staging, ignore_errors=True)
    return active


def numbers(path: Path) -> tuple[list[int], list[int]]:
    """Finds the numbers of finished checkpoints, newest first, and of unfinished ones.

    A folder without a list is unfinished: its process still writes, was killed, or is not fddp.
    """
    names = [entry.name for entry in path.iterdir()]
    numbered = {int(name) for name in names if name.isdecimal()}
    finished = {number for number in numbered if _has_list(path / str(number))}
    unfinished = {int(match[1]) for match in map(BEGUN.fullmatch, names) if match and match[1]}
    return sorted(finished, reverse=True), sorted(numbered - finished | unfinished)


def finish(
    path: Path, staging: Path, number: int, listed: Listed, keep: int, opened: float
) -> None:
    """Adds the list to a written checkpoint, renames it to its number, and removes old checkpoints.

    A checkpoint of the same number is replaced, unless another job saved it after `opened`, the
    time at which this job opened the folder. An OSError leaves older checkpoints untouched.
    """
    fields = {"told": listed.values, "forms": listed.forms, "files": listed.files}
    text = json.dumps(fields | {"cuts": listed.cuts})
    write_at_once(staging / LIST, json.dumps([_digest(text.encode()), text]))
    _sync(staging)
    # It exists if it is damaged, or if this run resumed from an older one.
    if (path / str(number)).exists():
        _check_replaced(path / str(number), listed.values["job"], opened)
        replaced = staging.with_name(f"{staging.name}.replaced")
        (path / str(number)).rename(replaced)
        staging.rename(path / str(number))
        shutil.rmtree(replaced, ignore_errors=True)
    else:
        staging.rename(path / str(number))
    _sync(path)
    older = [old for old in numbers(path)[0] if old < number]
    for old in older[keep - 1 :]:
        shutil.rmtree(path / str(old), ignore_errors=True)


def read_list(folder: Path) -> Listed | str:
    """Reads the list of a checkpoint, or returns a description of its damage."""
    try:
        with _open(folder / LIST) as file:
            digest, text = json.loads(file.read())
        if digest == _digest(text.encode()):
            return _listed(json.loads(text))
    except OSError as error:
        return f"{LIST} cannot be read: {error.strerror}"
    except Exception:  # JSON of another structure, or nested too deeply
        pass
    return f"{LIST} is damaged"


def wrong(folder: Path, files: Mapping[str, str]) -> str:
    """Compares files with their digests, and describes the first damage; "" if all files match."""
    for name, digest in files.items():
        try:
            if _digest_of(folder / name) != digest:
                return f"{name} is damaged"
        except FileNotFoundError:
            return f"{name} is missing"
        except OSError as error:
            return f"{name} cannot be read: {error.strerror}"
    return ""


def digests(folder: Path, inside: Path, skip: Collection[str] = ()) -> dict[str, str]:
    """Computes the digests of all files in `inside` except `skip`, by path relative to `folder`."""
    digest_of_file = dict[str, str]()
    for path in sorted(inside.rglob("*")):
        name = str(path.relative_to(folder))
        if path.is_file() and name not in skip:
            digest_of_file[name] = _digest_of(path)
    return digest_of_file


def write_at_once(path: Path, text: str) -> None:
    """Writes a file atomically."""
    temporary = path.with_suffix(".tmp")
    with temporary.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def _digest(data: bytes) -> str:
    return blake2b(data, digest_size=16).hexdigest()


def _digest_of(path: Path) -> str:
    with _open(path) as file:
        return file_digest(file, lambda: blake2b(digest_size=16)).hexdigest()


def _open(path: Path) -> BufferedReader:
    """Opens a regular file; a pipe or a device might never end."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return path.open("rb")


def _listed(fields: Any) -> Listed:
    """Reads the fields of a list; ignores fields that later versions add."""
    values = fields["told"]
    values = {**values, "place": values["place"], "replicas": int(values["replicas"])}
    forms: dict[str, tuple[str, list[int]]] = {}
    for name, (dtype, dims) in fields["forms"].items():
        forms[name] = str(dtype), list(map(int, dims))
    files = {name: str(digest) for name, digest in fields["files"].items()}
    cuts: dict[str, list[tuple[int, int]]] = {}
    for name, dims in fields.get("cuts", {}).items():
        cuts[name] = [(int(n), int(width)) for n, width in dims]
    return Listed(values, forms, files, cuts)


def _has_list(folder: Path) -> bool:
    """True if a checkpoint has a list, or an inaccessible one, to be reported as unreadable."""
    try:
        return bool((folder / LIST).stat())
    except OSError as error:
        return not isinstance(error, FileNotFoundError | NotADirectoryError)


def _check_replaced(folder: Path, job: str, opened: float) -> None:
    """Refuses to replace a checkpoint that another job saved after `opened`."""
    old = read_list(folder)
    if (
        isinstance(old, Listed)
        and old.values.get("job") != job
        and (folder / LIST).stat().st_mtime > opened
    ):
        raise FileExistsError(
            f"another job has saved {folder} since this job began: give each job a separate folder"
        )


def _sync(folder: Path) -> None:
    """Syncs the entries of a folder to disk, so that they survive a power failure."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
