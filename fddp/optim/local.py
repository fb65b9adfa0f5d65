"""Local steps: replicas train alone for some steps, and then an outer optimizer makes a step with their mean change.

The mean change of the replicas' parameters, shared − local, is a pseudo-gradient for the outer optimizer. One formula
has many names: local SGD (the outer optimizer is `sgd(1.0)`, which gives the mean of the parameters), SlowMo (with
momentum), DiLoCo (`sgd(0.7, momentum=0.9, nesterov=True)`), Lookahead (one replica).

Source: Stich, "Local SGD Converges Fast and Communicates Little" (2019); Lin et al., "Don't Use Large Mini-Batches, Use
Local SGD" (2020); Wang et al., "SlowMo" (2020); Douillard et al., "DiLoCo" (2023) and "Streaming DiLoCo" (2025);
for periods of parts what `periods.py` names, for islands that do not wait what `quorum.py` does.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int

from fddp.optim.periods import NODE, PARAMS, read_periods
from fddp.optim.quorum import Quorum, make_quorum
from fddp.wording import check_whole


class LocalState(NamedTuple):
    """The state of `local_steps`, beside each replica's own parameters."""

    shared: Any
    """The parameters of the last synchronization, equal on all replicas."""
    outer: Any
    """State of the outer optimizer, equal on all replicas."""
    inner: Any
    """State of the inner optimizer, each replica's own."""
    weight: Float[Array, " means"]
    """Σ w that a replica has trained on since the last synchronization of each fragment, and since each further mean
    that `every` names; each replica's own."""


class IslandState(NamedTuple):
    """The state of `local_steps` with a quorum, beside each island's own parameters: all of it each island's own."""

    shared: Any
    """The shared parameters that the island took last."""
    version: Int[Array, ""]
    """Their version: the number of merges that made them."""
    outer: Any
    """State of the outer optimizer, as it was when islands met last: between meetings the keeper has it."""
    inner: Any
    """State of the inner optimizer."""
    weight: Float[Array, " 1"]
    """Σ w that the island has trained on since it took them."""


class Met(NamedTuple):
    """Numbers of steps alone after which replicas synchronized last, and will next; 0 at first."""

    last: int = 0
    next: int = 0


