"""Picks the way in which replicas hold a state, once, from the options and the optimizer of a step."""

from fddp.optim import LocalSteps, Optimizer
from fddp.step.local_runner import alone
from fddp.step.options import Options
from fddp.step.shards import sharded
from fddp.step.virtual import virtual
from fddp.step.way import WHOLE, Way


def way_of(options: Options, optimizer: Optimizer | None = None) -> Way:
    """Picks the way.

    Args:
      options: of the step.
      optimizer: of the step, if it has one.

    Returns:
      The way. Options that do not go with it are refused where the step is made of both.
    """
    if isinstance(optimizer, LocalSteps):
        return alone(optimizer)
    if options.virtual_replicas:
        return virtual(options.virtual_replicas)
    if options.shard:
        return sharded(options.shard)
    return WHOLE
