"""The memory that a step needs, as XLA plans it before anything runs."""

from collections.abc import Callable
from typing import Any, NamedTuple

from fddp.buckets import MiB
from fddp.schedules import Footprint
from fddp.wording import table

# How replicas may hold a state, as options of `fddp.train_step`.
WAYS: dict[str, dict[str, Any]] = {
    "whole": {},
    "shard='optimizer'": {"shard": "optimizer"},
    "shard='state'": {"shard": "state"},
    "shard='state', reshard_after_forward": {"shard": "state", "reshard_after_forward": True},
}


class Memory(NamedTuple):
    """The bytes of one device that a step needs."""

    given: int
    """The state and the rows."""
    more: int
    """The bytes allocated beside them, at a step's peak: activations, gradients, messages, whole parameters."""

    @property
    def peak(self) -> int:
        """All of it."""
        return self.given + self.more

    def __str__(self) -> str:
        return f"{self.given / MiB:.1f} MiB of state and rows, {self.more / MiB:.1f} MiB more at a step's peak"


def memory_of(found: Footprint | None) -> Memory | None:
    """The two numbers of a footprint.

    Args:
      found: the memory of a step, task by task; None where the platform does not tell.

    Returns:
      The bytes of state and rows, and those of the fullest task beside them.
    """
    return found and Memory(found.rests, found.peak - found.rests)


def memory_table(audit: Callable[[dict[str, Any]], Any]) -> str:
    """Compares the ways in which replicas may hold a state.

    Args:
      audit: (options of a step) → its `Audit` for a target.

    Returns:
      A table: the memory of each way, and the estimate of its step.
    """
    head = ("each replica holds", "MiB of state and rows", "MiB at its peak", "ms a step", "ms exposed")
    rows: list[tuple[str, ...]] = [head]
    for way, options in WAYS.items():
        found = audit(options)
        mib = [f"{n / MiB:.1f}" for n in (found.memory.given, found.memory.peak)] if found.memory else ["–", "–"]
        line = found.timeline
        ms = [f"{1e3 * seconds:.2f}" for seconds in (line.seconds, line.exposed)] if line else ["–", "–"]
        rows.append((way, *mib, *ms))
    return "\n".join(table(rows))


def table_of_tasks(where: str, found: Footprint) -> str:
    """Shows the memory at each task of a step of several programs.

    Args:
      where: what it is compiled for.
      found: its memory.

    Returns:
      A table, and the peak below it.
    """
    rows = [("task", "MiB there"), *((task, f"{nbytes / MiB:.2f}") for task, nbytes in found.moments)]
    return "\n".join([*table(rows), f"{where}: memory of a device: {memory_of(found)}, in {found.fullest.task}"])
