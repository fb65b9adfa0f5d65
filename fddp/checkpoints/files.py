"""A folder of checkpoints: each is a folder of its own, there as a whole or not at all.

A checkpoint is written under another name, and renamed once it is complete: a process that is killed leaves the older
ones as they were. In it lies a list of all files and their digests: a checkpoint is whole if it has such a list and the
files are as it says. They are compared before any is read: of damaged ones a reader may make numbers, or a noise.
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
BEGUN = re.compile(r"(\d+)\.(orbax-checkpoint-tmp(-\d+)?|begun\.[0-9a-f]{8}\.\d+(\.replaced)?)|met\.[0-9a-f]{8}")
"""Names of what is being written, and not of a user's files; Orbax wrote older checkpoints."""


class Listed(NamedTuple):
    """The list of a checkpoint."""

    told: Mapping[str, Any]
    """Values that were saved beside the arrays."""
    forms: Mapping[str, tuple[str, Sequence[int]]]
    """The dtype and the dims of each array, by its name."""
    files: Mapping[str, str]
    """The digest of each file, by its path in the checkpoint."""
    cuts: Mapping[str, Sequence[tuple[int, int]]] = {}
    """The number of parts along each dim, and the length of one, for arrays in which one part lies behind the other, as
    devices of a replica held them."""


def swept(path: Path, token: str, quiet_s: float) -> list[str]:
    """Removes what killed processes began to write.

    Args:
      path: the folder of checkpoints.
      token: is in the names of what this job writes, which stays.
      quiet_s: seconds for which a killed process has changed nothing.

    Returns:
      The names of what changed within that time, which stays: another job may be writing it.

    Raises:
      OSError: the folder cannot be read.
    """
    active = list[str]()
    for begun in path.iterdir():
        if BEGUN.fullmatch(begun.name) and f".{token}" not in begun.name:
            if time.time() - max(file.lstat().st_mtime for file in (begun, *begun.rglob("*"))) < quiet_s:
                active.append(begun.name)
            else:
                shutil.rmtree(begun, ignore_errors=True)
    return active


def numbers(path: Path) -> tuple[list[int], list[int]]:
    """Finds the checkpoints of a folder.

    Args:
      path: the folder.

    Returns:
      The numbers of those that have a list, the newest first; and of those that have none: a process is writing them,
      or was killed meanwhile, or somebody else wrote them, and they count as none.
    """
    names = [entry.name for entry in path.iterdir()]
    found = {int(name) for name in names if name.isdecimal()}
    finished = {number for number in found if _has_list(path / str(number))}
    begun = {int(match[1]) for match in map(BEGUN.fullmatch, names) if match and match[1]}
    return sorted(finished, reverse=True), sorted(found - finished | begun)


def finish(path: Path, begun: Path, number: int, listed: Listed, keep: int, opened: float) -> None:
    """Makes a checkpoint of what is written; one of the same number is replaced, and older ones are removed.

    Args:
      path: the folder of checkpoints.
      begun: what is written, in it.
      number: of the new checkpoint.
      listed: its list.
      keep: how many of the newest to keep.
      opened: the time at which this job opened the folder.

    Raises:
      OSError: the disk is full, say, or another job has saved this number since; nothing older is touched.
    """
    text = json.dumps(listed._asdict())
    write_at_once(begun / LIST, json.dumps([_digest(text.encode()), text]))
    _sync(begun)
    if (path / str(number)).exists():  # a damaged one, or one of a run that went on from an older one
        _check_replaced(path / str(number), listed.told["job"], opened)
        replaced = begun.with_name(f"{begun.name}.replaced")
        (path / str(number)).rename(replaced)
        begun.rename(path / str(number))
        shutil.rmtree(replaced, ignore_errors=True)
    else:
        begun.rename(path / str(number))
    _sync(path)
    older = [old for old in numbers(path)[0] if old < number]
    for old in older[keep - 1 :]:
        shutil.rmtree(path / str(old), ignore_errors=True)


def read_list(folder: Path) -> Listed | str:
    """Reads the list of a checkpoint.

    Args:
      folder: the checkpoint.

    Returns:
      The list, or what is wrong with it.
    """
    try:
        with _open(folder / LIST) as file:
            digest, text = json.loads(file.read())
        return _listed(json.loads(text)) if digest == _digest(text.encode()) else f"{LIST} is damaged"
    except OSError as error:
        return f"{LIST} cannot be read: {error.strerror}"
    except Exception:  # JSON of any other kind, or too deep
        return f"{LIST} is damaged"


def wrong(folder: Path, files: Mapping[str, str]) -> str:
    """Compares files with their digests.

    Args:
      folder: the checkpoint.
      files: the digest of each.

    Returns:
      What is wrong with the first that is not as it was; "" where all are.
    """
    for name, digest in files.items():
        try:
            if _digest_of(folder / name) != digest:
                return f"{name} is damaged"
        except FileNotFoundError:
            return f"{name} is missing"
        except OSError as error:
            return f"{name} cannot be read: {error.strerror}"
    return ""


def digests(folder: Path, inside: Path, known: Collection[str] = ()) -> dict[str, str]:
    """Digests files.

    Args:
      folder: the checkpoint.
      inside: a folder in it, or itself.
      known: the files whose digests are known.

    Returns:
      The digest of each other file there, by its path in the checkpoint.
    """
    paths = {str(path.relative_to(folder)): path for path in sorted(inside.rglob("*")) if path.is_file()}
    return {name: _digest_of(path) for name, path in paths.items() if name not in known}


def write_at_once(path: Path, text: str) -> None:
    """Writes a file that is there as a whole or not at all."""
    begun = path.with_suffix(".tmp")
    with begun.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    begun.replace(path)


def _digest(data: bytes) -> str:
    return blake2b(data, digest_size=16).hexdigest()


def _digest_of(path: Path) -> str:
    with _open(path) as file:
        return file_digest(file, lambda: blake2b(digest_size=16)).hexdigest()


def _open(path: Path) -> BufferedReader:
    """Opens a file; a pipe or a device might never end."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return path.open("rb")


def _listed(fields: Any) -> Listed:
    """Takes from a list what this version knows; a later one may have added fields."""
    forms = {name: (str(dtype), [int(n) for n in dims]) for name, (dtype, dims) in fields["forms"].items()}
    files = {name: str(digest) for name, digest in fields["files"].items()}
    cuts = {name: [(int(n), int(width)) for n, width in dims] for name, dims in fields.get("cuts", {}).items()}
    values = fields["told"]
    return Listed({**values, "place": values["place"], "replicas": int(values["replicas"])}, forms, files, cuts)


def _has_list(folder: Path) -> bool:
    """Whether a checkpoint has a list; one that cannot be looked at counts, so that it is named as unreadable."""
    try:
        return bool((folder / LIST).stat())
    except OSError as error:
        return not isinstance(error, FileNotFoundError | NotADirectoryError)


def _check_replaced(folder: Path, job: str, opened: float) -> None:
    """Refuses to replace a checkpoint that another job has saved since this one opened the folder."""
    old = read_list(folder)
    if isinstance(old, Listed) and old.told.get("job") != job and (folder / LIST).stat().st_mtime > opened:
        raise FileExistsError(f"another job has saved {folder} since this one began: give each job its own folder")


def _sync(folder: Path) -> None:
    """Makes the names in a folder outlive a loss of power."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
