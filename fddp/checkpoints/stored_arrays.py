"""Arrays in files: written in parts, by several processes, and read in ranges, by as many others as there are.

Each process writes a database of its own: a few large files, however many arrays there are. At the end one process
joins the databases in a table of contents, which is small; nobody reads or copies numbers for it.

Source: TensorStore's zarr arrays in OCDBT, in the form in which Orbax writes them, too.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import jax.numpy as jnp
import numpy as np

BATCH_BYTES = 32 * 2**20  # of these one file is made
OLD = "default"  # where Orbax puts what belongs to no item of the user's

Index: TypeAlias = tuple[slice, ...]
# (name of an array, dims in which to see it, range) → the numbers of the range.
Read: TypeAlias = Callable[[str, tuple[int, ...], Index], np.ndarray]


class Portion(NamedTuple):
    """An array of a checkpoint, as far as one process writes it."""

    name: str
    """Its path in the state."""
    dims: tuple[int, ...]
    """Dims of the whole array."""
    chunk: tuple[int, ...]
    """Dims of a piece; those at the end of the array may be smaller."""
    pieces: Sequence[tuple[Index, np.ndarray]]
    """Ranges, and what is there."""


def check_installed() -> None:
    """Refuses to go on without TensorStore.

    Raises:
      ModuleNotFoundError: it is not installed.
    """
    try:
        import tensorstore  # noqa: F401
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("fddp.Checkpoints needs TensorStore: pip install tensorstore.") from error


def write(folder: Path, portions: Iterable[Portion]) -> None:
    """Writes one process's pieces.

    Args:
      folder: of this process; it is made.
      portions: of arrays with at least one element; taken one by one, so that what is written need not be kept.

    Raises:
      Exception: TensorStore's, if the disk is full, say.
    """
    import tensorstore as ts

    folder.mkdir(parents=True, exist_ok=True)  # a process may have nothing to write, as another node writes it
    context = _context()
    # What is written in one transaction is one file.
    transaction = ts.Transaction()
    size = 0
    for one in portions:
        for place, piece in one.pieces:
            x = _storable(piece)
            array = ts.open(
                _spec(folder, one.name) | {"metadata": {"compressor": None}, "store_data_equal_to_fill_value": True},
                dtype=ts.dtype(x.dtype),
                shape=one.dims,
                chunk_layout=ts.ChunkLayout(chunk_shape=one.chunk),
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


def join(folder: Path, parts: Iterable[Path]) -> None:
    """Makes the table of contents of what several processes have written.

    Args:
      folder: of the checkpoint.
      parts: folders of the processes, in it.
    """
    import tensorstore as ts

    context = _context()
    transaction = ts.Transaction(atomic=True)
    joined = ts.KvStore.open(_database(folder), context=context).result().with_transaction(transaction)
    databases = [ts.KvStore.open(_database(part), context=context).result() for part in parts]
    for copying in [database.experimental_copy_range_to(joined) for database in databases]:
        copying.result()
    transaction.commit_sync()


def reader(folder: Path, forms: Mapping[str, tuple[str, Sequence[int]]]) -> Read:
    """Makes a function that reads ranges of a checkpoint's arrays.

    Args:
      folder: of a checkpoint, or of one that Orbax wrote.
      forms: the dtype and the dims of each array.

    Returns:
      `read(name, dims, range)`: where an array was saved with other dims all of it is read, then the range taken.
    """
    import tensorstore as ts

    context = _context()
    by_orbax = (folder / OLD).is_dir()

    def read(name: str, dims: tuple[int, ...], place: Index) -> np.ndarray:
        # Orbax leaves out what is all zeros.
        spec = _spec(folder / OLD if by_orbax else folder, name) | {"fill_missing_data_reads": by_orbax}
        array = ts.open(spec, open=True, context=context).result()
        alike = array.shape == dims
        x = (array[place] if alike else array).read().result().view(jnp.dtype(forms[name][0]))
        return x if alike else x.reshape(dims)[place]

    return read


def _storable(x: np.ndarray) -> np.ndarray:
    """The same bytes in a dtype that TensorStore has; it has no uint4."""
    import tensorstore as ts

    try:
        ts.dtype(x.dtype)
    except ValueError:
        return x.view(f"u{x.dtype.itemsize}")
    return x


def _context() -> Any:
    """Resources of TensorStore's: no memory for what was read, as nothing is read twice."""
    import tensorstore as ts

    return ts.Context({"cache_pool": {"total_bytes_limit": 0}})


def _spec(folder: Path, name: str) -> dict[str, Any]:
    return {"driver": "zarr", "kvstore": _database(folder) | {"path": f"{name}/"}}


def _database(folder: Path) -> dict[str, Any]:
    return {"driver": "ocdbt", "base": {"driver": "file", "path": f"{folder.absolute()}/"}}
