"""The optimizer of replicas that train separately and average their progress every few steps.

The mean of shared − local parameters over replicas is a pseudo-gradient for the outer optimizer.
One formula has many names: local SGD (outer `sgd(1.0)`, which yields the mean of the parameters),
SlowMo (with momentum), DiLoCo (`sgd(0.7, momentum=0.9, nesterov=True)`), Lookahead (one replica).

Source: Stich, "Local SGD Converges Fast and Communicates Little" (2019); Lin et al., "Don't Use
Large Mini-Batches, Use Local SGD" (2020); Wang et al., "SlowMo" (2020); Douillard et al., "DiLoCo"
(2023).
"""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import PyTree

from fddp.comm import Group
from fddp.optim import check_needs
from fddp.step import LOCAL, StepOptimizer, Strategy
from fddp.training.local_strategy import LocalStrategy
from fddp.wording import check_has, check_whole


def local_steps(
    optimizer: optax.GradientTransformation,
    *,
    outer: optax.GradientTransformation | None = None,
    every: int = 1,
    start: int = 0,
) -> "LocalSteps":
    """Makes an optimizer for replicas that train separately and synchronize periodically.

    Between two synchronizations a step sends nothing, and its loss and metrics are those of this
    process's first replica. `state.params` are the parameters of the last synchronization, equal on
    all replicas; `state.opt_state` is a `LocalState`, with each replica's local parameters.

    Args:
      optimizer: the inner optimizer of each replica: any optax transformation.
      outer: the outer optimizer: any optax transformation. Its gradient is the pseudo-gradient, the
        mean of shared − local parameters over the replicas. None: `optax.sgd(1.0)`, which yields
        the mean of the local parameters.
      every: number of steps from one synchronization to the next.
      start: number of initial steps that average gradients, as without `local_steps`.

    Returns:
      The optimizer, for `train_step`.

    Raises:
      ValueError: a number is out of range.
      TypeError: an optimizer is not an optax transformation, or a number has another type.

    Example:
      >>> import fddp, jax.numpy as jnp, optax
      >>> optimizer = fddp.local_steps(optax.sgd(0.25), every=2)
      >>> step = fddp.train_step(lambda w, x: jnp.mean((x - w) ** 2), optimizer)
      >>> state = step.init(jnp.zeros(()))
      >>> for _ in range(2):
      ...     state, info = step(state, jnp.full(8, 2.0))
      ...     print(float(state.params), float(fddp.whole(state.opt_state.params)[0]))
      0.0 1.0
      1.5 1.5
    """
    outer = optax.sgd(1.0) if outer is None else outer
    for name, value in (("optimizer", optimizer), ("outer", outer)):
        check_has("update", f"local_steps: {name}", value, "one of optax's optimizers")
        if isinstance(value, LocalSteps):
            raise TypeError(
                f"local_steps: {name} is a local_steps optimizer already; give the optimizer "
                "inside of it."
            )
    check_whole("every", every, 1)
    check_whole("start", start, 0)
    return LocalSteps(optimizer, outer, every, start)


class LocalState(NamedTuple):
    """The optimizer state of `local_steps`."""

    outer: Any
    """State of the outer optimizer, equal on all replicas."""
    params: Any
    """The replicas' local parameters, stacked along a first dim; each replica holds its own."""
    inner: Any
    """The replicas' states of the inner optimizer, stacked and held in the same way."""


@dataclass(frozen=True, repr=False)
class LocalSteps(StepOptimizer):
    """An optimizer of replicas that train separately."""

    outer: optax.GradientTransformation
    """Updates the shared parameters with pseudo-gradients."""
    every: int
    start: int
    replicas: int = 1

    def __repr__(self) -> str:
        """Shows the numbers that must be equal on all ranks."""
        return f"local_steps(every={self.every}, start={self.start})"

    def init(self, params: PyTree) -> Any:
        """Initializes both optimizers; local parameters begin equal."""

        def stacked(tree: PyTree) -> Any:
            return jax.tree.map(lambda x: jnp.broadcast_to(x, (self.replicas, *x.shape)), tree)

        return LocalState(
            self.outer.init(params), stacked(params), stacked(self.inner.init(params))
        )

    def update(self, *args: Any, **extra: Any) -> Any:
        """Raises TypeError: only a step can train replicas separately and synchronize them."""
        raise TypeError(
            "fddp.local_steps cannot be a part of another optimizer: give train_step "
            "local_steps(optimizer, …) itself, with chains, scales and other wrappers inside of it."
        )

    def check_needs(self, params: PyTree = None) -> None:
        """Raises TypeError if one of both optimizers requires arguments that a step lacks."""
        super().check_needs(params)
        check_needs(self.outer, params)

    def on(self, group: Group) -> StepOptimizer:
        """Returns the optimizer of as many replicas as the group has."""
        return replace(self, replicas=group.size)

    def strategy(self, inner: Strategy) -> Strategy:
        """Returns the strategy of local steps."""
        del inner
        return LocalStrategy(
            name=LOCAL, in_shards=True, outer=self.outer, every=self.every, start=self.start
        )
