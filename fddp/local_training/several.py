"""All exchanges of one step, as one set of messages."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import NamedTuple, TypeAlias

from jaxtyping import Array, PyTree

from fddp.buckets import Messages
from fddp.hooks import Reduction
from fddp.local_training.fragments import Fragment
from fddp.local_training.own_means import OwnMean
from fddp.local_training.wire import Averaged
from fddp.step import LocalState, TrainState

NOTHING = Messages((), ((), None))
Exchange: TypeAlias = Fragment | OwnMean
"""A mean over islands, and the update from it."""


class Several(NamedTuple):
    """The exchanges of one step."""

    of: tuple[Exchange, ...]

    @property
    def sums(self) -> tuple[Reduction, ...]:
        """Sums over islands."""
        return tuple(reduction for exchange in self.of for reduction in exchange.wire.sums)

    @property
    def gathers(self) -> tuple[Reduction, ...]:
        """Gathers inside an island."""
        return tuple(reduction for exchange in self.of for reduction in exchange.wire.gathers)

    @property
    def renews(self) -> list[int]:
        """Numbers of the means that restart."""
        return sorted({number for exchange in self.of for number in exchange.renews})

    def changed(
        self, local: LocalState, view: TrainState, rows: PyTree
    ) -> tuple[Messages, list[Messages]]:
        """Packs the messages of all exchanges, and returns the layouts of each for `taken`."""
        packed = [exchange.changed(local, view, rows) for exchange in self.of]
        arrays = tuple(array for messages in packed for array in messages.arrays)
        return replace(NOTHING, arrays=arrays), [
            replace(messages, arrays=()) for messages in packed
        ]

    def taken(self, layouts: Sequence[Messages], arrays: Sequence[Array]) -> list[Messages]:
        """Splits the summed arrays into the messages of each exchange."""
        remaining = iter(arrays)
        counts = (len(exchange.wire.sums) for exchange in self.of)
        return [
            replace(layout, arrays=_next(remaining, count))
            for layout, count in zip(layouts, counts)
        ]

    def averaged(self, sums: Sequence[Messages]) -> list[Averaged]:
        """Computes the mean of each exchange."""
        return [exchange.wire.averaged(messages) for exchange, messages in zip(self.of, sums)]

    def to_gather(self, means: Sequence[Averaged]) -> tuple[tuple[Array, ...], list[Averaged]]:
        """Separates the buckets to gather from the means."""
        gathers = [bool(exchange.wire.gathers) for exchange in self.of]
        buckets = (
            bucket for mean, gather in zip(means, gathers) if gather for bucket in mean.buckets
        )
        return tuple(buckets), [
            mean._replace(buckets=()) if gather else mean for mean, gather in zip(means, gathers)
        ]

    def gathered(self, means: Sequence[Averaged], buckets: Sequence[Array]) -> list[Averaged]:
        """Puts gathered buckets into the means: the inverse of `to_gather`."""
        remaining = iter(buckets)
        counts = (len(exchange.wire.gathers) for exchange in self.of)
        return [
            mean._replace(buckets=_next(remaining, n)) if n else mean
            for mean, n in zip(means, counts)
        ]

    def landed(
        self, local: LocalState, state: TrainState, means: Sequence[Averaged]
    ) -> tuple[LocalState, TrainState]:
        """Applies all means to the state of an island."""
        for exchange, mean in zip(self.of, means):
            local, state = exchange.landed(local, state, mean)
        return local, state


def _next(arrays: Iterator[Array], count: int) -> tuple[Array, ...]:
    return tuple(islice(arrays, count))
