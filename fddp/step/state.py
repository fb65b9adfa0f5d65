"""The training state of a step, the step's report, and the mean over replicas."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Bool, Float, Int, PyTree, UInt32

from fddp.jaxpr import is_used_up
from fddp.losses import Pending
from fddp.optim import nodes_of
from fddp.step.schedules import StateInFlight


class TrainState(NamedTuple):
    """The state of training: a pytree, which each step takes and returns.

    It is equal on all replicas except for `hook_state`, `accumulated`, buffers without broadcast,
    and leaves of type `Shard`: parts of one array.

    A step donates its input state: the next state reuses the memory. Another object that shares
    those arrays (a Flax module, for example) must copy them first. `donate=False` turns this off.
    """

    step: Int[Array, ""]
    """Number of synchronized steps so far."""
    params: Any
    """The tree passed to `init`, with sharded leaves under `shard="state"` (see `fddp.whole`)."""
    opt_state: Any
    """The optimizer's state for the trained leaves of `params`."""
    model_state: Any
    """Buffers, such as BatchNorm's statistics; None without buffers."""
    hook_state: Any
    """The communication hook's state for each trained leaf, with a first dim over replicas."""
    accumulated: Pending | None
    """Sums that `no_sync` has added, with a first dim over replicas; None after a
    synchronization."""
    rng: Any
    """A random key, or a tree of them; None without keys."""

    def __repr__(self) -> str:
        if is_used_up(self):
            return "TrainState(used up: a step has written the next state into its memory)"
        return (
            "TrainState("
            f"{', '.join(f'{name}={value!r}' for name, value in zip(self._fields, self))})"
        )


@dataclass
class Training:
    """The progress of a training, which a step shares with its `with_options` variants."""

    step: Any = None
    """`state.step` of its last result, perhaps not computed yet."""
    number: int = 0
    """Number of its last step."""

    def of(self, step: Any) -> int:
        """Returns the number in `state.step`; waits for it unless it is the last result's."""
        # The last result is recognized by identity: its number may still be in computation.
        return self.number if step is self.step else int(step)


class StepInfo(NamedTuple):
    """The report of a step.

    It is equal on all ranks after a step. After `no_sync`, and where `fddp.local_steps` trains
    replicas separately, it is that of this process's first replica.
    """

    loss: Float[Array, ""]
    """Mean over all rows, before the update."""
    aux: Any = None
    """The loss's metrics, averaged in the same way; None without metrics."""
    used: Any = None
    """A tree like the parameters: the number of replicas that used each leaf since the last
    synchronization, 0 for untrained leaves. Set with `find_unused_parameters`."""
    learning_rate: Float[Array, ""] | None = None
    """Learning rate of this step, if `optax.inject_hyperparams` records it."""
    grad_norm: Float[Array, ""] | None = None
    """Norm of the mean gradients, if the optimizer's chain starts with `optax.snapshot("grad_norm",
    optax.tree.norm)`."""
    sent: UInt32[Array, " messages"] | np.ndarray = np.zeros(0, np.uint32)
    """Bytes that each replica sent for each bucket of the plan, and last for a separate message of
    the scalars, if any. With p replicas, rows cost p − 1 times their size, and sums 2 (p − 1)/p
    times."""
    skipped: Bool[Array, ""] | None = None
    """True if the step changed nothing because its mean gradients were not all finite. Set with
    `skip_nonfinite`, `fddp.dynamic_scale` (which then lowers its scale), `optax.apply_if_finite`
    and the skip function of `optax.MultiSteps`."""
    broken: Bool[Array, " leaves"] | None = None
    """Marks this replica's non-finite gradients, by trained leaf; set with `skip_nonfinite`."""


def form_of(x: Any) -> jax.ShapeDtypeStruct:
    """Returns the shape, dtype and sharding of an array, without its memory."""
    sharding = getattr(x, "sharding", None)
    return jax.ShapeDtypeStruct(np.shape(x), jax.typeof(x).dtype, sharding=sharding)


def check_state(state: object) -> None:
    """Raises TypeError unless `state` is a `TrainState`; a step returns a pair, for example."""
    if not isinstance(state, TrainState | StateInFlight):
        raise TypeError(
            f"state must be a fddp.TrainState, got {type(state).__name__}: step.init(params) "
            "creates the first state, and a step returns (state, info)."
        )


def check_no_state(name: str, tree: PyTree) -> None:
    """Raises TypeError if a tree of arrays contains a state or a report."""
    for x in nodes_of((TrainState, StepInfo), tree):
        raise TypeError(
            f"{name} must be a tree of arrays, and holds a fddp.{type(x).__name__}: a step "
            "returns (state, info), and fddp.whole(state.params) are the parameters."
        )


class Mean(NamedTuple):
    """The contributions to a step, averaged over micro-batches, calls and replicas."""

    grads: Any
    """A tree like the parameters; None for leaves without gradients."""
    loss: Float[Array, ""]
    aux: Any
    model_state: Any
    sent: UInt32[Array, " messages"]
    """Bytes that each replica sent for each sum over replicas."""
    used: Any = None
    """A tree like the parameters: number of replicas that used each leaf; None if not counted."""
    broken: Bool[Array, " leaves"] | None = None
    """Marks the trained leaves with non-finite gradients on this replica; None if not checked."""
    weight: Float[Array, ""] | float = 0.0
    """Σ w, the divisor."""
