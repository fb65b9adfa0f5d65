"""A step of islands that train alone, and synchronize a part of their state now and then.

An island is one replica, or several that make ordinary steps with each other. There are three kinds of step. In the
first all replicas average gradients, as in any other step. In the second each island trains alone. The third is the
second that also sends: the pseudo-gradient of a fragment to an outer optimizer, and what else is averaged.

Source: Douillard et al., "DiLoCo" (2023) and "Streaming DiLoCo" (2025); what `fddp.local_steps` names besides.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from fddp.buckets import BucketPlan, Messages, copy_of, is_shard, join, take_apart
from fddp.comm import add_replica_dim, drop_replica_dim
from fddp.local_training.inside import (
    keys_of_island,
    own_copies,
    own_rows,
    own_view,
    shared_held,
    trained_leaves,
)
from fddp.local_training.several import NOTHING, Exchange, Several
from fddp.optim import LocalState, LocalSteps
from fddp.schedules import Pieces, Round, more_sent, sent_by_bucket
from fddp.step import Replica, TrainState, with_trained

GIVEN = ("state", "pending", "shards", "rows")
# A state as one replica sees it, and what the step tells.
Trained = tuple[TrainState, Any]


@dataclass(frozen=True)
class Local:
    """Such a step, from one replica's point of view."""

    replica: Replica
    inner: Pieces
    """A step of an island, of a state with `Trains`."""
    steps: LocalSteps
    plan: BucketPlan
    """The plan of all buckets."""
    exchanges: Sequence[Exchange]
    """All that islands send each other now and then, by its number."""

    def together(self, pieces: Pieces) -> Pieces:
        """A step that averages the gradients of all replicas, of a state with `Trains`; they stay equal."""

        def finish(state: TrainState, shards: Any, messages: Messages, kept: Any, sent: Any) -> tuple[Any, Any]:
            new, info = self._trained(pieces, state, shards, messages, kept, sent)
            before = self._local(state, shards)
            new = new._replace(opt_state=new.opt_state._replace(weight=before.weight))
            return self._held(state, before._replace(shared=trained_leaves(self.replica, new.params)), (new, info))

        rounds = tuple(self._seen(one, lambda view: view, lambda rows: rows) for one in pieces.rounds)
        return Pieces(rounds, finish, pieces.name)

    def alone(self) -> Pieces:
        """A step of each island for itself."""

        def finish(state: TrainState, shards: Any, messages: Messages, kept: Any, sent: Any) -> tuple[Any, Any]:
            trained = self._trained(self.inner, state, shards, messages, kept, sent)
            return self._held(state, state.opt_state, trained)

        return Pieces(self._inner_rounds, finish, self.inner.name)

    def sends(self, due: Sequence[int]) -> Pieces:
        """A step that sends some of it: as it was before the step if there is a delay, else as it is then."""
        several = Several(tuple(self.exchanges[number] for number in due))
        return self._sends_before(several) if self.steps.delay else self._sends_after(several)

    def _sends_after(self, several: Several) -> Pieces:
        """Sends what an island has at the step's end."""

        def send(state: TrainState, pending: Any, shards: Any, rows: Any, came: Messages, kept: Any) -> tuple[Any, Any]:
            trained = self._trained(self.inner, state, shards, came, kept, self._nothing)
            messages, layouts = several.changed(state.opt_state, trained[0], rows)
            return messages, (layouts, add_replica_dim(trained))

        def land(state: TrainState, shards: Any, kept: Any) -> Trained:
            return drop_replica_dim(kept)

        def arrived(came: Messages, kept: Any) -> tuple[list[Messages], Any]:
            layouts, kept = kept
            return several.taken(layouts, came.arrays), kept

        rounds = *self._inner_rounds, Round("send", GIVEN, send, several.sums)
        return self._landing(several, _without_silent(rounds), land, arrived)

    def _sends_before(self, several: Several) -> Pieces:
        """Sends what an island had before the step, beside its forward and backward pass."""
        first, *others = self._inner_rounds
        count = len(several.sums)

        def begin(state: TrainState, pending: Any, shards: Any, rows: Any, *nothing: Any) -> tuple[Messages, Any]:
            view = own_view(state, shards)
            sent, layouts = several.changed(state.opt_state, view, rows)
            messages, kept = first.run(state, pending, shards, rows, *nothing)
            return replace(messages, arrays=(*sent.arrays, *messages.arrays)), (layouts, kept)

        def came_first(came: Messages, kept: Any) -> tuple[list[Messages], Messages, Any]:
            """The sums over islands, those of the island, and what was kept."""
            sums, kept = kept
            if any(one.arrays for one in sums):
                return sums, came, kept
            return several.taken(sums, came.arrays[:count]), replace(came, arrays=came.arrays[count:]), kept

        def following(one: Round) -> Round:
            def run(
                state: TrainState, pending: Any, shards: Any, rows: Any, came: Messages, kept: Any
            ) -> tuple[Messages, Any]:
                sums, came, kept = came_first(came, kept)
                messages, kept = one.run(state, pending, shards, rows, came, kept)
                return messages, (sums, kept)

            return one._replace(run=run)

        def arrived(came: Messages, kept: Any) -> tuple[list[Messages], Any]:
            sums, came, kept = came_first(came, kept)
            return sums, (came, kept)

        def land(state: TrainState, shards: Any, kept: Any) -> Trained:
            came, kept = kept
            return self._trained(self.inner, state, shards, came, kept, self._nothing)

        begins = first._replace(run=begin, reductions=(*several.sums, *first.reductions))
        return self._landing(several, (begins, *map(following, others)), land, arrived)

    def _landing(
        self,
        several: Several,
        rounds: Sequence[Round],
        land: Callable[[TrainState, Any, Any], Trained],
        arrived: Callable[[Messages, Any], tuple[list[Messages], Any]],
    ) -> Pieces:
        """Ends a step whose rounds have sent: the island puts its parts together, and goes on with them."""

        def gather(
            state: TrainState, pending: Any, shards: Any, rows: Any, came: Messages, kept: Any
        ) -> tuple[Messages, Any]:
            sums, kept = arrived(came, kept)
            buckets, means = several.to_gather(several.averaged(sums))
            return replace(NOTHING, arrays=buckets), (add_replica_dim(means), kept)

        def finish(state: TrainState, shards: Any, messages: Messages, kept: Any, sent: Any) -> tuple[Any, Any]:
            if several.gathers:
                means, kept = kept
                means = several.gathered(drop_replica_dim(means), messages.arrays)
            else:
                sums, kept = arrived(messages, kept)
                means = several.averaged(sums)
            new, info = land(state, shards, kept)
            weight = new.opt_state.weight
            # With a delay this step's own is not among what was sent.
            left = weight - self._local(state, shards).weight if self.steps.delay else jnp.zeros_like(weight)
            local, new = several.landed(state.opt_state, new, means)
            anew = jnp.array(several.renews)
            weight = weight.at[anew].set(left[anew])
            new = new._replace(opt_state=new.opt_state._replace(weight=weight))
            told = info._replace(sent=more_sent(info.sent, sent_by_bucket(pieces.reductions, sent, info.sent.size)))
            return self._held(state, local, (new, told))

        more = (Round("gather", GIVEN, gather, several.gathers),) if several.gathers else ()
        pieces = Pieces((*rounds, *more), finish, self.inner.name)
        return pieces

    @property
    def _nothing(self) -> Any:
        """The bytes of an island's messages, where they are told later."""
        return jnp.zeros(len(self.inner.reductions), jnp.uint32)

    @property
    def _inner_rounds(self) -> tuple[Round, ...]:
        """The rounds of an island, which are for its own replicas."""
        group = self.replica.group
        several = self.steps.replicas(group.parts) > 1

        def among_its_own(one: Round) -> Round:
            return one._replace(reductions=tuple(x._replace(level="node") for x in one.reductions))

        def keys(view: TrainState) -> TrainState:
            return view._replace(rng=keys_of_island(group, view.rng)) if several else view

        return tuple(among_its_own(self._seen(one, keys, own_rows)) for one in self.inner.rounds)

    def _seen(self, one: Round, seen: Callable[[TrainState], TrainState], counted: Callable[[Any], Any]) -> Round:
        """A round of a state as one replica sees it, made one of the state as a step is given it."""

        def run(state: TrainState, pending: Any, shards: Any, rows: Any, *came: Any) -> tuple[Messages, Any]:
            view, own = take_apart(seen(own_view(state, shards)))
            given = {"state": view, "pending": pending, "shards": own, "rows": counted(rows)}
            return one.run(*(given[word] for word in one.reads), *came)

        return one._replace(reads=GIVEN, run=run)

    def _trained(
        self, pieces: Pieces, state: TrainState, shards: Any, messages: Messages, kept: Any, sent: Any
    ) -> Trained:
        """A step of the inner optimizer."""
        view, own = take_apart(own_view(state, shards))
        (new, info), own = pieces.finish(view, own, messages, kept, sent)
        return join(new, own), info

    def _local(self, state: TrainState, shards: Any) -> LocalState:
        return own_copies(join(state, shards)).opt_state

    def _held(self, before: TrainState, local: LocalState, trained: Trained) -> tuple[Any, Any]:
        """The step's result, with what is each replica's own apart."""
        own, info = trained
        copy = partial(copy_of, self.replica.group.copy_ranks)
        held = (trained_leaves(self.replica, own.params), own.opt_state, own.model_state)
        params, of_island, buffers = jax.tree.map(lambda x: x if is_shard(x) else copy(x), held, is_leaf=is_shard)
        opt_state = shared_held(local, copy)._replace(inner=of_island.opt_state, weight=of_island.weight)
        params = with_trained(own.params, params)
        state = own._replace(params=params, model_state=buffers, opt_state=opt_state, rng=before.rng)
        return take_apart((state, info))


def _without_silent(rounds: Sequence[Round]) -> list[Round]:
    """Makes a round that sends nothing a part of the next one."""
    first, *others = rounds
    if not others:
        return [first]
    if first.reductions:
        return [first, *_without_silent(others)]
    second, *others = others

    def run(*given: Any) -> tuple[Messages, Any]:
        return second.run(*given[: len(GIVEN)], *first.run(*given))

    return _without_silent([first._replace(run=run, reductions=second.reductions), *others])
