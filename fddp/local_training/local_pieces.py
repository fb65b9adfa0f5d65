"""A step of islands that train separately, and synchronize parts of their state periodically.

An island is one replica, or several that average gradients. A step has one of three kinds. A
synchronous step averages the gradients of all replicas. In a local step each island trains
separately. An exchange step is a local step that also sends the pseudo-gradient of a fragment for
the outer optimizer, and arrays for further means.

Source: Douillard et al., "DiLoCo" (2023) and "Streaming DiLoCo" (2025); see also
`fddp.local_steps`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array

from fddp.buckets import Messages, copy_of, insert_shards, take_apart
from fddp.comm import add_replica_dim, drop_replica_dim
from fddp.jaxpr import with_trained
from fddp.local_training.due_exchanges import NOTHING, DueExchanges, Exchange
from fddp.local_training.inside import (
    copies_held,
    keys_of_island,
    own_copies,
    own_rows,
    own_view,
    trained_leaves,
)
from fddp.local_training.local_optimizer import LocalSteps
from fddp.schedules import Pieces, Round, more_sent, sent_by_bucket
from fddp.step import LocalState, Replica, TrainState

GIVEN: tuple[str, ...] = ("state", "pending", "shards", "rows")
# (state of one replica, info)
Trained = tuple[TrainState, Any]
# `Round.run`
RunRound = Callable[..., tuple[Messages, Any]]


@dataclass(frozen=True)
class Local:
    """The three kinds of step, for one replica."""

    replica: Replica
    inner: Pieces
    """A step within an island, of a state with `Trains`."""
    steps: LocalSteps
    exchanges: Sequence[Exchange]
    """All exchanges between islands, by number."""

    def together(self, pieces: Pieces) -> Pieces:
        """Makes a synchronous step from a step of states with `Trains`; all replicas stay equal."""

        def finish(state: TrainState, shards: Sequence[Array], *results: Any) -> tuple[Any, Any]:
            new, info = self.trained(pieces, state, shards, *results)
            before = self.local_state(state, shards)
            new = new._replace(opt_state=new.opt_state._replace(weight=before.weight))
            shared = trained_leaves(self.replica, new.params)
            return self.held(state, before._replace(shared=shared), (new, info))

        rounds = tuple(_on_full_states(x, own_view, lambda rows: rows) for x in pieces.rounds)
        return Pieces(rounds, finish, pieces.name)

    def alone(self) -> Pieces:
        """Makes a local step."""

        def finish(state: TrainState, shards: Sequence[Array], *results: Any) -> tuple[Any, Any]:
            trained = self.trained(self.inner, state, shards, *results)
            return self.held(state, state.opt_state, trained)

        return Pieces(self.rounds, finish, self.inner.name)

    def sends(self, due: Sequence[int]) -> Pieces:
        """Makes an exchange step.

        It sends the state before the step if exchanges have a delay, else the state after it.
        """
        kind = _DelayedExchangeStep if self.steps.delay else _ExchangeStep
        return kind(self, DueExchanges(tuple(self.exchanges[number] for number in due))).pieces

    @property
    def rounds(self) -> tuple[Round, ...]:
        """Rounds within an island."""
        rounds = []
        for inner in self.inner.rounds:
            reductions = tuple(x._replace(level="node") for x in inner.reductions)
            inner = inner._replace(reductions=reductions)
            rounds.append(_on_full_states(inner, self._island_view, own_rows))
        return tuple(rounds)

    def _island_view(self, state: TrainState, shards: Sequence[Array]) -> TrainState:
        view = own_view(state, shards)
        if self.steps.replicas(self.replica.group.parts) == 1:
            return view
        return view._replace(rng=keys_of_island(self.replica.group, view.rng))

    def trained(
        self, pieces: Pieces, state: TrainState, shards: Sequence[Array], *results: Any
    ) -> Trained:
        """Takes a step of the inner optimizer."""
        view, local_shards = take_apart(own_view(state, shards))
        (new, info), local_shards = pieces.finish(view, local_shards, *results)
        return insert_shards(new, local_shards), info

    def local_state(self, state: TrainState, shards: Sequence[Array]) -> LocalState:
        """Returns the optimizer's state of one replica."""
        return own_copies(insert_shards(state, shards)).opt_state

    def held(self, before: TrainState, local: LocalState, trained: Trained) -> tuple[Any, Any]:
        """Builds the step's result, with local arrays as shards."""
        view, info = trained
        copy = partial(copy_of, self.replica.group.copy_ranks)
        tree = (trained_leaves(self.replica, view.params), view.opt_state, view.model_state)
        params, trains, buffers = copies_held(tree, copy)
        opt_state = local._replace(inner=trains.opt_state, weight=trains.weight)
        params = with_trained(view.params, params)
        state = view._replace(
            params=params, model_state=buffers, opt_state=opt_state, rng=before.rng
        )
        return take_apart((state, info))


