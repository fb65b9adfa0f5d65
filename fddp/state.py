"""What a step carries on, and what its replicas have in common when they have spoken."""

from typing import Any, NamedTuple

from jaxtyping import Array, Float, Int, UInt32

from fddp.objective import Pending


class TrainState(NamedTuple):
    """All that a step carries on: a pytree, equal on all replicas but for `hook_state` and `accumulated`."""

    step: Int[Array, ""]
    """Synchronized steps so far."""
    params: Any
    opt_state: Any
    """The optimizer's state for the differentiable leaves of `params`."""
    model_state: Any
    """Buffers, BatchNorm's statistics say; None without."""
    hook_state: Any
    """What the communication hook remembers for each trained leaf, each replica's own along a first dim."""
    accumulated: Pending | None
    """What `no_sync` gathered since the last synchronization, each replica's own along a first dim; None: nothing."""
    rng: Any
    """A random key; None without."""


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
