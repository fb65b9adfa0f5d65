"""The memory of a step, as XLA plans it before anything runs."""

from collections.abc import Callable
from typing import Any, NamedTuple

from fddp.buckets import MiB
from fddp.schedules import Footprint
from fddp.wording import table

# Options of `fddp.train_step` for each layout of the state.
WAYS: dict[str, dict[str, Any]] = {
    "whole": {},
    "shard='optimizer'": {"shard": "optimizer"},
    "shard='state'": {"shard": "state"},
}
HEAD = ("each replica holds", "MiB of state and rows", "MiB at its peak", "ms a step", "ms exposed")


class Memory(NamedTuple):
    """The bytes of a step on one device."""

    given: int
    """Bytes of the state and the rows."""
    more: int
    """Further bytes at a step's peak: activations, gradients, messages, gathered parameters."""

    @property
    def peak(self) -> int:
        """The sum of both."""
        return self.given + self.more

    def __str__(self) -> str:
        return (
            f"{self.given / MiB:.1f} MiB of state and rows, "
            f"{self.more / MiB:.1f} MiB more at a step's peak"
        )


def memory_of(footprint: Footprint | None) -> Memory | None:
    """Splits the peak of a footprint; None if the platform does not report memory."""
    return footprint and Memory(footprint.rests, footprint.peak - footprint.rests)


def memory_table(audit: Callable[[dict[str, Any]], Any]) -> str:
    """Returns a table of memory and estimated step time for each layout of the state.

    `audit` maps the options of a step to its `Audit` for a target.
    """
    rows: list[tuple[str, ...]] = [HEAD]
    for way, options in WAYS.items():
        report = audit(options)
        mib = ms = ("–", "–")
        if report.memory:
            mib = f"{report.memory.given / MiB:.1f}", f"{report.memory.peak / MiB:.1f}"
        if line := report.timeline:
            ms = f"{1e3 * line.seconds:.2f}", f"{1e3 * line.exposed:.2f}"
        rows.append((way, *mib, *ms))
    return "\n".join(table(rows))


def table_of_tasks(where: str, memory: Footprint) -> str:
    """Returns a table of the memory at each task on a platform, with the peak below it."""
    rows = [("task", "MiB there")]
    for task, nbytes in memory.moments:
        rows.append((task, f"{nbytes / MiB:.2f}"))
    foot = f"{where}: memory of a device: {memory_of(memory)}, in {memory.fullest.task}"
    return "\n".join([*table(rows), foot])
