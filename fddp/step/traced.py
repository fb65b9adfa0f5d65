"""The program of one micro-batch, which the first batch traces and reads."""

from functools import partial
from typing import Any

from jaxtyping import PyTree

from fddp.losses import Sums, contribute, reached
from fddp.step.replica import Replica, no_sums
from fddp.step.state import TrainState


def contribution(replica: Replica, state: TrainState, micro_batch: PyTree) -> Sums:
    """Computes the weighted sums of one micro-batch."""
    return contribute(*_arguments(replica, state, micro_batch)).sums


def marked_paths(replica: Replica, state: TrainState, micro_batch: PyTree) -> tuple[bool, ...]:
    """Marks the trained leaves with a path to the loss; all, without
    `find_unused_parameters`."""
    if not replica.options.find_unused_parameters:
        return (True,) * len(replica.chosen(state.params))
    return reached(*_arguments(replica, state, micro_batch))


def _arguments(replica: Replica, state: TrainState, micro_batch: PyTree) -> tuple[Any, ...]:
    """Returns the arguments of `contribute` for one micro-batch."""
    start = no_sums(state)
    objective = partial(replica.objective, unit=replica.unit)
    return (
        objective,
        replica.chosen(state.params),
        state.params,
        start,
        replica.key(state, start),
        micro_batch,
    )
