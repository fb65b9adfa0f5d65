"""`fddp.local_steps`: the optimizer of replicas that train separately, with or without a quorum."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal

import optax

from fddp.islands.async_steps import AsyncSteps
from fddp.islands.quorum import Discount, make_quorum
from fddp.local_training import LocalSteps, sync_steps


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
    quorum: int | None = None,
    grace_s: float = 0.0,
    max_staleness: int | None = None,
    discount: Discount | None = None,
    log: str | Path | None = None,
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
      quorum: number of islands whose pseudo-gradients suffice for a step of the outer optimizer;
        later ones enter a later step. This gives up DDP's promise, the mathematics of one replica;
        see docs/asynchronous.md. None, or all: every island waits for all others. 1, with
        `every=1`: the asynchronous update of a parameter server.
      grace_s: seconds that a complete quorum waits for further islands.
      max_staleness: maximum age of a pseudo-gradient: outer steps since its island received the
        shared parameters. A step waits for islands that would exceed it. 0: for all islands. None:
        no limit.
      discount: function from the age of a pseudo-gradient, in outer steps, to the factor of its
        weight, in jax.numpy; None: 1.
      log: file of JSON lines for the order of all outer steps, for `fddp.replay_islands`.

    Returns:
      The optimizer, for `train_step`; its state is a `LocalState`. With a quorum, `shared` holds
      the parameters that the island received last, `version` the number of outer steps up to them,
      and `outer` the state of the outer optimizer at the last `fddp.meet`.

    Raises:
      ValueError: a number is out of range, or `fragments` or `delay` is combined with `quorum`.
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
    steps = sync_steps(optimizer, outer, every, start, fragments, delay, mix, island)
    if quorum is not None and steps.others:
        raise ValueError(
            "islands with a quorum meet at the server one by one, which has no mean that all of "
            "them would take: give one period, that of the parameters; got one for "
            f"{steps.others[0][0]!r}, too."
        )
    rule = make_quorum(quorum, grace_s, max_staleness, discount, log)
    if rule is None:
        return steps
    if fragments > 1 or delay:
        raise ValueError(
            "a merge makes one version of all parameters, from which an island's age is counted, "
            "and an island that has sent goes on from the version that it is merged into: give no "
            f"fragments or delay with quorum; got {fragments=}, {delay=}."
        )
    return AsyncSteps(**vars(steps), quorum=rule)
