"""Writes a checkpoint jointly: each rank on a background thread, and rank 0 finishes it."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from shutil import rmtree
from typing import Any, NamedTuple

from fddp.buckets import is_shard
from fddp.checkpoints.files import Listed, digests, finish, swept
from fddp.checkpoints.folder import Folder, remark
from fddp.checkpoints.host_arrays import copy_gathered, copy_local, is_distributed
from fddp.checkpoints.pending import metrics_literal
from fddp.checkpoints.reports import WAIT_S, collect_reports, part, report, report_failure
from fddp.checkpoints.state_forms import by_path, form
from fddp.checkpoints.stored_arrays import Portion, write, write_contents
from fddp.step import TrainState


class Saved(NamedTuple):
    """One rank's part of a checkpoint to be written."""

    number: int
    """Number of the step."""
    portions: list[Portion]
    """This rank's pieces of the arrays."""
    listed: Listed
    """The checkpoint's list, without files."""
    writers: Sequence[int]
    """The ranks that write."""


def copy_part(folder: Folder, number: int, state: TrainState, values: Mapping[str, Any]) -> Saved:
    """Copies this rank's part of a state, to be saved with `values`; every rank calls it."""
    group, _, shared, *_ = folder
    together = shared and is_distributed(group, state)
    portions = copy_local(group, state) if shared else copy_gathered(group, state)
    leaves = by_path(state)
    forms = {name: form(group, name, x) for name, x in leaves.items()}
    cuts = dict[str, Any]()
    if shared:
        shards = {name: x.layout.cut.dims for name, x in leaves.items() if is_shard(x)}
        cuts = {name: dims for name, dims in shards.items() if dims}
    listed = Listed({**values, "metrics": metrics_literal(state)}, forms, {}, cuts)
    return Saved(number, portions, listed, range(group.processes if together else 1))


def sweep(folder: Folder, token: str) -> None:
    """Removes unfinished folders of killed jobs; reports those of jobs that may be running."""
    if active := swept(folder.path, token, WAIT_S):
        remark(
            f"another job has written {', '.join(active)} in {folder.path} within "
            f"{WAIT_S / 60:.0f} minutes: if it still runs, give each job its own folder; if it was "
            "killed, a later save removes this."
        )


def write_part(
    folder: Folder, staging: Path, saved: Saved, keep: int, ending: Callable[[], bool]
) -> Exception | None:
    """Writes this rank's part into `staging`; rank 0 waits for the other ranks and finishes.

    Calls no collective. The arrays of `saved` are freed one by one. Returns the error that it
    printed, or None.
    """
    rank = folder.group.rank
    failure = None
    try:
        write(part(staging, rank), (saved.portions.pop() for _ in range(len(saved.portions))))
        report(staging, rank)
    except Exception as error:  # training continues, and a later save may find more space
        failure = error
        report_failure(staging, rank, error)
    if rank == 0:
        try:
            _finish(folder, staging, saved, keep, ending)
        except Exception as error:
            failure = failure or error
            rmtree(staging, ignore_errors=True)
    if failure is None:
        return None
    owner = f"rank {rank}'s part of " if rank else ""
    remark(
        f"{owner}the checkpoint of step {saved.number} could not be written: "
        f"{type(failure).__name__}: {failure}"
    )
    return failure.with_traceback(None)  # a traceback would keep the arrays alive


def _finish(
    folder: Folder, staging: Path, saved: Saved, keep: int, ending: Callable[[], bool]
) -> None:
    """Waits for all ranks, and makes their parts a checkpoint."""
    files = collect_reports(staging, saved.writers, ending)
    write_contents(staging, [part(staging, writer) for writer in saved.writers])
    files |= digests(staging, staging, files)
    finish(
        folder.path, staging, saved.number, saved.listed._replace(files=files), keep, folder.opened
    )
