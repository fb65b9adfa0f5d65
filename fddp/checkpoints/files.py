"""Checkpoints as files, written with Orbax and read again by one process.

Orbax writes under another name and renames what is complete, so a process that is killed leaves the older ones as they
were. Then a list of all files and their digests is written beside them: a checkpoint is whole if it has such a list and
the files are as it says. They are compared before Orbax reads any: of damaged ones it may make numbers, or a noise.
"""

import json
import os
import shutil
from collections.abc import Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

LIST = "fddp.json"
Leaves = Mapping[str, np.ndarray]


class Saved(NamedTuple):
    """A checkpoint, in this process's memory."""

    number: int
    """The step after which it was made."""
    leaves: Leaves
    """Its arrays by their paths."""
    told: Mapping[str, Any]
    """Values that were saved beside them."""


def opened(path: Path) -> Any:
    """A folder of checkpoints, for one process of the job.

    Args:
      path: the folder; made if there is none. What a killed process began to write there is removed.

    Returns:
      An Orbax `CheckpointManager`.

    Raises:
      ModuleNotFoundError: Orbax is not installed.
      OSError: the folder cannot be made or read.
    """
    try:
        import orbax.checkpoint as ocp
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("fddp.Checkpoints needs Orbax: pip install 'fddp[checkpoint]'.") from error
    path.mkdir(parents=True, exist_ok=True)
    # Orbax by itself would wait for all processes of jax.distributed.
    alone = ocp.options.MultiprocessingOptions(
        primary_host=0, active_processes={0}, barrier_sync_key_prefix="fddp_checkpoints"
    )
    options = ocp.CheckpointManagerOptions(
        create=False,
        cleanup_tmp_directories=True,
        enable_async_checkpointing=False,
        multiprocessing_options=alone,
    )
    return ocp.CheckpointManager(path.absolute(), options=options)


def write(manager: Any, saved: Saved, keep: int) -> None:
    """Writes a checkpoint; one of the same number is replaced, and older ones are removed once it is whole.

    Args:
      manager: from `opened`.
      saved: what to write.
      keep: how many of the newest to keep.

    Raises:
      OSError: the disk is full, say; nothing older is touched, and nothing of it stays.
    """
    import orbax.checkpoint as ocp

    folder = Path(manager.directory)
    number = saved.number
    if number in manager.all_steps():  # a damaged one, or one of a run that went on from an older one
        manager.delete(number)
    try:
        # Orbax refuses arrays without elements.
        leaves = {name: x for name, x in saved.leaves.items() if x.size}
        manager.save(number, args=ocp.args.StandardSave(leaves), force=True)
        forms = {name: (str(x.dtype), x.shape) for name, x in saved.leaves.items()}
        text = json.dumps({"told": saved.told, "forms": forms, "files": _files(folder / str(number))})
        _write_at_once(folder / str(number) / LIST, json.dumps([_digest(text.encode()), text]))
    except Exception:
        for begun in [*folder.glob(f"{number}.orbax-checkpoint-tmp*"), folder / str(number)]:
            shutil.rmtree(begun, ignore_errors=True)
        manager.reload()
        raise
    older = [step for step in sorted(manager.all_steps()) if step < number and _finished(manager, step)]
    for old in older[: max(0, len(older) + 1 - keep)]:
        manager.delete(old)


def unfinished(manager: Any) -> list[int]:
    """The checkpoints that a killed process has not finished, or somebody else wrote: they count as none."""
    return [number for number in sorted(manager.all_steps()) if not _finished(manager, number)]


def newest(manager: Any) -> tuple[Saved | None, list[str]]:
    """Reads the newest checkpoint that is whole.

    Args:
      manager: from `opened`.

    Returns:
      The checkpoint, or None; and for each newer one what is wrong with it.
    """
    damaged = list[str]()
    for number in sorted(set(manager.all_steps()) - set(unfinished(manager)), reverse=True):
        try:
            return _read(manager, number), damaged
        except (ValueError, OSError) as error:
            damaged.append(f"step {number} ({error})")
    return None, damaged


def _finished(manager: Any, number: int) -> bool:
    return (Path(manager.directory) / str(number) / LIST).exists()


def _read(manager: Any, number: int) -> Saved:
    import orbax.checkpoint as ocp

    folder = Path(manager.directory) / str(number)
    try:
        digest, text = json.loads((folder / LIST).read_bytes())
        if digest != _digest(text.encode()):
            raise ValueError
    except ValueError:
        raise ValueError(f"{LIST} is damaged") from None
    listed = json.loads(text)
    files = _files(folder)
    for name, digest in listed["files"].items():
        if files.get(name) != digest:
            raise ValueError(f"{name} is {'damaged' if name in files else 'missing'}")
    found = manager.restore(number, args=ocp.args.StandardRestore())
    empty = {name: np.zeros(shape, jnp.dtype(dtype)) for name, (dtype, shape) in listed["forms"].items()}
    return Saved(number, {name: np.asarray(found.get(name, x)) for name, x in empty.items()}, listed["told"])


def _files(folder: Path) -> dict[str, str]:
    """The digest of each file of a checkpoint, but for the list of them."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != LIST)
    return {str(path.relative_to(folder)): _digest(path.read_bytes()) for path in paths}


def _write_at_once(path: Path, text: str) -> None:
    """Writes a file that is there as a whole or not at all."""
    begun = path.with_suffix(".tmp")
    with begun.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    begun.replace(path)


def _digest(data: bytes) -> str:
    return blake2b(data, digest_size=16).hexdigest()