@dataclass(frozen=True)
class _ExchangeStep:
    """A local step with exchanges at its end."""

    local: Local
    exchanges: DueExchanges

    @cached_property
    def pieces(self) -> Pieces:
        rounds = self._rounds()
        if self.exchanges.gathers:
            rounds += (Round("gather", GIVEN, self._gather, self.exchanges.gathers),)
        return Pieces(rounds, self._finish, self.local.inner.name)

    def _rounds(self) -> tuple[Round, ...]:
        """Makes the rounds up to the sums over islands."""
        send = Round("send", GIVEN, self._send, self.exchanges.sums)
        return _without_silent((*self.local.rounds, send))

    def _send(
        self, state: TrainState, pending: Any, shards: Any, rows: Any, *results: Any
    ) -> tuple[Messages, Any]:
        trained = self._inner_step(state, shards, *results)
        messages, layouts = self.exchanges.changed(state.opt_state, trained[0], rows)
        return messages, (layouts, add_replica_dim(trained))

    def _summed(self, sums: Messages, saved: Any) -> tuple[list[Messages], Any]:
        """Returns the sums over islands, and the values for `_trained`."""
        layouts, trained = saved
        return self.exchanges.taken(layouts, sums.arrays), trained

    def _gather(self, *arguments: Any) -> tuple[Messages, Any]:
        """Sends the island's parts of the means to its replicas."""
        sums, saved = self._summed(*arguments[len(GIVEN) :])
        buckets, means = self.exchanges.to_gather(self.exchanges.averaged(sums))
        return replace(NOTHING, arrays=buckets), (add_replica_dim(means), saved)

    def _finish(
        self, state: TrainState, shards: Any, results: Messages, saved: Any, nbytes: Array
    ) -> tuple[Any, Any]:
        if self.exchanges.gathers:
            means, saved = saved
            means = self.exchanges.gathered(drop_replica_dim(means), results.arrays)
        else:
            sums, saved = self._summed(results, saved)
            means = self.exchanges.averaged(sums)
        new, info = self._trained(state, shards, saved)
        weight = new.opt_state.weight
        remaining = self._remaining(weight, state, shards)
        local, new = self.exchanges.landed(state.opt_state, new, means)
        renewed = jnp.array(self.exchanges.renews)
        weight = weight.at[renewed].set(remaining[renewed])
        new = new._replace(opt_state=new.opt_state._replace(weight=weight))
        sent = sent_by_bucket(self.pieces.reductions, nbytes, info.sent.size)
        info = info._replace(sent=more_sent(info.sent, sent))
        return self.local.held(state, local, (new, info))

    def _trained(self, state: TrainState, shards: Sequence[Array], saved: Any) -> Trained:
        return drop_replica_dim(saved)

    def _remaining(self, weight: Array, state: TrainState, shards: Sequence[Array]) -> Array:
        """Returns the weight that the messages do not include."""
        return jnp.zeros_like(weight)

    def _inner_step(self, state: TrainState, shards: Any, sums: Messages, saved: Any) -> Trained:
        # `_finish` counts the bytes of the island's messages.
        no_bytes = jnp.zeros(len(self.local.inner.reductions), jnp.uint32)
        return self.local.trained(self.local.inner, state, shards, sums, saved, no_bytes)


class _DelayedExchangeStep(_ExchangeStep):
    """A local step with exchanges during its forward and backward pass."""

    def _rounds(self) -> tuple[Round, ...]:
        first, *later = self.local.rounds
        begin = first._replace(
            run=partial(self._begin, first.run),
            reductions=(*self.exchanges.sums, *first.reductions),
        )
        return begin, *(x._replace(run=partial(self._continue, x.run)) for x in later)

    def _begin(
        self, run: RunRound, state: TrainState, pending: Any, shards: Any, rows: Any, *nothing: Any
    ) -> tuple[Messages, Any]:
        view = own_view(state, shards)
        changes, layouts = self.exchanges.changed(state.opt_state, view, rows)
        messages, saved = run(state, pending, shards, rows, *nothing)
        return replace(messages, arrays=(*changes.arrays, *messages.arrays)), (layouts, saved)

    def _continue(self, run: RunRound, *arguments: Any) -> tuple[Messages, Any]:
        sums, results = self._summed(*arguments[len(GIVEN) :])
        messages, saved = run(*arguments[: len(GIVEN)], *results)
        return messages, (sums, saved)

    def _summed(self, sums: Messages, saved: Any) -> tuple[list[Messages], Any]:
        """Returns the sums over islands; the sums within the island, and its saved values."""
        outer_sums, saved = saved
        if any(messages.arrays for messages in outer_sums):  # a later round
            return outer_sums, (sums, saved)
        count = len(self.exchanges.sums)
        outer_sums = self.exchanges.taken(outer_sums, sums.arrays[:count])
        return outer_sums, (replace(sums, arrays=sums.arrays[count:]), saved)

    def _trained(self, state: TrainState, shards: Sequence[Array], saved: Any) -> Trained:
        return self._inner_step(state, shards, *saved)

    def _remaining(self, weight: Array, state: TrainState, shards: Sequence[Array]) -> Array:
        return weight - self.local.local_state(state, shards).weight


def _on_full_states(
    inner: Round,
    view_of: Callable[[TrainState, Sequence[Array]], TrainState],
    rows_of: Callable[[Any], Any],
) -> Round:
    """Converts a round on states of one replica to a round on full states."""

    def run(
        state: TrainState, pending: Any, shards: Sequence[Array], rows: Any, *results: Any
    ) -> tuple[Messages, Any]:
        view, local_shards = take_apart(view_of(state, shards))
        inputs = dict(zip(GIVEN, (view, pending, local_shards, rows_of(rows))))
        return inner.run(*(inputs[name] for name in inner.reads), *results)

    return inner._replace(reads=GIVEN, run=run)


def _without_silent(rounds: Sequence[Round]) -> tuple[Round, ...]:
    """Merges each round without messages into the next one."""
    merged = [rounds[0]]
    for following in rounds[1:]:
        last = merged[-1]
        if last.reductions:
            merged.append(following)
        else:
            both = partial(_run_both, last.run, following.run)
            merged[-1] = last._replace(run=both, reductions=following.reductions)
    return tuple(merged)


def _run_both(first: RunRound, second: RunRound, *arguments: Any) -> tuple[Messages, Any]:
    return second(*arguments[: len(GIVEN)], *first(*arguments))
