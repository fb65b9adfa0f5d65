"""The functions that a user calls for local steps, and the optimizer of asynchronous islands."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax
from jaxtyping import PyTree

from fddp.comm import Group
from fddp.islands.client import join_server
from fddp.islands.island_runner import islands
from fddp.islands.quorum import Discount, Quorum, make_quorum
from fddp.jax_internals import without_context_mesh
from fddp.local_training import LocalSteps, SyncSteps, read_periods
from fddp.step import IslandState, StepOptimizer, TrainState, Way, check_state, check_step
from fddp.training import TrainStep
from fddp.wording import check_range, check_whole


@dataclass(frozen=True, repr=False)
class AsyncSteps(LocalSteps):
    """Local steps of islands that do not wait for each other."""

    quorum: Quorum = field(kw_only=True)
    """The merge rule."""

    def __repr__(self) -> str:
        """Shows the merge rule as a further option."""
        return f"{super().__repr__().removesuffix(')')}, {self.quorum})"

    def init(self, params: PyTree) -> Any:
        """Initializes both optimizers."""
        _, outer, inner, weight = super().init(params)
        if any(jnp.issubdtype(x.dtype, jax.dtypes.prng_key) for x in jax.tree.leaves(outer)):
            raise ValueError(
                "local_steps: the outer optimizer's state has a random key, and with a quorum "
                "it is stored by a process that supports only numbers: give an outer optimizer "
                "without a random key."
            )
        return IslandState(params, jnp.zeros((), jnp.int32), outer, inner, weight)

    def on(self, group: Group) -> tuple[StepOptimizer, Group]:
        """Makes each island a node of the group; see `among` for the optimizer. Collective."""
        _, group = super().on(group)
        return self.among(group.size // self.replicas(group.parts)), group

    def among(self, islands: int) -> LocalSteps:
        """Drops the quorum if all islands wait for each other anyway; raises if it exceeds them."""
        if self.quorum.count > islands:
            raise ValueError(
                f"quorum must be no more than the number of islands, {islands}, got "
                f"{self.quorum.count}."
            )
        if self.quorum.count < islands and self.quorum.max_staleness != 0:
            return self
        return SyncSteps(
            **{option.name: getattr(self, option.name) for option in fields(SyncSteps)}
        )

    def way(self, inner: Way) -> Way:
        """Returns the way of asynchronous islands, which hold their state in the way `inner`."""
        return islands(self, inner, partial(join_server, self.quorum, self.outer))


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
      log: file of JSON lines for the order of all outer steps, for `fddp.replay_islands`. It is not
        written if all islands wait for each other: with a quorum of all, or `max_staleness=0`.

    Returns:
      The optimizer, for `train_step`; its state is a `LocalState`. With a quorum it is an
      `IslandState`: `shared` holds the parameters that the island received last, `version` the
      number of outer steps up to them, and `outer` the state of the outer optimizer at the last
      `fddp.meet`. If all islands wait for each other, it is a `LocalState`.

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
    if quorum is not None and others:
        raise ValueError(
            "islands with a quorum exchange with the server one at a time, so that they have no "
            "common mean of moments: give one period, that of the parameters; got one for "
            f"{others[0][0]!r}, too."
        )
    rule = make_quorum(quorum, grace_s, max_staleness, discount, log)
    options = optimizer, outer, every, start, fragments, delay, mix, others, island
    if rule is None:
        return SyncSteps(*options)
    if fragments > 1 or delay:
        raise ValueError(
            "a merge creates one version of all parameters, which defines the age of an island, "
            "and an island continues from the version of its merge: give no "
            f"fragments or delay with quorum; got {fragments=}, {delay=}."
        )
    return AsyncSteps(*options, quorum=rule)


def meet(step: TrainStep, state: TrainState) -> TrainState:
    """Synchronizes asynchronous islands (`fddp.local_steps(quorum=)`). Collective.

    It merges the progress of all islands and gives them equal parameters and an equal state of the
    outer optimizer. Call it before a collective action such as `evaluate` or a checkpoint, and at
    the end of the training. The states of other steps are returned unchanged.

    Args:
      step: the step.
      state: from the last step.

    Returns:
      The synchronized state.

    Raises:
      ValueError: the step has not been run.
      RuntimeError: the server of the shared parameters has stopped.

    Example:
      >>> import fddp, jax.numpy as jnp, optax
      >>> step = fddp.train_step(lambda w, x: jnp.mean((x - w) ** 2), optax.sgd(0.5))
      >>> state, info = step(step.init(jnp.zeros(())), jnp.ones(8))
      >>> float(fddp.meet(step, state).params)
      1.0
    """
    check_step("fddp.meet", step)
    check_state(state)
    return without_context_mesh(step.settled.runner.meet)(state)


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
