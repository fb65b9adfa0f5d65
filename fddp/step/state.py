"""The state that a step carries on, and the means that its replicas have in common."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.core import Tracer
from jax.tree_util import GetAttrKey, register_pytree_with_keys
from jaxtyping import Array, Bool, Float, Int, UInt32

from fddp.jax_internals import given_away
from fddp.jaxpr import is_used_up, used_up
from fddp.losses import Pending
from fddp.schedules import Promise


class TrainState(NamedTuple):
    """All that a step carries on: a pytree, equal on all replicas but for `hook_state`, `accumulated`, buffers that are
    not broadcast, and what lies in a `Shard`: parts of one array, or under `fddp.local_steps` copies of their own.

    A step writes the next state where the one that it is given lies, unless it has `donate=False`: whatever else still
    holds arrays of that state (a Flax module, say) then holds deleted ones, and has to copy them before.

    Under `schedule="eager"` a step returns before all of the state is there. Whoever looks at a part of it, in whatever
    way, waits for that part; the next step does not.
    """

    step: Int[Array, ""]
    """Synchronized steps so far."""
    params: Any
    """The tree given to `init`; under `shard="state"` its leaves lie in shards, and `fddp.whole` puts them together."""
    opt_state: Any
    """The optimizer's state for the differentiable leaves of `params`."""
    model_state: Any
    """Buffers, BatchNorm's statistics say; None without."""
    hook_state: Any
    """The communication hook's memory for each trained leaf, each replica's own along a first dim."""
    accumulated: Pending | None
    """Sums that `no_sync` gathered since the last synchronization, each replica's own along a first dim; None: none."""
    rng: Any
    """A random key; None without."""

    def __getattribute__(self, name: str) -> Any:
        part = _there(tuple.__getattribute__(self, name))
        if name == "step" and isinstance(part, jax.Array) and not isinstance(part, Tracer) and given_away(part):
            raise used_up()  # as after an interrupt in the middle of a step
        return part

    def __iter__(self) -> Iterator[Any]:
        return map(_there, tuple.__iter__(self))

    def __getitem__(self, at: Any) -> Any:
        part = tuple.__getitem__(self, at)
        return tuple(map(_there, part)) if isinstance(at, slice) else _there(part)

    def __add__(self, other: Any) -> Any:
        return tuple(self) + other

    def __mul__(self, times: Any) -> Any:
        return tuple(self) * times

    __rmul__ = __mul__

    def __repr__(self) -> str:
        if is_used_up(self):
            return "TrainState(used up: a step has written the next state where this one lay)"
        return f"TrainState({', '.join(f'{name}={value!r}' for name, value in zip(self._fields, self))})"


# What JAX itself does for a NamedTuple does not ask `__iter__`.
register_pytree_with_keys(
    TrainState,
    lambda state: (tuple((GetAttrKey(name), value) for name, value in zip(state._fields, state)), None),
    lambda _, values: TrainState(*values),
    lambda state: (tuple(state), None),
)


class Promised:
    """A tree with promises for leaves."""

    def __init__(self, tree: Any) -> None:
        self.tree = tree

    @cached_property
    def kept(self) -> Any:
        """The tree, once all of it is there."""
        return jax.tree.map(lambda x: x.result() if isinstance(x, Promise) else x, self.tree)


def promised(state: TrainState) -> TrainState:
    """A state of which some leaves are promises, for those who know nothing of these.

    Args:
      state: from a schedule.

    Returns:
      The same; what is read of it is waited for.
    """
    parts = tuple.__iter__(state)
    return TrainState._make(Promised(part) if any(map(_is_promise, jax.tree.leaves(part))) else part for part in parts)


def opened(state: TrainState) -> TrainState:
    """The same state for those who do: with promises for leaves, those that are kept left out.

    Args:
      state: what a step was given.

    Returns:
      The state; nothing is waited for.
    """
    return TrainState._make(part.tree if isinstance(part, Promised) else part for part in tuple.__iter__(state))


def _there(part: Any) -> Any:
    return part.kept if isinstance(part, Promised) else part


def _is_promise(x: Any) -> bool:
    return isinstance(x, Promise)


@dataclass
class Training:
    """The training that a step makes, and those make that are made of it with other options."""

    number: int = 0
    """The number of its last step."""


class StepInfo(NamedTuple):
    """A step's report: the same on every rank after a step, of this process's first replica after `no_sync` and where
    `fddp.local_steps` lets replicas train alone."""

    loss: Float[Array, ""]
    """The mean over all rows, before the update."""
    aux: Any = None
    """The loss's metrics, averaged as the loss is; None without."""
    used: Any = None
    """A tree like the parameters, with `find_unused_parameters`: how many replicas used each leaf since the last
    synchronization; 0 for leaves that are not trained."""
    learning_rate: Float[Array, ""] | None = None
    """This step's, where the optimizer has it in its state: made by `optax.inject_hyperparams`, with one of them."""
    grad_norm: Float[Array, ""] | None = None
    """The mean gradients' norm, where the optimizer takes it: `optax.snapshot("grad_norm", optax.tree.norm)` at the
    head of its chain."""
    sent: UInt32[Array, " messages"] | np.ndarray = np.zeros(0, np.uint32)
    """Bytes that each replica sent for each sum over replicas: one for each bucket of the plan, and at the end for what
    travels alone. Of p replicas each sends 2 (p − 1)/p times the bytes of what is summed, and p − 1 times those of
    rows."""
    skipped: Bool[Array, ""] | None = None
    """Whether the step changed nothing, as its mean gradients are not all finite. Set with
    `skip_nonfinite`, `fddp.dynamic_scale`, whose scale then changes, and `optax.apply_if_finite`."""
    broken: Bool[Array, " leaves"] | None = None
    """Marks the trained leaves whose gradients were not finite on this very replica; with `skip_nonfinite`."""


def check_state(state: Any) -> None:
    """Refuses a value that is not a state, such as the pair that a step returns."""
    if not isinstance(state, TrainState):
        raise TypeError(
            f"state must be a fddp.TrainState, got {type(state).__name__}: step.init(params) makes "
            "the first state, and a step returns (state, info)."
        )


def check_no_state(name: str, tree: Any) -> None:
    """Refuses a state, or the report of a step, where a tree of arrays belongs."""
    kinds = (TrainState, StepInfo)
    for x in jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, kinds)):
        if isinstance(x, kinds):
            raise TypeError(
                f"{name} must be a tree of arrays, and holds a fddp.{type(x).__name__}: a step "
                "returns (state, info), and fddp.whole(state.params) are the parameters."
            )


class Mean(NamedTuple):
    """A step's contributions, averaged over micro-batches, calls and replicas."""

    grads: Any
    """A tree like the parameters; None for leaves without gradients."""
    loss: Float[Array, ""]
    aux: Any
    model_state: Any
    sent: UInt32[Array, " messages"]
    """Bytes that each replica sent for each sum over replicas."""
    used: Any = None
    """A tree like the parameters: how many replicas used each leaf. None where nobody asks."""
    broken: Bool[Array, " leaves"] | None = None
    """Marks the trained leaves whose gradients are not finite on this very replica. None where nobody asks."""
    weight: Float[Array, ""] | float = 0.0
    """Σ w, by which they were divided."""
