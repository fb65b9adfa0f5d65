"""The files of checkpoints: each checkpoint is a folder that is complete or does not exist.

A checkpoint is written under a temporary name, and renamed once it is complete: a killed process
leaves older checkpoints unchanged. It contains a list of all files and their digests, and is intact
if the list exists and all digests match. Digests are compared before any array is read.
"""

import json
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from hashlib import blake2b, file_digest
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

LIST = "fddp.json"
BEGUN = re.compile(r"\d+\.begun\.[0-9a-f]{8}\.\d+(\.replaced)?|met\.[0-9a-f]{8}")
"""Names of unfinished folders, unlike those of a user's files."""


# Dtype of an array, its dims, and its dims as it is stored.
Form: TypeAlias = tuple[str, Sequence[int], Sequence[int]]


class Listed(NamedTuple):
    """The list of a checkpoint."""

    values: Mapping[str, Any]
    """Values saved with the arrays."""
    forms: Mapping[str, Form]
    """Name of an array → its form."""
    files: Mapping[str, str]
    """Name of a file in the checkpoint → its digest."""


def remove_unfinished(path: Path, token: str) -> None:
    """Removes the unfinished folders of jobs with another token."""
    for entry in path.iterdir():
        if BEGUN.fullmatch(entry.name) and f".{token}" not in entry.name:
            shutil.rmtree(entry, ignore_errors=True)


def numbers(path: Path) -> list[int]:
    """Finds the numbers of checkpoints, newest first; a folder without a list is none."""
    names = [x.name for x in path.iterdir() if x.name.isdecimal() and os.path.lexists(x / LIST)]
    return sorted(map(int, names), reverse=True)


def finish(path: Path, staging: Path, listed: Listed, keep: int) -> None:
    """Adds the list to a written checkpoint, renames it to its number, and removes old checkpoints.

    A checkpoint of the same number is replaced. An OSError leaves older checkpoints untouched.
    """
    text = json.dumps(listed._asdict())
    write_at_once(staging / LIST, json.dumps([_digest(text.encode()), text]))
    _sync(staging)
    number = listed.values["step"]
    target = path / str(number)
    replaced = staging.with_name(f"{staging.name}.replaced")
    if target.exists():  # it is damaged, or this run resumed from an older one
        target.rename(replaced)
    staging.rename(target)
    shutil.rmtree(replaced, ignore_errors=True)
    _sync(path)
    older = [old for old in numbers(path) if old < number]
    for old in older[keep - 1 :]:
        shutil.rmtree(path / str(old), ignore_errors=True)


def read_list(folder: Path) -> Listed | str:
    """Reads the list of a checkpoint, or returns a description of its damage."""
    try:
        digest, text = json.loads((folder / LIST).read_bytes())
        if digest == _digest(text.encode()):
            return Listed(**json.loads(text))
    except OSError as error:
        return f"{LIST} cannot be read: {error.strerror}"
    except Exception:  # no JSON, JSON of another structure, or nested too deeply
        pass
    return f"{LIST} is damaged"


def wrong(folder: Path, files: Mapping[str, str]) -> str:
    """Compares files with their digests, and describes the first damage; "" if all files match."""
    for name, digest in files.items():
        try:
            if digest_of(folder / name) != digest:
                return f"{name} is damaged"
        except FileNotFoundError:
            return f"{name} is missing"
        except OSError as error:
            return f"{name} cannot be read: {error.strerror}"
    return ""


def write_at_once(path: Path, text: str) -> None:
    """Writes a file atomically."""
    temporary = path.with_suffix(".tmp")
    with temporary.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def digest_of(path: Path) -> str:
    """Computes the digest of a file."""
    with path.open("rb") as file:
        return file_digest(file, lambda: blake2b(digest_size=16)).hexdigest()


def _digest(data: bytes) -> str:
    return blake2b(data, digest_size=16).hexdigest()


def _sync(folder: Path) -> None:
    """Syncs the entries of a folder to disk, so that they survive a power failure."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
