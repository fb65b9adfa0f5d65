"""Several means side by side: all that a step sends to other islands."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any, NamedTuple, TypeAlias

from jaxtyping import Array

from fddp.buckets import Messages
from fddp.hooks import Reduction
from fddp.local_training.fragments import Fragment
from fddp.local_training.own_means import OwnMean
from fddp.local_training.wire import Averaged
from fddp.optim import LocalState
from fddp.step import TrainState

NOTHING = Messages((), ((), None))
Exchange: TypeAlias = Fragment | OwnMean
"""A message that islands send each other, and their use of its mean."""


class Several(NamedTuple):
    """Exchanges of one step."""

    of: tuple[Exchange, ...]

    @property
    def sums(self) -> tuple[Reduction, ...]:
        """The sums over islands."""
        return tuple(one for exchange in self.of for one in exchange.wire.sums)

    @property
    def gathers(self) -> tuple[Reduction, ...]:
        """The gathers inside of an island."""
        return tuple(one for exchange in self.of for one in exchange.wire.gathers)

    @property
    def renews(self) -> list[int]:
        """The numbers of the means that begin anew."""
        return sorted({number for exchange in self.of for number in exchange.renews})

    def changed(self, local: LocalState, view: TrainState, rows: Any) -> tuple[Messages, list[Messages]]:
        """Makes the messages of all exchanges; and the layouts of each one's, for `taken`."""
        each = [exchange.changed(local, view, rows) for exchange in self.of]
        arrays = tuple(array for messages in each for array in messages.arrays)
        return replace(NOTHING, arrays=arrays), [replace(messages, arrays=()) for messages in each]

    def taken(self, layouts: Sequence[Messages], came: Sequence[Array]) -> list[Messages]:
        """The messages of each exchange, of the sums of all."""
        left = iter(came)
        counts = (len(exchange.wire.sums) for exchange in self.of)
        return [replace(layout, arrays=_next(left, count)) for layout, count in zip(layouts, counts)]

    def averaged(self, came: Sequence[Messages]) -> list[Averaged]:
        """The mean of each exchange."""
        return [exchange.wire.averaged(messages) for exchange, messages in zip(self.of, came)]

    def to_gather(self, means: Sequence[Averaged]) -> tuple[tuple[Array, ...], list[Averaged]]:
        """The buckets whose parts an island gathers, and the means without them."""
        gathers = [bool(exchange.wire.gathers) for exchange in self.of]
        buckets = (bucket for mean, some in zip(means, gathers) if some for bucket in mean.buckets)
        return tuple(buckets), [mean._replace(buckets=()) if some else mean for mean, some in zip(means, gathers)]

    def gathered(self, means: Sequence[Averaged], buckets: Sequence[Array]) -> list[Averaged]:
        """The means with the buckets that were gathered: the inverse of `to_gather`."""
        left = iter(buckets)
        counts = (len(exchange.wire.gathers) for exchange in self.of)
        return [mean._replace(buckets=_next(left, n)) if n else mean for mean, n in zip(means, counts)]

    def landed(self, local: LocalState, own: TrainState, means: Sequence[Averaged]) -> tuple[LocalState, TrainState]:
        """Gives the state with which an island goes on, once all have come."""
        for exchange, mean in zip(self.of, means):
            local, own = exchange.landed(local, own, mean)
        return local, own


def _next(left: Iterator[Array], count: int) -> tuple[Array, ...]:
    return tuple(islice(left, count))
