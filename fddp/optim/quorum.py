"""The rule of a quorum: when the pseudo-gradients of islands that do not wait for each other make an outer step.

An outer step is made when enough islands have sent theirs and a grace period is over. Whoever comes later is merged in
the next one. Pure functions of versions and times: no clock is read here.

Source: Decoupled DiLoCo (arXiv 2604.21428) for quorum and grace; Ho et al., "More Effective Distributed ML via a Stale
Synchronous Parallel Parameter Server" (2013) for the bound, which counts outer steps here.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from fddp.wording import check_whole


@dataclass(frozen=True)
class Quorum:
    """The rule by which the pseudo-gradients of islands are merged; made by `make_quorum`."""

    count: int
    """Number of islands that are waited for."""
    grace_s: float = 0.0
    max_staleness: int | None = None
    discount: Callable[[Any], Any] | None = None
    """The factor of a weight by its age; None: 1."""
    log: str | None = None

    def __repr__(self) -> str:
        """Names a function by its name, so that the text is equal on ranks that were given the same options."""
        name = getattr(self.discount, "__name__", type(self.discount).__name__)
        rest = f"grace_s={self.grace_s}, max_staleness={self.max_staleness}, discount={name}, log={self.log!r}"
        return f"quorum={self.count}, {rest}"


class Arrival(NamedTuple):
    """A contribution that waits to be merged."""

    island: int
    at: float
    """The time at which it came, in seconds."""


def due_at(rule: Quorum, version: int, began: Mapping[int, int], arrivals: Sequence[Arrival]) -> float | None:
    """Finds when the contributions that wait are to be merged.

    Args:
      rule: of the quorum.
      version: number of merges so far.
      began: for each island that takes part, the version that it began from.
      arrivals: contributions that wait, one of an island at most.

    Returns:
      The time, in seconds; None as long as others have to come first.

    Example:
      >>> rule = Quorum(2, grace_s=1.0)
      >>> due_at(rule, 0, {0: 0, 1: 0, 2: 0}, [Arrival(2, 3.0)])
      >>> due_at(rule, 0, {0: 0, 1: 0, 2: 0}, [Arrival(2, 3.0), Arrival(0, 5.0)])
      6.0
    """
    came = {one.island: one.at for one in arrivals}
    needed = min(rule.count, len(began))  # islands that have left are waited for in vain
    # A merge without them would let these grow older than the rule allows.
    oldest = [i for i, v in began.items() if rule.max_staleness is not None and version - v >= rule.max_staleness]
    if not came or len(came) < needed or any(i not in came for i in oldest):
        return None
    times = sorted(came.values())
    complete = max([times[max(needed, 1) - 1], *(came[i] for i in oldest)]) + rule.grace_s
    return min(complete, times[-1]) if came.keys() >= began.keys() else complete


def make_quorum(
    count: int | None,
    grace_s: float,
    max_staleness: int | None,
    discount: Callable[[Any], Any] | None,
    log: str | Path | None,
) -> Quorum | None:
    """Makes the rule of what `local_steps` was given.

    Args:
      count: number of islands that are waited for; None: all.
      grace_s: seconds for which a quorum waits for more.
      max_staleness: outer steps by which a pseudo-gradient may be late; None: any number.
      discount: gives the factor of a weight by its age; None: 1.
      log: file of the order of merges; None: it is not written.

    Returns:
      The rule; None without a quorum.

    Raises:
      ValueError: a number is out of its range, or given without a quorum.
      TypeError: a number is none, or `discount` is no function.
    """
    if count is None:
        rules = {"grace_s": grace_s or None, "max_staleness": max_staleness, "discount": discount, "log": log}
        given = [name for name, value in rules.items() if value is not None]
        if given:
            raise ValueError(f"{given[0]} is a rule of islands that do not wait: give quorum, too.")
        return None
    check_whole("quorum", count, 1)
    if isinstance(grace_s, bool) or not isinstance(grace_s, int | float) or not 0 <= grace_s < float("inf"):
        raise ValueError(f"grace_s must be a number of seconds of 0 or more, got {grace_s!r}.")
    if max_staleness is not None:
        check_whole("max_staleness", max_staleness, 0)
    if discount is not None and not callable(discount):
        raise TypeError(f"discount must be a function of an age, got {type(discount).__name__}.")
    return Quorum(count, float(grace_s), max_staleness, discount, None if log is None else str(log))
