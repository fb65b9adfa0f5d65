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
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from fddp.buckets import BucketPlan, Messages, copy_of, insert_shards, is_shard, take_apart
from fddp.comm import add_replica_dim, drop_replica_dim
from fddp.local_training.inside import (
    keys_of_island,
    own_copies,
    own_rows,
    own_view,
    shared_held,
    trained_leaves,
)
from fddp.local_training.local_optimizer import LocalSteps
from fddp.local_training.several import NOTHING, Exchange, Several
from fddp.schedules import Pieces, Round, more_sent, sent_by_bucket
from fddp.step import LocalState, Replica, TrainState, with_trained

GIVEN = ("state", "pending", "shards", "rows")
# (state of one replica, info)
Trained = tuple[TrainState, Any]


@dataclass(frozen=True)
class Local:
    """The three kinds of step, for one replica."""

    replica: Replica
    inner: Pieces
    """A step within an island, of a state with `Trains`."""
    steps: LocalSteps
    plan: BucketPlan
    """Plan of all buckets."""
    exchanges: Sequence[Exchange]
    """All exchanges between islands, by number."""

    def together(self, pieces: Pieces) -> Pieces:
        """Makes a synchronous step from a step of states with `Trains`; all replicas stay equal."""

        def finish(
            state: TrainState, shards: Sequence[Array], sums: Messages, saved: Any, nbytes: Array
        ) -> tuple[Any, Any]:
            new, info = self._trained(pieces, state, shards, sums, saved, nbytes)
            before = self._local(state, shards)
            new = new._replace(opt_state=new.opt_state._replace(weight=before.weight))
            return self._held(
                state, before._replace(shared=trained_leaves(self.replica, new.params)), (new, info)
            )

        rounds = tuple(
            self._seen(step_round, lambda view: view, lambda rows: rows)
            for step_round in pieces.rounds
        )
        return Pieces(rounds, finish, pieces.name)

    def alone(self) -> Pieces:
        """Makes a local step."""

        def finish(
            state: TrainState, shards: Sequence[Array], sums: Messages, saved: Any, nbytes: Array
        ) -> tuple[Any, Any]:
            trained = self._trained(self.inner, state, shards, sums, saved, nbytes)
            return self._held(state, state.opt_state, trained)

        return Pieces(self._inner_rounds, finish, self.inner.name)

    def sends(self, due: Sequence[int]) -> Pieces:
        """Makes an exchange step.

        It sends the state before the step if exchanges have a delay, else the state after it.
        """
        exchanges = Several(tuple(self.exchanges[number] for number in due))
        return self._sends_before(exchanges) if self.steps.delay else self._sends_after(exchanges)

    def _sends_after(self, exchanges: Several) -> Pieces:
        """Makes a step with the exchanges at its end."""

        def send(
            state: TrainState, pending: Any, shards: Any, rows: Any, sums: Messages, saved: Any
        ) -> tuple[Any, Any]:
            trained = self._trained(self.inner, state, shards, sums, saved, self._nothing)
            messages, layouts = exchanges.changed(state.opt_state, trained[0], rows)
            return messages, (layouts, add_replica_dim(trained))

        def land(state: TrainState, shards: Sequence[Array], saved: Any) -> Trained:
            return drop_replica_dim(saved)

        def arrived(sums: Messages, saved: Any) -> tuple[list[Messages], Any]:
            layouts, saved = saved
            return exchanges.taken(layouts, sums.arrays), saved

        rounds = *self._inner_rounds, Round("send", GIVEN, send, exchanges.sums)
        return self._landing(exchanges, _without_silent(rounds), land, arrived)

    def _sends_before(self, exchanges: Several) -> Pieces:
        """Makes a step with the exchanges during its forward and backward pass."""
        first, *later = self._inner_rounds
        count = len(exchanges.sums)

        def begin(
            state: TrainState, pending: Any, shards: Sequence[Array], rows: Any, *nothing: Any
        ) -> tuple[Messages, Any]:
            view = own_view(state, shards)
            changes, layouts = exchanges.changed(state.opt_state, view, rows)
            messages, saved = first.run(state, pending, shards, rows, *nothing)
            return replace(messages, arrays=(*changes.arrays, *messages.arrays)), (layouts, saved)

        def came_first(inner_sums: Messages, saved: Any) -> tuple[list[Messages], Messages, Any]:
            """Returns the sums over islands, the sums within the island, and the saved values."""
            outer_sums, saved = saved
            if any(messages.arrays for messages in outer_sums):
                return outer_sums, inner_sums, saved
            return (
                exchanges.taken(outer_sums, inner_sums.arrays[:count]),
                replace(inner_sums, arrays=inner_sums.arrays[count:]),
                saved,
            )

        def following(inner_round: Round) -> Round:
            def run(
                state: TrainState, pending: Any, shards: Any, rows: Any, sums: Messages, saved: Any
            ) -> tuple[Messages, Any]:
                outer_sums, sums, saved = came_first(sums, saved)
                messages, saved = inner_round.run(state, pending, shards, rows, sums, saved)
                return messages, (outer_sums, saved)

            return inner_round._replace(run=run)

        def arrived(sums: Messages, saved: Any) -> tuple[list[Messages], Any]:
            outer_sums, sums, saved = came_first(sums, saved)
            return outer_sums, (sums, saved)

        def land(state: TrainState, shards: Sequence[Array], saved: Any) -> Trained:
            sums, saved = saved
            return self._trained(self.inner, state, shards, sums, saved, self._nothing)

        begins = first._replace(run=begin, reductions=(*exchanges.sums, *first.reductions))
        return self._landing(exchanges, (begins, *map(following, later)), land, arrived)

    def _landing(
        self,
        exchanges: Several,
        rounds: Sequence[Round],
        land: Callable[[TrainState, Sequence[Array], Any], Trained],
        arrived: Callable[[Messages, Any], tuple[list[Messages], Any]],
    ) -> Pieces:
        """Ends an exchange step: each island gathers its parts of the means, and applies them."""

        def gather(
            state: TrainState, pending: Any, shards: Any, rows: Any, sums: Messages, saved: Any
        ) -> tuple[Messages, Any]:
            outer_sums, saved = arrived(sums, saved)
            buckets, means = exchanges.to_gather(exchanges.averaged(outer_sums))
            return replace(NOTHING, arrays=buckets), (add_replica_dim(means), saved)

        def finish(
            state: TrainState, shards: Sequence[Array], results: Messages, saved: Any, nbytes: Array
        ) -> tuple[Any, Any]:
            if exchanges.gathers:
                means, saved = saved
                means = exchanges.gathered(drop_replica_dim(means), results.arrays)
            else:
                outer_sums, saved = arrived(results, saved)
                means = exchanges.averaged(outer_sums)
            new, info = land(state, shards, saved)
            weight = new.opt_state.weight
            # With a delay the messages do not include this step's weight.
            remaining = (
                weight - self._local(state, shards).weight
                if self.steps.delay
                else jnp.zeros_like(weight)
            )
            local, new = exchanges.landed(state.opt_state, new, means)
            renewed = jnp.array(exchanges.renews)
            weight = weight.at[renewed].set(remaining[renewed])
            new = new._replace(opt_state=new.opt_state._replace(weight=weight))
            full_info = info._replace(
                sent=more_sent(info.sent, sent_by_bucket(pieces.reductions, nbytes, info.sent.size))
            )
            return self._held(state, local, (new, full_info))

        gathers = (Round("gather", GIVEN, gather, exchanges.gathers),) if exchanges.gathers else ()
        pieces = Pieces((*rounds, *gathers), finish, self.inner.name)
        return pieces

    @property
    def _nothing(self) -> Any:
        """Placeholder for the bytes of the island's messages, which `finish` counts."""
        return jnp.zeros(len(self.inner.reductions), jnp.uint32)

    @property
    def _inner_rounds(self) -> tuple[Round, ...]:
        """Rounds within an island."""
        group = self.replica.group
        has_peers = self.steps.replicas(group.parts) > 1

        def among_its_own(inner_round: Round) -> Round:
            return inner_round._replace(
                reductions=tuple(x._replace(level="node") for x in inner_round.reductions)
            )

        def keys(view: TrainState) -> TrainState:
            return view._replace(rng=keys_of_island(group, view.rng)) if has_peers else view

        return tuple(
            among_its_own(self._seen(inner_round, keys, own_rows))
            for inner_round in self.inner.rounds
        )

    def _seen(
        self,
        inner_round: Round,
        map_view: Callable[[TrainState], TrainState],
        map_rows: Callable[[Any], Any],
    ) -> Round:
        """Converts a round on states of one replica to a round on full states."""

        def run(
            state: TrainState, pending: Any, shards: Sequence[Array], rows: Any, *results: Any
        ) -> tuple[Messages, Any]:
            view, local_shards = take_apart(map_view(own_view(state, shards)))
            inputs = {
                "state": view,
                "pending": pending,
                "shards": local_shards,
                "rows": map_rows(rows),
            }
            return inner_round.run(*(inputs[name] for name in inner_round.reads), *results)

        return inner_round._replace(reads=GIVEN, run=run)

    def _trained(
        self,
        pieces: Pieces,
        state: TrainState,
        shards: Sequence[Array],
        sums: Messages,
        saved: Any,
        nbytes: Array,
    ) -> Trained:
        """Takes a step of the inner optimizer."""
        view, local_shards = take_apart(own_view(state, shards))
        (new, info), local_shards = pieces.finish(view, local_shards, sums, saved, nbytes)
        return insert_shards(new, local_shards), info

    def _local(self, state: TrainState, shards: Sequence[Array]) -> LocalState:
        return own_copies(insert_shards(state, shards)).opt_state

    def _held(self, before: TrainState, local: LocalState, trained: Trained) -> tuple[Any, Any]:
        """Builds the step's result, with local arrays as shards."""
        view, info = trained
        copy = partial(copy_of, self.replica.group.copy_ranks)
        tree = (trained_leaves(self.replica, view.params), view.opt_state, view.model_state)
        params, trains, buffers = jax.tree.map(
            lambda x: x if is_shard(x) else copy(x), tree, is_leaf=is_shard
        )
        opt_state = shared_held(local, copy)._replace(inner=trains.opt_state, weight=trains.weight)
        params = with_trained(view.params, params)
        state = view._replace(
            params=params, model_state=buffers, opt_state=opt_state, rng=before.rng
        )
        return take_apart((state, info))


def _without_silent(rounds: Sequence[Round]) -> list[Round]:
    """Merges each round without messages into the next one."""
    first, *later = rounds
    if not later:
        return [first]
    if first.reductions:
        return [first, *_without_silent(later)]
    second, *later = later

    def run(*arguments: Any) -> tuple[Messages, Any]:
        return second.run(*arguments[: len(GIVEN)], *first.run(*arguments))

    return _without_silent([first._replace(run=run, reductions=second.reductions), *later])
