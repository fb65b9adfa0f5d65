"""Local steps of islands that wait for each other at every synchronization."""

from collections.abc import Callable, Mapping
from typing import Any, Literal

import optax

from fddp.local_training.local_optimizer import LocalSteps
from fddp.local_training.local_runner import local_way
from fddp.local_training.periods import read_periods
from fddp.step import Way
from fddp.wording import check_whole


class SyncSteps(LocalSteps):
    """Local steps of islands that wait for each other."""

    def way(self, inner: Way) -> Way:
        """Returns the way of local steps, whose islands hold their state in the way `inner`."""
        return local_way(self, inner)


def sync_steps(
    optimizer: optax.GradientTransformation,
    outer: optax.GradientTransformation | None,
    every: int | Callable[[int], int] | Mapping[str, int | Callable[[int], int]],
    start: int,
    fragments: int,
    delay: int,
    mix: float,
    island: int | Literal["node"],
) -> SyncSteps:
    """Checks the arguments of `fddp.local_steps`, except those of a quorum."""
    outer = optax.sgd(1.0) if outer is None else outer
    _check_optimizer("optimizer", optimizer)
    _check_optimizer("outer", outer)
    if island != "node":
        check_whole("island", island, 1)
    check_whole("start", start, 0)
    check_whole("fragments", fragments, 1)
    if delay not in (0, 1) or isinstance(delay, bool):
        raise ValueError(
            f"delay must be 0 or 1, got {delay!r}: what a step sends has come when it ends. Where "
            "a fragment takes longer than a step, give more fragments."
        )
    every, others = read_periods(every, delay)
    if isinstance(mix, bool) or not isinstance(mix, int | float) or not 0 <= mix <= 1:
        raise ValueError(f"mix must be a number from 0 to 1, got {mix!r}.")
    if fragments > 1 and (callable(every) or fragments > every):
        raise ValueError(
            "local_steps sends one fragment a step at most, so fragments must be no more than "
            f"every, a number; got {fragments=}, {every=}."
        )
    return SyncSteps(optimizer, outer, every, start, fragments, delay, mix, others, island)


def _check_optimizer(name: str, value: Any) -> None:
    if not hasattr(value, "init") or not hasattr(value, "update"):
        raise TypeError(
            f"local_steps: {name} must be one of optax's optimizers, got {type(value).__name__}."
        )
    if isinstance(value, LocalSteps):
        raise TypeError(
            f"local_steps: {name} is one of local_steps itself; give the optimizer inside of it."
        )
