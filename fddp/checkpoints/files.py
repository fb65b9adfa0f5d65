"""The files of checkpoints: each checkpoint is a folder that is complete or does not exist.

A checkpoint is written under a temporary name, and renamed once it is complete: a killed process
leaves older checkpoints unchanged. It contains the arrays, and a list of all files and their
digests, and is intact if the list exists and all digests match. Digests are compared before any
array is read. Each process writes pieces of arrays into a NumPy archive (.npz), whose members are
named by array and range, and any process reads ranges of them.
"""

import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from hashlib import blake2b, file_digest
from pathlib import Path
from typing import IO, Any, NamedTuple, TypeAlias
from zipfile import ZipFile

import jax.numpy as jnp
import numpy as np

LIST = "fddp.json"
BEGUN = re.compile(r"\d+\.begun\.[0-9a-f]{8}\.\d+(\.replaced)?|met\.[0-9a-f]{8}")
"""Names of unfinished folders, unlike those of a user's files."""
# Dtype of an array, its dims, and its dims as it is stored.
Form: TypeAlias = tuple[str, Sequence[int], Sequence[int]]
Index: TypeAlias = tuple[slice, ...]
# Ranges of an array and their values, of one process.
Pieces: TypeAlias = Sequence[tuple[Index, np.ndarray]]
# (name of an array, dims of its view, range in the view) → the numbers in the range.
Read: TypeAlias = Callable[[str, tuple[int, ...], Index], np.ndarray]


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
    """Adds the list to a checkpoint, renames it to its number, replaces that, removes old ones."""
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
    temporary = path.with_suffix(".tmp")
    with temporary.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def digest_of(path: Path) -> str:
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


### Arrays


def write(path: Path, arrays: Iterable[tuple[str, Pieces]]) -> None:
    """Writes pieces of nonempty arrays into a new archive; each can be freed once it is written."""
    with path.open("wb") as file:
        with ZipFile(file, "w") as archive:
            for name, pieces in arrays:
                for place, piece in pieces:
                    ranges = ",".join(f"{x.start}:{x.stop}" for x in place)
                    if piece.dtype.isbuiltin != 1:  # NumPy's files lack it, such as bfloat16
                        piece = piece.view(f"u{piece.dtype.itemsize}")
                    with archive.open(f"{name}[{ranges}].npy", "w", force_zip64=True) as member:
                        np.lib.format.write_array(member, piece, allow_pickle=False)
        file.flush()
        os.fsync(file.fileno())


def open_reader(files: Iterable[Path | IO[bytes]], forms: Mapping[str, Form]) -> Read:
    """Makes the `Read` of archives; an array that was stored with other dims is read as a whole."""
    places = dict[str, list[tuple[ZipFile, str, Index]]]()
    for archive in map(ZipFile, files):
        for member in archive.namelist():
            name, _, ranges = member.removesuffix("].npy").rpartition("[")
            place = tuple(slice(*map(int, x.split(":"))) for x in ranges.split(",") if x)
            places.setdefault(name, []).append((archive, member, place))

    def read(name: str, dims: tuple[int, ...], place: Index) -> np.ndarray:
        dtype, _, stored = forms[name]
        if (stored_dims := tuple(stored)) != dims:
            whole = read(name, stored_dims, tuple(map(slice, stored_dims)))
            return whole.reshape(dims)[place]
        place = tuple(slice(*x.indices(n)[:2]) for x, n in zip(place, dims))
        values = np.empty([x.stop - x.start for x in place], jnp.dtype(dtype))
        for archive, member, at in places.get(name, ()):  # none of an empty array
            common = [slice(max(x.start, y.start), min(x.stop, y.stop)) for x, y in zip(place, at)]
            if all(x.start < x.stop for x in common):
                with archive.open(member) as file:
                    piece = np.lib.format.read_array(file, allow_pickle=False)
                values[_inside(common, place)] = piece.view(values.dtype)[_inside(common, at)]
        return values

    return read


def _inside(ranges: Iterable[slice], outer: Index) -> Any:
    """Shifts ranges to the begin of an outer range."""
    return tuple(slice(x.start - y.start, x.stop - y.start) for x, y in zip(ranges, outer))
