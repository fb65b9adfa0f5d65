"""Finds the newest intact checkpoint, jointly on all ranks, and reads it."""

from collections.abc import Callable, Sequence
from io import BytesIO

from fddp.checkpoints.archives import Read, open_reader
from fddp.checkpoints.files import Listed, numbers, read_list, wrong
from fddp.checkpoints.folder import Folder, on_rank_0, remark
from fddp.checkpoints.saved_leaves import field_of, words_of


def newest(folder: Folder, wait: Callable[[], object]) -> tuple[int, Listed] | None:
    """Finds the newest intact checkpoint; every rank calls it, and rank 0 reports damaged ones.

    Returns its number and list on all ranks, None without checkpoints; raises RuntimeError if all
    are damaged. `wait` waits for rank 0's writer.
    """

    def listings() -> list[tuple[int, Listed | str]]:
        wait()
        return [(number, read_list(folder.path / str(number))) for number in numbers(folder.path)]

    damaged = list[str]()
    checkpoint = None
    for number, listing in folder.group.broadcast_object(on_rank_0(folder, listings)):
        error = _wrong(folder, number, listing)
        if isinstance(listing, Listed) and not error:
            checkpoint = number, listing
            break
        damaged.append(f"step {number} ({error})")
    if checkpoint and damaged and folder.group.rank == 0:
        remark(f"checkpoints in {folder.path} that are not whole: {'; '.join(damaged)}.")
    if damaged and checkpoint is None:
        raise RuntimeError(
            f"none of the checkpoints in {folder.path} is whole: {'; '.join(damaged)}; to start "
            "from scratch move them away."
        )
    return checkpoint


def source(folder: Folder, number: int, listed: Listed) -> Read:
    """Makes the `Read` of a checkpoint; if only rank 0 sees the folder, it broadcasts the files."""
    paths = [folder.path / str(number) / name for name in listed.files]
    if folder.shared:
        return open_reader(paths, listed.forms)
    data = folder.group.broadcast_object(
        on_rank_0(folder, lambda: [path.read_bytes() for path in paths])
    )
    return open_reader(map(BytesIO, data), listed.forms)


def _wrong(folder: Folder, number: int, listed: Listed | str) -> str:
    """Compares files with their digests, divided among ranks; "" if all files match."""
    if isinstance(listed, str):
        return listed
    group = folder.group
    files = sorted(listed.files.items())
    if folder.shared:
        files = files[group.rank :: group.processes]
    elif group.rank != 0:
        files = []
    damage = wrong(folder.path / str(number), dict(files))
    return next(filter(None, group.all_gather_object(damage)), "")


def report_restored(folder: Folder, number: int, listed: Listed, local: Sequence[str]) -> None:
    """Reports on rank 0 the restored step, and the `local` fields that are not restored."""
    if folder.group.rank != 0:
        return
    remark(f"training goes on from step {number}, from {folder.path}.")
    if (saved_replicas := listed.values["replicas"]) != folder.group.size:
        line = f"it was on {saved_replicas} replicas and is on {folder.group.size}"
        if lost := words_of([name for name in listed.forms if field_of(name) in local]):
            line += f"; not restored: {lost}"
        remark(f"{line}.")
