"""Arrays in files: several processes write pieces, and any number of processes read ranges.

Each process writes a database of a few large files, for any number of arrays. At the end one
process joins the databases by a small table of contents, without reading or copying array data.

Source: TensorStore's zarr arrays in OCDBT, in the format of Orbax.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import jax.numpy as jnp
import numpy as np

BATCH_BYTES = 32 * 2**20  # least size of a file, except the last
TABLES = "#tables"
TABLES_BYTES = 100 * 2**20
OLD = "default"  # Orbax's folder for arrays without an item name

Index: TypeAlias = tuple[slice, ...]
# (name of an array, dims of its view, range in the view) → the numbers in the range.
Read: TypeAlias = Callable[[str, tuple[int, ...], Index], np.ndarray]


class Portion(NamedTuple):
    """One process's pieces of an array."""

    name: str
    """Path in the state."""
    dims: tuple[int, ...]
    """Dims of the whole array."""
    chunk: tuple[int, ...]
    """Dims of a piece; pieces at the end of the array may be smaller."""
    pieces: Sequence[tuple[Index, np.ndarray]]
    """Ranges and their values."""


def check_installed() -> None:
    """Raises ModuleNotFoundError if TensorStore is not installed."""
    try:
        import tensorstore  # noqa: F401
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "fddp.Checkpoints needs TensorStore: pip install tensorstore."
        ) from error


def write(folder: Path, portions: Iterable[Portion]) -> None:
    """Writes one process's pieces of nonempty arrays into a new folder.

    The portions are read one by one, so that each can be freed once it is written.
    """
    import tensorstore as ts

    # A process may have no pieces, if another node writes them.
    folder.mkdir(parents=True, exist_ok=True)
    context = _context()
    # Each transaction is one file.
    transaction = ts.Transaction()
    size = 0
    for portion in portions:
        for place, piece in portion.pieces:
            x = _storable(piece)
            array = ts.open(
                _spec(folder, portion.name)
                | {"metadata": {"compressor": None}, "store_data_equal_to_fill_value": True},
                dtype=ts.dtype(x.dtype),
                shape=portion.dims,
                chunk_layout=ts.ChunkLayout(chunk_shape=portion.chunk),
                create=True,
                open=True,
                context=context,
                transaction=transaction,
            ).result()
            array[place].write(x).result()
            size += x.nbytes
        if size >= BATCH_BYTES:
            transaction.commit_sync()
            transaction = ts.Transaction()
            size = 0
    transaction.commit_sync()


def write_contents(folder: Path, part_folders: Iterable[Path]) -> None:
    """Writes the table of contents of a checkpoint from the processes' folders in it."""
    import tensorstore as ts

    context = _context()
    transaction = ts.Transaction(atomic=True)
    joined = (
        ts.KvStore.open(_database(folder), context=context).result().with_transaction(transaction)
    )
    databases = [
        ts.KvStore.open(_database(part), context=context).result() for part in part_folders
    ]
    for copying in [database.experimental_copy_range_to(joined) for database in databases]:
        copying.result()
    transaction.commit_sync()


def open_reader(folder: Path, forms: Mapping[str, tuple[str, Sequence[int]]]) -> Read:
    """Makes the `Read` of a checkpoint, also of Orbax's; `forms` maps names to dtype and dims.

    An array that was saved with other dims is read as a whole.
    """
    import tensorstore as ts

    context = _context()
    by_orbax = (folder / OLD).is_dir()
    database = folder / OLD if by_orbax else folder

    # Orbax omits chunks of zeros.
    specs = {name: _spec(database, name) | {"fill_missing_data_reads": by_orbax} for name in forms}
    opening = {name: ts.open(spec, open=True, context=context) for name, spec in specs.items()}

    def read(name: str, dims: tuple[int, ...], place: Index) -> np.ndarray:
        array = opening[name].result()
        dtype = jnp.dtype(forms[name][0])
        if array.shape == dims:
            return array[place].read().result().view(dtype)
        return array.read().result().view(dtype).reshape(dims)[place]

    return read


def _storable(x: np.ndarray) -> np.ndarray:
    """Views an array of a dtype that TensorStore lacks, such as uint4, as unsigned integers."""
    import tensorstore as ts

    try:
        ts.dtype(x.dtype)
    except ValueError:
        return x.view(f"u{x.dtype.itemsize}")
    return x


def _context() -> Any:
    """Makes a TensorStore context that caches the tables of contents, which each array reads."""
    import tensorstore as ts

    return ts.Context(
        {
            "cache_pool": {"total_bytes_limit": 0},  # no number is read twice
            f"cache_pool{TABLES}": {"total_bytes_limit": TABLES_BYTES},
        }
    )


def _spec(folder: Path, name: str) -> dict[str, Any]:
    return {"driver": "zarr", "kvstore": _database(folder) | {"path": f"{name}/"}}


def _database(folder: Path) -> dict[str, Any]:
    base = {"driver": "file", "path": f"{folder.absolute()}/"}
    return {"driver": "ocdbt", "base": base, "cache_pool": f"cache_pool{TABLES}"}
