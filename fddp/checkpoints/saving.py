"""A checkpoint is written by several ranks, each on a thread of its own, and finished by rank 0's."""

from collections.abc import Callable, Sequence
from pathlib import Path
from shutil import rmtree
from typing import Any, NamedTuple

from fddp.buckets import is_shard
from fddp.checkpoints.files import Listed, digests, finish, swept
from fddp.checkpoints.folder import Folder, say
from fddp.checkpoints.host_arrays import gathered, held, lies_apart
from fddp.checkpoints.pending import metrics_literal
from fddp.checkpoints.reports import WAIT_S, collected, part, report, report_failure
from fddp.checkpoints.state_forms import form, named
from fddp.checkpoints.stored_arrays import Portion, join, write
from fddp.step import TrainState


class Saved(NamedTuple):
    """A checkpoint that is to be written, as far as one rank writes it."""

    number: int
    """The step after which it was made."""
    portions: list[Portion]
    """The arrays that this rank writes, with its pieces of them."""
    listed: Listed
    """The checkpoint's list, without files."""
    writers: Sequence[int]
    """The ranks that write."""


def taken(folder: Folder, number: int, state: TrainState, told: Any) -> Saved:
    """Copies what this rank writes of a state; every rank calls it.

    Args:
      folder: the checkpoints.
      number: the step after which the state was made.
      state: from the last step.
      told: what is saved beside it.

    Returns:
      The copies.
    """
    group, _, shared, *_ = folder
    together = shared and lies_apart(group, state)
    portions = held(group, state) if shared else gathered(group, state)
    leaves = named(state)
    forms = {name: form(group, name, x) for name, x in leaves.items()}
    cuts = {name: x.cut.dims for name, x in leaves.items() if shared and is_shard(x) and x.cut.dims}
    listed = Listed({**told, "metrics": metrics_literal(state)}, forms, {}, cuts)
    return Saved(number, portions, listed, range(group.processes if together else 1))


def sweep(folder: Folder, token: str) -> None:
    """Removes what killed jobs began to write, and names what another job may be writing."""
    if active := swept(folder.path, token, WAIT_S):
        say(
            f"another job has written {', '.join(active)} in {folder.path} within {WAIT_S / 60:.0f} minutes: if it "
            "still runs, give each job its own folder; if it was killed, a later save removes this."
        )


def written(folder: Folder, begun: Path, saved: Saved, keep: int, ending: Callable[[], bool]) -> Exception | None:
    """Writes what this rank has of a checkpoint; rank 0 waits for the others, and finishes it. Sends nothing.

    Args:
      folder: the checkpoints.
      begun: where all ranks write; the same on all, and new.
      saved: what to write; forgotten leaf by leaf.
      keep: how many of the newest checkpoints to keep.
      ending: whether training has ended with an error.

    Returns:
      The error that was told, or None.
    """
    rank = folder.group.rank
    failure = None
    try:
        write(part(begun, rank), (saved.portions.pop() for _ in range(len(saved.portions))))
        report(begun, rank)
    except Exception as error:  # training goes on without it, and may have more room the next time
        failure = error
        report_failure(begun, rank, error)
    if rank == 0:
        try:
            _finish(folder, begun, saved, keep, ending)
        except Exception as error:
            failure = failure or error
            rmtree(begun, ignore_errors=True)
    if failure is None:
        return None
    which = f"rank {rank}'s part of " if rank else ""
    say(f"{which}the checkpoint of step {saved.number} could not be written: {type(failure).__name__}: {failure}")
    return failure.with_traceback(None)  # which would keep what was to be written


def _finish(folder: Folder, begun: Path, saved: Saved, keep: int, ending: Callable[[], bool]) -> None:
    """Makes a checkpoint of what all ranks have written, once they have."""
    files = collected(begun, saved.writers, ending)
    join(begun, [part(begun, writer) for writer in saved.writers])
    files |= digests(begun, begun, files)
    finish(folder.path, begun, saved.number, saved.listed._replace(files=files), keep, folder.opened)
