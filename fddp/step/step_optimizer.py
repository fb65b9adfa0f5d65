"""The optimizer of a step: an optax transformation, or a record that brings its own strategy."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

import optax
from jaxtyping import PyTree

from fddp.comm import Group
from fddp.optim import check_needs

if TYPE_CHECKING:  # `Strategy` has functions of an optimizer
    from fddp.step.strategy import Strategy


@dataclass(frozen=True)
class StepOptimizer:
    """An optax transformation, of a step with the options' strategy; subclasses bring another."""

    inner: optax.GradientTransformation = field(repr=False)
    """Updates parameters with gradients."""

    def init(self, params: PyTree) -> Any:
        """Initializes the optimizer's state."""
        return self.inner.init(params)

    def check_needs(self, params: PyTree = None) -> None:
        """Raises TypeError if a transformation requires arguments that a step lacks."""
        check_needs(self.inner, params)

    def on(self, group: Group) -> "StepOptimizer":
        """Returns the optimizer of a step on this group."""
        del group
        return self

    def strategy(self, inner: "Strategy") -> "Strategy":
        """Returns the strategy of its steps; `inner` is the options' strategy."""
        return inner


# An optimizer that a user passes.
Optimizer: TypeAlias = optax.GradientTransformation | StepOptimizer


def read_optimizer(call: str, value: Any) -> StepOptimizer:
    """Makes the optimizer of a step; raises TypeError unless it needs only gradients and loss."""
    if not hasattr(value, "init") or not hasattr(value, "update"):
        # Flax's optimizers and train states hold an optax optimizer in `tx`.
        kind = type(value).__name__
        if hasattr(value, "tx"):
            kind += "; pass its .tx"
        raise TypeError(f"fddp.{call}: optimizer must be one of optax's, got {kind}.")
    if not isinstance(value, StepOptimizer):
        value = StepOptimizer(value)
    value.check_needs()
    return value
