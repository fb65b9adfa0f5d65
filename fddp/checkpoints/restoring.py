"""The newest whole checkpoint is found by all ranks together, and read."""

from collections.abc import Callable, Sequence
from math import prod
from typing import Any, TypeAlias

import jax.numpy as jnp
import numpy as np

from fddp.checkpoints.files import Listed, numbers, read_list, wrong
from fddp.checkpoints.folder import Folder, on_rank_0, say
from fddp.checkpoints.state_forms import part_of_state
from fddp.checkpoints.stored_arrays import Read, reader

# The number of a checkpoint, and its list.
Found: TypeAlias = tuple[int, Listed]


def newest(folder: Folder, wait: Callable[[], Any]) -> Found | None:
    """Finds the newest checkpoint that is whole; every rank calls it, and rank 0 says what is wrong with newer ones.

    Args:
      folder: the checkpoints.
      wait: waits until nothing is being written.

    Returns:
      The checkpoint, the same on all ranks; None where there is none.

    Raises:
      RuntimeError: there are some, but none is whole; on every rank.
    """

    def listed() -> tuple[list[tuple[int, Listed | str]], list[int]]:
        wait()
        finished, begun = numbers(folder.path)
        return [(number, read_list(folder.path / str(number))) for number in finished], begun

    finished, begun = folder.group.broadcast_object(on_rank_0(folder, listed))
    damaged = list[str]()
    found = None
    for number, one in finished:
        error = _wrong(folder, number, one)
        if isinstance(one, Listed) and not error:
            found = number, one
            break
        damaged.append(f"step {number} ({error})")
    if folder.group.rank == 0:
        _tell(folder, found, damaged, begun)
    if damaged and found is None:
        raise RuntimeError(
            f"none of the checkpoints in {folder.path} is whole: {'; '.join(damaged)}; to begin anew move them away."
        )
    return found


def source(folder: Folder, number: int, listed: Listed) -> Read:
    """Makes a function that reads ranges of a checkpoint's arrays; where rank 0 alone sees the folder, from rank 0."""
    read = reader(folder.path / str(number), listed.forms)
    if folder.shared:
        return read
    forms = {name: (dtype, tuple(dims)) for name, (dtype, dims) in listed.forms.items() if prod(dims)}

    def everything() -> dict[str, np.ndarray]:
        return {name: read(name, dims, tuple(map(slice, dims))) for name, (_, dims) in forms.items()}

    mine = on_rank_0(folder, everything)
    leaves = {
        name: folder.group.broadcast(mine[name] if mine else np.zeros(dims, jnp.dtype(dtype)))
        for name, (dtype, dims) in forms.items()
    }
    return lambda name, dims, place: leaves[name].reshape(dims)[place]


def _wrong(folder: Folder, number: int, listed: Listed | str) -> str:
    """Compares files with their digests, each rank some of them; "" if all are as they were."""
    if isinstance(listed, str):
        return listed
    group, path, shared, *_ = folder
    names = sorted(listed.files)
    mine = names[group.rank :: group.processes] if shared else names if group.rank == 0 else []
    found = wrong(path / str(number), {name: listed.files[name] for name in mine})
    return next(filter(None, group.all_gather_object(found)), "")


def _tell(folder: Folder, found: Found | None, damaged: Sequence[str], begun: Sequence[int]) -> None:
    if begun:
        say(f"checkpoints in {folder.path} that were not finished, and count as none: step {begun}.")
    if found and damaged:
        say(f"checkpoints in {folder.path} that are not whole: {'; '.join(damaged)}.")


def report_restored(folder: Folder, number: int, listed: Listed) -> None:
    """Reports on rank 0 where training goes on, and what is lost on another number of replicas."""
    if folder.group.rank != 0:
        return
    say(f"training goes on from step {number}, from {folder.path}.")
    if (before := listed.told["replicas"]) != folder.group.size:
        hooks = "; the memory of hooks starts again" * any(part_of_state(name) == "hook_state" for name in listed.forms)
        say(f"it was on {before} replicas and is on {folder.group.size}{hooks}.")
