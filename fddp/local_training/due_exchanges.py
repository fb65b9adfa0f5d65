"""The exchanges that are due in one step, as one set of messages."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from typing import TypeAlias

from jaxtyping import Array, PyTree

from fddp.buckets import Messages
from fddp.hooks import Reduction
from fddp.local_training.fragments import Fragment
from fddp.local_training.local_means import LocalMean
from fddp.local_training.wire import Averaged
from fddp.step import LocalState, TrainState

NOTHING = Messages((), ((), None))
Exchange: TypeAlias = Fragment | LocalMean
"""A mean over islands, and the update from it."""


@dataclass(frozen=True)
class DueExchanges:
    """The exchanges of one step."""

    all: tuple[Exchange, ...]

    @cached_property
    def sums(self) -> tuple[Reduction, ...]:
        """Sums over islands."""
        return tuple(chain.from_iterable(exchange.wire.sums for exchange in self.all))

    @cached_property
    def gathers(self) -> tuple[Reduction, ...]:
        """Gathers inside an island."""
        return tuple(chain.from_iterable(exchange.wire.gathers for exchange in self.all))

    @property
    def renews(self) -> list[int]:
        """Numbers of the means that restart."""
        return sorted(set(chain.from_iterable(exchange.renews for exchange in self.all)))

    def changed(
        self, local: LocalState, view: TrainState, rows: PyTree
    ) -> tuple[Messages, list[Messages]]:
        """Packs the messages of all exchanges, and returns the layouts of each for `taken`."""
        arrays: list[Array] = []
        layouts = []
        for exchange in self.all:
            messages = exchange.changed(local, view, rows)
            arrays += messages.arrays
            layouts.append(replace(messages, arrays=()))
        return replace(NOTHING, arrays=tuple(arrays)), layouts

    def taken(self, layouts: Sequence[Messages], arrays: Sequence[Array]) -> list[Messages]:
        """Splits the summed arrays into the messages of each exchange."""
        taken = []
        for exchange, layout in zip(self.all, layouts):
            count = len(exchange.wire.sums)
            taken.append(replace(layout, arrays=tuple(arrays[:count])))
            arrays = arrays[count:]
        return taken

    def averaged(self, sums: Sequence[Messages]) -> list[Averaged]:
        """Computes the mean of each exchange."""
        return [exchange.wire.averaged(messages) for exchange, messages in zip(self.all, sums)]

    def to_gather(self, means: Sequence[Averaged]) -> tuple[tuple[Array, ...], list[Averaged]]:
        """Separates the buckets to gather from the means."""
        buckets: list[Array] = []
        others = []
        for exchange, mean in zip(self.all, means):
            if exchange.wire.gathers:
                buckets += mean.buckets
                mean = mean._replace(buckets=())
            others.append(mean)
        return tuple(buckets), others

    def gathered(self, means: Sequence[Averaged], buckets: Sequence[Array]) -> list[Averaged]:
        """Puts gathered buckets into the means: the inverse of `to_gather`."""
        whole = []
        for exchange, mean in zip(self.all, means):
            if count := len(exchange.wire.gathers):
                mean = mean._replace(buckets=tuple(buckets[:count]))
                buckets = buckets[count:]
            whole.append(mean)
        return whole

    def landed(
        self, local: LocalState, state: TrainState, means: Sequence[Averaged]
    ) -> tuple[LocalState, TrainState]:
        """Applies all means to the state of an island."""
        for exchange, mean in zip(self.all, means):
            local, state = exchange.landed(local, state, mean)
        return local, state
