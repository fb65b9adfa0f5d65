"""Local steps: replicas train separately, and an outer optimizer applies their mean change.

The mean of shared − local parameters over replicas is a pseudo-gradient for the outer optimizer.
One formula has many names: local SGD (outer `sgd(1.0)`, which yields the mean of the parameters),
SlowMo (with momentum), DiLoCo (`sgd(0.7, momentum=0.9, nesterov=True)`), Lookahead (one replica).

Source: Stich, "Local SGD Converges Fast and Communicates Little" (2019); Lin et al., "Don't Use
Large Mini-Batches, Use Local SGD" (2020); Wang et al., "SlowMo" (2020); Douillard et al., "DiLoCo"
(2023) and "Streaming DiLoCo" (2025); see also `periods.py` and `quorum.py`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int, PyTree

from fddp.optim.periods import NODE, PARAMS, read_periods
from fddp.optim.quorum import Quorum, make_quorum
from fddp.wording import check_whole


class LocalState(NamedTuple):
    """The state of `local_steps`; each replica also has local parameters."""

    shared: Any
    """Parameters of the last synchronization, equal on all replicas."""
    outer: Any
    """State of the outer optimizer, equal on all replicas."""
    inner: Any
    """State of the inner optimizer, local to each replica."""
    weight: Float[Array, " means"]
    """Σ w that a replica has trained on since the last synchronization of each fragment, then since
    each further mean of `every`; local to each replica."""


class IslandState(NamedTuple):
    """The state of `local_steps` with a quorum, local to each island."""

    shared: Any
    """Shared parameters that the island received last."""
    version: Int[Array, ""]
    """Version of `shared`: the number of merges so far."""
    outer: Any
    """State of the outer optimizer at the last meeting; between meetings the server updates it."""
    inner: Any
    """State of the inner optimizer."""
    weight: Float[Array, " 1"]
    """Σ w that the island has trained on since it received `shared`."""


class Met(NamedTuple):
    """Numbers of local steps at the last and the next synchronization; 0 at first."""

    last: int = 0
    next: int = 0


@dataclass(frozen=True)
class LocalSteps:
    """An optimizer of replicas that train separately for some steps, from `local_steps`."""

    inner: optax.GradientTransformation = field(repr=False)
    outer: optax.GradientTransformation = field(repr=False)
    every: int | Callable[[int], int]
    """Period of the parameters, over all islands."""
    start: int
    fragments: int
    delay: int
    mix: float
    others: tuple[tuple[str, int], ...] = ()
    """(name, period) of each further mean; their numbers follow those of the fragments."""
    quorum: Quorum | None = None
    """Merge rule of asynchronous islands; None: all islands wait for each other."""
    island: int | Literal["node"] = 1

    def __repr__(self) -> str:
        """Shows a function by its name, so that the text is equal on all ranks."""
        every: Any = (
            getattr(self.every, "__name__", type(self.every).__name__)
            if callable(self.every)
            else self.every
        )
        every = {PARAMS: every, **dict(self.others)} if self.others else every
        names = ("start", "fragments", "delay", "mix", "island")
        options = ", ".join(f"{name}={getattr(self, name)}" for name in names)
        quorum = f", {self.quorum}" if self.quorum else ""
        return f"LocalSteps(every={every}, {options}{quorum})"

    def replicas(self, per_node: int) -> int:
        """Number of replicas per island, in a group whose nodes are the islands."""
        return 1 if self.island == 1 else per_node

    def among(self, islands: int) -> "LocalSteps":
        """Drops the quorum if all islands wait for each other anyway; raises if it exceeds them."""
        if self.quorum is None:
            return self
        if self.quorum.count > islands:
            raise ValueError(
                f"quorum must be no more than the number of islands, {islands}, got "
                f"{self.quorum.count}."
            )
        waits = self.quorum.count == islands or self.quorum.max_staleness == 0
        return replace(self, quorum=None) if waits else self

    def init(self, params: PyTree) -> LocalState | IslandState:
        """Initializes both optimizers."""
        outer = self.outer.init(params)
        inner = self.inner.init(params)
        if self.quorum:
            if any(jnp.issubdtype(x.dtype, jax.dtypes.prng_key) for x in jax.tree.leaves(outer)):
                raise ValueError(
                    "local_steps: the outer optimizer's state has a random key, and with a quorum "
                    "it is stored by a process that supports only numbers: give an outer "
                    "optimizer without a random key."
                )
            return IslandState(params, jnp.zeros((), jnp.int32), outer, inner, jnp.zeros(1))
        return LocalState(params, outer, inner, jnp.zeros(self.fragments + len(self.others)))

    def update(self, *args: Any, **extra: Any) -> Any:
        """Raises TypeError: only a step can train replicas separately and synchronize them."""
        raise TypeError(
            "fddp.local_steps cannot be a part of another optimizer: give train_step "
            "local_steps(optimizer, …) itself, with chains, scales and other wrappers inside of it."
        )

    def sends(self, number: int, met: Met) -> tuple[tuple[int, ...], Met]:
        """Lists the exchanges of step `number`, counted from 1: further means, then a fragment.

        If `every` is a function, it also returns the synchronizations around the step, for the next
        call, which then need not count from the beginning.
        """
        # Number of local steps before the exchange.
        local_step = number - self.start - self.delay
        if local_step <= 0:
            return (), met
        if callable(self.every):
            met = self._met(self.every, local_step, met)
            due = [0] if met.next == local_step else []
        else:
            due = [
                f
                for f in range(self.fragments)
                if local_step % self.every == f * self.every // self.fragments
            ][:1]
        # A mean of all parameters over all islands includes the mean over each node.
        idle = self.node if due and self.fragments == 1 else None
        means = enumerate((period for _, period in self.others), start=self.fragments)
        return (*(k for k, period in means if local_step % period == 0 and k != idle), *due), met

    @property
    def node(self) -> int | None:
        """Number of the mean over the islands of a node; None without it."""
        names = [name for name, _ in self.others]
        return self.fragments + names.index(NODE) if NODE in names else None

    def _met(self, every: Callable[[int], int], local_step: int, met: Met) -> Met:
        """Finds the first synchronization at or after a local step, and the one before it."""
        met = met if local_step > met.last else Met()
        while met.next < local_step:
            period = check_whole("every(step)", every(self.start + met.next), 1 + self.delay)
            met = Met(met.next, met.next + period)
        return met


Optimizer: TypeAlias = optax.GradientTransformation | LocalSteps
"""An optimizer of a step."""


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
    discount: Callable[[Any], Any] | None = None,
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
    outer = optax.sgd(1.0) if outer is None else outer
    for name, value in (("optimizer", optimizer), ("outer", outer)):
        if not hasattr(value, "init") or not hasattr(value, "update"):
            raise TypeError(
                f"local_steps: {name} must be one of optax's optimizers, got "
                f"{type(value).__name__}."
            )
        if isinstance(value, LocalSteps):
            raise TypeError(
                f"local_steps: {name} is a local_steps optimizer already; give the optimizer "
                "inside of it."
            )
    if island != "node":
        check_whole("island", island, 1)
    check_whole("start", start, 0)
    check_whole("fragments", fragments, 1)
    if delay not in (0, 1) or isinstance(delay, bool):
        raise ValueError(
            f"delay must be 0 or 1, got {delay!r}: the messages of a step have arrived when it "
            "ends. If a fragment takes longer than a step, give more fragments."
        )
    periods = read_periods(every, delay)
    every = periods.every
    if isinstance(mix, bool) or not isinstance(mix, int | float) or not 0 <= mix <= 1:
        raise ValueError(f"mix must be a number from 0 to 1, got {mix!r}.")
    if fragments > 1 and (callable(every) or fragments > every):
        raise ValueError(
            "local_steps sends at most one fragment per step, so fragments must be no more than "
            f"every, a number; got {fragments=}, {every=}."
        )
    if quorum is not None and periods.others:
        raise ValueError(
            "islands with a quorum exchange with the keeper one at a time, so that they have no "
            "common mean of moments: give one period, that of the parameters; got one for "
            f"{periods.others[0][0]!r}, too."
        )
    rule = make_quorum(quorum, grace_s, max_staleness, discount, log)
    if rule and (fragments > 1 or delay):
        raise ValueError(
            "a merge creates one version of all parameters, which defines the age of an island, "
            "and an island continues from the version of its merge: give no "
            f"fragments or delay with quorum; got {fragments=}, {delay=}."
        )
    return LocalSteps(
        optimizer, outer, every, start, fragments, delay, mix, periods.others, rule, island
    )
