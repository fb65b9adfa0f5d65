"""The merge rule of asynchronous islands: when their pseudo-gradients make an outer step.

An outer step is due once enough islands have sent pseudo-gradients and a grace period has passed.
Later ones enter the next step. All functions are pure: they take versions and times, and read no
clock.

Source: Decoupled DiLoCo (arXiv 2604.21428) for quorum and grace; Ho et al., "More Effective
Distributed ML via a Stale Synchronous Parallel Parameter Server" (2013) for the bound, which counts
outer steps here.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from fddp.wording import check_range, check_whole

# Age of a contribution, in merges → factor of its weight
Discount: TypeAlias = Callable[[Any], Any]


@dataclass(frozen=True)
class Quorum:
    """The merge rule, from `make_quorum`."""

    count: int
    """Number of islands that a merge waits for."""
    grace_s: float = 0.0
    max_staleness: int | None = None
    discount: Discount | None = None
    """None: 1."""
    log: str | None = None

    def __repr__(self) -> str:
        """Shows a function by its name, so that the text is equal on all ranks."""
        name = getattr(self.discount, "__name__", type(self.discount).__name__)
        options = (
            f"grace_s={self.grace_s}, max_staleness={self.max_staleness}, discount={name}, "
            f"log={self.log!r}"
        )
        return f"quorum={self.count}, {options}"


class Arrival(NamedTuple):
    """A contribution that waits for its merge."""

    island: int
    at: float
    """Time of arrival, in seconds."""


def due_at(
    rule: Quorum, version: int, versions: Mapping[int, int], arrivals: Sequence[Arrival]
) -> float | None:
    """Computes the time of the next merge, in seconds; None until more contributions arrive.

    `version` is the number of merges so far, `versions` maps each active island to the version it
    trains from, and `arrivals` holds at most one contribution per island.

    >>> rule = Quorum(2, grace_s=1.0)
    >>> due_at(rule, 0, {0: 0, 1: 0, 2: 0}, [Arrival(2, 3.0)])
    >>> due_at(rule, 0, {0: 0, 1: 0, 2: 0}, [Arrival(2, 3.0), Arrival(0, 5.0)])
    6.0
    """
    arrival_times = {arrival.island: arrival.at for arrival in arrivals}
    count = min(rule.count, len(versions))  # islands that have left send nothing more
    # A merge without these islands would make them staler than the rule allows.
    oldest = list[int]()
    if rule.max_staleness is not None:
        oldest = [i for i, v in versions.items() if version - v >= rule.max_staleness]
    if len(arrival_times) < max(count, 1) or not arrival_times.keys() >= set(oldest):
        return None
    times = sorted(arrival_times.values())
    complete = max([times[max(count, 1) - 1], *(arrival_times[i] for i in oldest)]) + rule.grace_s
    if arrival_times.keys() >= versions.keys():
        return min(complete, times[-1])
    return complete


def make_quorum(
    count: int | None,
    grace_s: float,
    max_staleness: int | None,
    discount: Discount | None,
    log: str | Path | None,
) -> Quorum | None:
    """Checks the arguments of `local_steps` that make up the merge rule; None without a quorum."""
    if count is None:
        options = {
            "grace_s": grace_s or None,
            "max_staleness": max_staleness,
            "discount": discount,
            "log": log,
        }
        unused = [name for name, value in options.items() if value is not None]
        if unused:
            raise ValueError(
                f"{unused[0]} is an option of islands that do not wait: give quorum, too."
            )
        return None
    check_whole("quorum", count, 1)
    grace_s = check_range(
        "grace_s", grace_s, "a number of seconds of 0 or more", lambda x: 0 <= x < float("inf")
    )
    if max_staleness is not None:
        check_whole("max_staleness", max_staleness, 0)
    if discount is not None and not callable(discount):
        raise TypeError(f"discount must be a function of an age, got {type(discount).__name__}.")
    return Quorum(count, grace_s, max_staleness, discount, None if log is None else str(log))
