"""The function that a user calls for local steps."""

from collections.abc import Callable, Mapping
from typing import Any, Literal

import optax

from fddp.local_training.local_optimizer import LocalSteps
from fddp.local_training.local_runner import SyncSteps
from fddp.local_training.periods import read_periods
from fddp.wording import check_range, check_whole


def local_steps(
    optimizer: optax.GradientTransformation,
    *,
    outer: optax.GradientTransformation | None = None,
    every: int | Callable[[int], int] | Mapping[str, int | Callable[[int], int]] = 1,
    start: int = 0,
    fragments: int = 1,
    delay: int = 0,
    mix: float = 0.0,
    island: int | Literal["node"] = 1,
) -> LocalSteps:
    """Makes an optimizer for replicas that train separately and synchronize periodically.

    Between two synchronizations a step sends nothing. Its loss and metrics are those of this
    process's first replica, and the state holds each replica's local parameters and buffers:
    `fddp.whole(state.params)` is their mean. `state.opt_state.shared` holds the parameters of the
    last synchronization.

    Args:
      optimizer: the inner optimizer of each replica: any optax transformation.
      outer: the outer optimizer: any optax transformation. Its gradient is the pseudo-gradient: the
        mean of shared − local parameters, in which a replica's weight is the amount of data it has
        trained on. None: `optax.sgd(1.0)`, which yields the mean of the local parameters.
      every: number of steps between two synchronizations; or a function from the number of steps so
        far to the number until the next one; or a mapping. In a mapping "params" has one of these
        two. The name of a field of the inner optimizer's state, such as "mu" or "nu" of Adam, has
        the number of steps after which the replicas average that field, wherever the state has it;
        other fields are never sent. "node" has the number of steps after which the replicas of each
        node of `group.hierarchical` average their parameters, in addition to the outer steps.
      start: number of initial steps that average gradients, as without `local_steps`.
      fragments: number of parts of the parameters, each a group of the plan's buckets. They are
        synchronized round-robin, spread over the `every` steps. A count in the outer optimizer
        counts each fragment.
      delay: 0: a step sends the parameters at its end, and waits for their sum. 1: the next step
        sends them during its forward and backward pass, and uses the sum at its end; that step's
        change then counts as part of the local parameters (`mix`).
      mix: share of its local parameters that a replica retains at a synchronization, 0 to 1.
      island: number of consecutive replicas that train jointly, as without `local_steps`; "node":
        the replicas of each node of `group.hierarchical`. An island takes the role of a replica in
        this text. Each of its replicas sends a part of the pseudo-gradient to the replicas at the
        same position in the other islands.

    Returns:
      The optimizer, for `train_step`; its state is a `LocalState`.

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
      ...     print(float(fddp.whole(state.params)), float(state.opt_state.shared))
      1.0 0.0
      1.5 1.5
    """
    outer = optax.sgd(1.0) if outer is None else outer
    _check_optimizer("optimizer", optimizer)
    _check_optimizer("outer", outer)
    if island != "node":
        check_whole("island", island, 1)
    check_whole("start", start, 0)
    check_whole("fragments", fragments, 1)
    if delay not in (0, 1) or isinstance(delay, bool):
        raise ValueError(
            f"delay must be 0 or 1, got {delay!r}: the messages of a step have arrived when it "
            "ends. If a fragment takes longer than a step, give more fragments."
        )
    every, others = read_periods(every, delay)
    mix = check_range("mix", mix, "a number from 0 to 1", lambda x: 0 <= x <= 1)
    if fragments > 1 and (callable(every) or fragments > every):
        raise ValueError(
            "local_steps sends at most one fragment per step, so fragments must be no more than "
            f"every, a number; got {fragments=}, {every=}."
        )
    return SyncSteps(optimizer, outer, every, start, fragments, delay, mix, others, island)


def _check_optimizer(name: str, value: Any) -> None:
    if not hasattr(value, "init") or not hasattr(value, "update"):
        raise TypeError(
            f"local_steps: {name} must be one of optax's optimizers, got {type(value).__name__}."
        )
    if isinstance(value, LocalSteps):
        raise TypeError(
            f"local_steps: {name} is a local_steps optimizer already; give the optimizer inside "
            "of it."
        )