@dataclass(frozen=True)
class LocalSteps:
    """An optimizer of replicas that train alone for some steps; made by `local_steps`."""

    inner: optax.GradientTransformation = field(repr=False)
    outer: optax.GradientTransformation = field(repr=False)
    every: int | Callable[[int], int]
    """The period of the parameters, over all islands."""
    start: int
    fragments: int
    delay: int
    mix: float
    others: tuple[tuple[str, int], ...] = ()
    """The periods of further means, by their names; each is numbered, behind the fragments."""
    quorum: Quorum | None = None
    """The rule of islands that do not wait for each other; None: all wait."""
    island: int | Literal["node"] = 1

    def __repr__(self) -> str:
        """Names functions by their names, so that the text is equal on ranks that were given the same options."""
        every: Any = getattr(self.every, "__name__", type(self.every).__name__) if callable(self.every) else self.every
        every = {PARAMS: every, **dict(self.others)} if self.others else every
        names = ("start", "fragments", "delay", "mix", "island")
        rest = ", ".join(f"{name}={getattr(self, name)}" for name in names)
        quorum = f", {self.quorum}" if self.quorum else ""
        return f"LocalSteps(every={every}, {rest}{quorum})"

    def replicas(self, local: int) -> int:
        """Finds the number of replicas of an island, given that of a node."""
        return 1 if self.island == 1 else local

    def among(self, islands: int) -> "LocalSteps":
        """Drops the quorum where all of so many islands wait for each other anyway; refuses one of more than all."""
        if self.quorum is None:
            return self
        if self.quorum.count > islands:
            raise ValueError(f"quorum must be no more than the number of islands, {islands}, got {self.quorum.count}.")
        waits = self.quorum.count == islands or self.quorum.max_staleness == 0
        return replace(self, quorum=None) if waits else self

    def init(self, params: Any) -> LocalState | IslandState:
        """Makes the first state of both optimizers."""
        outer = self.outer.init(params)
        inner = self.inner.init(params)
        if self.quorum:
            if any(jnp.issubdtype(x.dtype, jax.dtypes.prng_key) for x in jax.tree.leaves(outer)):
                raise ValueError(
                    "local_steps: the outer optimizer's state has a random key, and with a quorum it is kept by a "
                    "process that holds numbers alone: give an outer optimizer without one."
                )
            return IslandState(params, jnp.zeros((), jnp.int32), outer, inner, jnp.zeros(1))
        return LocalState(params, outer, inner, jnp.zeros(self.fragments + len(self.others)))

    def update(self, *args: Any, **extra: Any) -> Any:
        """Refuses to update: only a step can make replicas train alone and synchronize."""
        raise TypeError(
            "fddp.local_steps is not a part of another optimizer: give train_step local_steps(optimizer, …) itself, "
            "with chains, scales and other wrappers inside of it."
        )

    def sends(self, number: int, met: Met) -> tuple[tuple[int, ...], Met]:
        """Finds what a step sends to other islands.

        Args:
          number: number of the step, from 1.
          met: what an earlier call returned, so that this one need not count from the beginning.

        Returns:
          The numbers of further means that are due, and behind them of a fragment, if one is; and where `every` is a
          function, when replicas meet around this step.
        """
        alone = number - self.start - self.delay  # steps that replicas have trained alone when a fragment leaves
        if alone <= 0:
            return (), met
        if callable(self.every):
            met = self._met(self.every, alone, met)
            due = [0] if met.next == alone else []
        else:
            due = [f for f in range(self.fragments) if alone % self.every == f * self.every // self.fragments][:1]
        # Where all parameters are averaged over all islands, so they are over those of a node.
        idle = self.node if due and self.fragments == 1 else None
        more = enumerate((period for _, period in self.others), start=self.fragments)
        return (*(k for k, period in more if alone % period == 0 and k != idle), *due), met

    @property
    def node(self) -> int | None:
        """The number of the mean over the islands of a node; None: there is none."""
        names = [name for name, _ in self.others]
        return self.fragments + names.index(NODE) if NODE in names else None

    def _met(self, every: Callable[[int], int], alone: int, met: Met) -> Met:
        """Finds the first synchronization that is not before `alone` steps, and the one before it."""
        met = met if alone > met.last else Met()
        while met.next < alone:
            between = check_whole("every(step)", every(self.start + met.next), 1 + self.delay)
            met = Met(met.next, met.next + between)
        return met


Optimizer: TypeAlias = optax.GradientTransformation | LocalSteps
"""An optimizer that a step takes."""


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
    """Makes an optimizer whose replicas train alone, and synchronize their parameters only now and then.

    Between two synchronizations a step sends nothing, its loss and metrics are those of this process's own rows, and
    the state holds each replica's own parameters and buffers: `fddp.whole(state.params)` is their mean. The parameters
    of the last synchronization are `state.opt_state.shared`.

    Args:
      optimizer: the inner optimizer, of each replica: any optax transformation.
      outer: the outer optimizer: any optax transformation. Its gradient is the pseudo-gradient, the mean of the
        replicas' shared − local parameters, each replica weighing as much as it trained on. None: `optax.sgd(1.0)`,
        which gives the mean of their parameters.
      every: steps between two synchronizations; or a function that takes the number of steps so far and gives the
        number until the next one. Or a mapping from the names of parts to the periods of each. "params" is what else
        `every` is. The name of a field of the inner optimizer's state, "mu" or "nu" of Adam, is the number of steps
        after which that field becomes its mean over all replicas, wherever in the state it stands; fields that are not
        named never travel. "node": the number of steps after which replicas of one node of `group.hierarchical` take
        the mean of their parameters, beside the outer optimizer.
      start: steps at the beginning that synchronize gradients, as without `local_steps`.
      fragments: parts of the parameters that are synchronized in turn, spread over the `every` steps: groups of the
        plan's buckets. A count in the outer optimizer counts each fragment.
      delay: 0: a step sends the parameters from its end, and waits for their sum. 1: the next step sends them, beside
        its forward and backward pass, and uses the sum at its end; its own change then counts as part of the replica's
        own parameters (`mix`).
      mix: share of its own parameters that a replica keeps when new ones come, 0 (none) to 1.
      island: replicas that train together, as without `local_steps`: so many, one behind the other, or "node": those of
        each node of `group.hierarchical`. What is said here of a replica holds for an island then. Between islands each
        of its replicas sends a part of the pseudo-gradient to those of the same place.
      quorum: number of islands whose pseudo-gradients make a step of the outer optimizer. The others are
        not waited for: theirs go into a later step. This gives up DDP's promise, the mathematics of one replica; see
        docs/asynchronous.md. None, or all: every island waits for all others. 1, with `every=1`: the asynchronous
        update of a parameter server.
      grace_s: seconds for which a quorum that is there waits for more islands.
      max_staleness: outer steps that may be made between the moment at which an island takes the shared parameters and
        the one that uses its pseudo-gradient: islands that would grow older are waited for. 0: all. None: any number.
      discount: gives the factor of a pseudo-gradient's weight by its age in outer steps, in jax.numpy; None: 1.
      log: file of JSON lines in which the order of all outer steps is written, for `fddp.replay_islands`.

    Returns:
      The optimizer, for `train_step`; its state is a `LocalState`. With a quorum `shared` is what an island took last,
      `outer` is as of the last `fddp.meet`, and beside them is the `version` of `shared`: the number of outer steps
      that made it.

    Raises:
      ValueError: a number is out of its range; or `fragments` or `delay` is given with `quorum`.
      TypeError: an optimizer is none of optax's, or a number is none.

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
            raise TypeError(f"local_steps: {name} must be one of optax's optimizers, got {type(value).__name__}.")
        if isinstance(value, LocalSteps):
            raise TypeError(f"local_steps: {name} is one of local_steps itself; give the optimizer inside of it.")
    if island != "node":
        check_whole("island", island, 1)
    check_whole("start", start, 0)
    check_whole("fragments", fragments, 1)
    if delay not in (0, 1) or isinstance(delay, bool):
        raise ValueError(
            f"delay must be 0 or 1, got {delay!r}: what a step sends has come when it ends. Where a fragment takes "
            "longer than a step, give more fragments."
        )
    periods = read_periods(every, delay)
    every = periods.every
    if isinstance(mix, bool) or not isinstance(mix, int | float) or not 0 <= mix <= 1:
        raise ValueError(f"mix must be a number from 0 to 1, got {mix!r}.")
    if fragments > 1 and (callable(every) or fragments > every):
        raise ValueError(
            f"local_steps sends one fragment a step at most, so fragments must be no more than every, a number; got "
            f"{fragments=}, {every=}."
        )
    if quorum is not None and periods.others:
        raise ValueError(
            "islands with a quorum meet at the keeper one by one, which has no mean that all of them would take: give "
            f"one period, that of the parameters; got one for {periods.others[0][0]!r}, too."
        )
    rule = make_quorum(quorum, grace_s, max_staleness, discount, log)
    if rule and (fragments > 1 or delay):
        raise ValueError(
            f"a merge makes one version of all parameters, from which an island's age is counted, and an island that "
            f"has sent goes on from the version that it is merged into: give no fragments or delay with quorum; got "
            f"{fragments=}, {delay=}."
        )
    return LocalSteps(optimizer, outer, every, start, fragments, delay, mix, periods.others, rule, island)
