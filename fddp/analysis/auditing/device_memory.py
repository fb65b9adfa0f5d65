"""The memory that a step needs, as XLA plans it before anything runs."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from fddp.buckets import MiB
from fddp.wording import table

# How replicas may hold a state, as options of `fddp.train_step`.
WAYS: dict[str, dict[str, Any]] = {
    "whole": {},
    "shard='optimizer'": {"shard": "optimizer"},
    "shard='state'": {"shard": "state"},
    "shard='state', reshard_after_forward": {"shard": "state", "reshard_after_forward": True},
}


class Memory(NamedTuple):
    """The bytes of one device that a program needs."""

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


def memory_of(compiled: jax.stages.Compiled) -> Memory | None:
    """Reads what XLA has planned.

    Args:
      compiled: a program.

    Returns:
      The bytes; None where the platform does not tell.
    """
    told: Any = compiled.memory_analysis()
    if told is None:
        return None
    # An output that is written where an argument lies takes nothing.
    more = told.temp_size_in_bytes + told.output_size_in_bytes - told.alias_size_in_bytes
    return Memory(told.argument_size_in_bytes, more)


def memory_table(audit: Callable[[dict[str, Any]], Any]) -> str:
    """Compares the ways in which replicas may hold a state.

    Args:
      audit: (options of a step) → its `Audit` for a target.

    Returns:
      A table: the memory of each way, and the estimate of its step.
    """
    rows: list[tuple[str, ...]] = [("each replica holds", "MiB of state", "MiB at its peak", "ms a step", "ms exposed")]
    for way, options in WAYS.items():
        found = audit(options)
        mib = [f"{n / MiB:.1f}" for n in (found.memory.given, found.memory.peak)]
        ms = [f"{1e3 * seconds:.2f}" for seconds in (found.timeline.seconds, found.timeline.exposed)]
        rows.append((way, *mib, *ms))
    return "\n".join(table(rows))
