"""Finds the newest intact checkpoint, jointly on all ranks, and reads it."""

from collections.abc import Callable, Sequence
from math import prod
from typing import TypeAlias

import jax.numpy as jnp
import numpy as np

from fddp.checkpoints.files import Listed, numbers, read_list, wrong
from fddp.checkpoints.folder import Folder, on_rank_0, remark
from fddp.checkpoints.state_forms import part_of_state
from fddp.checkpoints.stored_arrays import Read, open_reader

# The number of a checkpoint, and its list.
Found: TypeAlias = tuple[int, Listed]


def newest(folder: Folder, wait: Callable[[], object]) -> Found | None:
    """Finds the newest intact checkpoint; every rank calls it, and rank 0 reports damaged ones.

    Returns the same on all ranks, None without checkpoints; raises RuntimeError if all are damaged.
    `wait` waits for rank 0's writer.
    """

    def listed() -> tuple[list[tuple[int, Listed | str]], list[int]]:
        wait()
        finished, unfinished = numbers(folder.path)
        return [(number, read_list(folder.path / str(number))) for number in finished], unfinished

    finished, unfinished = folder.group.broadcast_object(on_rank_0(folder, listed))
    damaged = list[str]()
    checkpoint = None
    for number, listing in finished:
        error = _wrong(folder, number, listing)
        if isinstance(listing, Listed) and not error:
            checkpoint = number, listing
            break
        damaged.append(f"step {number} ({error})")
    if folder.group.rank == 0:
        _report_damage(folder, checkpoint, damaged, unfinished)
    if damaged and checkpoint is None:
        raise RuntimeError(
            f"none of the checkpoints in {folder.path} is whole: {'; '.join(damaged)}; to start "
            "from scratch move them away."
        )
    return checkpoint


def source(folder: Folder, number: int, listed: Listed) -> Read:
    """Makes the `Read` of a checkpoint; every rank calls it.

    If only rank 0 sees the folder, it broadcasts all arrays, and ranges are read from memory.
    """
    read = open_reader(folder.path / str(number), listed.forms)
    if folder.shared:
        return read
    forms = {
        name: (dtype, tuple(dims)) for name, (dtype, dims) in listed.forms.items() if prod(dims)
    }

    def read_all() -> dict[str, np.ndarray]:
        return {
            name: read(name, dims, tuple(map(slice, dims))) for name, (_, dims) in forms.items()
        }

    leaves = on_rank_0(folder, read_all) or {}
    for name, (dtype, dims) in forms.items():
        if folder.group.rank != 0:
            leaves[name] = np.zeros(dims, jnp.dtype(dtype))
        leaves[name] = folder.group.broadcast(leaves[name])
    return lambda name, dims, place: leaves[name].reshape(dims)[place]


def _wrong(folder: Folder, number: int, listed: Listed | str) -> str:
    """Compares files with their digests, divided among ranks; "" if all files match."""
    if isinstance(listed, str):
        return listed
    group, path, shared, *_ = folder
    files = sorted(listed.files.items())
    if shared:
        files = files[group.rank :: group.processes]
    elif group.rank != 0:
        files = []
    damage = wrong(path / str(number), dict(files))
    return next(filter(None, group.all_gather_object(damage)), "")


def _report_damage(
    folder: Folder, checkpoint: Found | None, damaged: Sequence[str], unfinished: Sequence[int]
) -> None:
    if unfinished:
        remark(
            f"checkpoints in {folder.path} that were not finished and are ignored: "
            f"step {unfinished}."
        )
    if checkpoint and damaged:
        remark(f"checkpoints in {folder.path} that are not whole: {'; '.join(damaged)}.")


def report_restored(folder: Folder, number: int, listed: Listed) -> None:
    """Reports on rank 0 the restored step, and the loss of the hooks' memory on other replicas."""
    if folder.group.rank != 0:
        return
    remark(f"training goes on from step {number}, from {folder.path}.")
    if (saved_replicas := listed.values["replicas"]) != folder.group.size:
        line = f"it was on {saved_replicas} replicas and is on {folder.group.size}"
        if "hook_state" in map(part_of_state, listed.forms):
            line += "; the memory of hooks starts again"
        remark(f"{line}.")
