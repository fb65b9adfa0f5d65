"""Arrays in files: each process writes pieces of arrays, and any process reads ranges of them.

The pieces of a process are a NumPy archive (.npz), whose members are named by array and range.
"""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple, TypeAlias
from zipfile import ZipFile

import jax.numpy as jnp
import numpy as np

from fddp.checkpoints.files import Form

Index: TypeAlias = tuple[slice, ...]
# (name of an array, dims of its view, range in the view) → the numbers in the range.
Read: TypeAlias = Callable[[str, tuple[int, ...], Index], np.ndarray]


class Portion(NamedTuple):
    """One process's pieces of an array."""

    name: str
    """Path in the state."""
    dims: tuple[int, ...]
    """Dims of the whole array as it is stored."""
    pieces: Sequence[tuple[Index, np.ndarray]]
    """Ranges and their values."""


def write(path: Path, portions: Iterable[Portion]) -> None:
    """Writes pieces of nonempty arrays into a new archive.

    The portions are read one by one, so that each can be freed once it is written.
    """
    with path.open("wb") as file:
        with ZipFile(file, "w") as archive:
            for name, _, pieces in portions:
                for place, piece in pieces:
                    with archive.open(_member(name, place), "w", force_zip64=True) as member:
                        np.lib.format.write_array(member, _storable(piece), allow_pickle=False)
        file.flush()
        os.fsync(file.fileno())


def open_reader(files: Iterable[Path | IO[bytes]], forms: Mapping[str, Form]) -> Read:
    """Makes the `Read` of archives.

    An array that was stored with other dims is read as a whole.
    """
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


def _member(name: str, place: Index) -> str:
    return f"{name}[{','.join(f'{x.start}:{x.stop}' for x in place)}].npy"


def _storable(x: np.ndarray) -> np.ndarray:
    """Views an array of a dtype that NumPy's files lack, such as bfloat16, as unsigned integers."""
    return x if x.dtype.isbuiltin == 1 else x.view(f"u{x.dtype.itemsize}")


def _inside(ranges: Iterable[slice], outer: Index) -> Any:
    """Shifts ranges to the begin of an outer range."""
    return tuple(slice(x.start - y.start, x.stop - y.start) for x, y in zip(ranges, outer))
