"""Means of arrays that each island holds as its own: moments of its optimizer, or its parameters over a node.

Each is a plain mean, in which an island weighs as much as it has trained on since the last one. No hook sums it: a
second moment that is rounded to zero would be divided by, and hooks remember gradients and pseudo-gradients. Parameters
travel as changes since the last synchronization, as pseudo-gradients do, so that few bits are lost.

Source: Iacob et al., "DES-LOC" (arXiv 2505.22549), algorithm 1; `HierarchicalModelAverager` in PyTorch.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from fddp.buckets import Messages, Shard, cut_as_leaf, is_shard, make_plan, own_part, part_dims
from fddp.comm import Level
from fddp.hooks import Reduction
from fddp.local_training.inside import Trains, trained_leaves
from fddp.local_training.wire import Averaged, Wire
from fddp.optim import NODE, LocalState, LocalSteps, fields_of
from fddp.step import Facts, Replica, TrainState, Way, with_trained
from fddp.wording import leaf_name


@dataclass(frozen=True)
class OwnMean:
    """A mean of some of an island's own arrays, from one replica's point of view."""

    number: int
    wire: Wire
    read: Callable[[TrainState], list[Any]]
    """Gives the arrays that a replica has, in shards where it has a part of them."""
    write: Callable[[TrainState, list[Any]], TrainState]
    """Puts others in their place."""
    origin: Callable[[LocalState], list[Any]] | None = None
    """Gives whole arrays, equal on all islands, from which changes are told; None: arrays travel as they are."""
    mix: float = 0.0
    """Share of its own arrays that a replica keeps."""

    @property
    def renews(self) -> tuple[int, ...]:
        """The numbers of the means that begin anew when it lands."""
        return (self.number,)

    def changed(self, local: LocalState, view: TrainState, rows: Any) -> Messages:
        """Makes the messages: a part of the weighted arrays."""
        del rows
        own = self.read(view)
        arrays = self._from_origin(local, own, list(map(_array, own)))
        return self.wire.packed(view.opt_state.weight[self.number], list(map(self.wire.part, arrays)), None)

    def landed(self, local: LocalState, own: TrainState, mean: Averaged) -> tuple[LocalState, TrainState]:
        """The island's arrays become the mean; where no island has trained they stay."""
        held = self.read(own)
        # What has no elements has not travelled.
        came = [_array(x) if new is None else new for x, new in zip(held, self.wire.unpacked(mean.buckets))]

        def after(x: Any, new: Array) -> Any:
            before = _array(x)
            new = new + self.mix * (before - new) if self.mix else new
            chosen = jnp.where(mean.weight == 0, before, new).astype(before.dtype)
            return replace(x, parts=chosen) if is_shard(x) else chosen

        return local, self.write(own, list(map(after, held, self._from_origin(local, held, came))))

    def _from_origin(self, local: LocalState, held: Sequence[Any], arrays: list[Array]) -> list[Array]:
        """Origin − arrays, which takes changes for arrays, and arrays for changes; without an origin they stay."""
        if self.origin is None:
            return arrays
        group = self.wire.group

        def cut(x: Any, whole: Array) -> Array:
            if not is_shard(x):
                return whole
            return own_part(whole, group.parts, group.communicator.at("shards").replica_index(), x.depth)

        return [cut(x, whole) - array for x, whole, array in zip(held, self.origin(local), arrays)]


def own_means(steps: LocalSteps, inner: Way, replica: Replica, facts: Facts, scalars: Any) -> list[OwnMean]:
    """Makes the means that `local_steps(every=)` names beside the parameters.

    Args:
      steps: the optimizer.
      inner: the way in which the replicas of an island hold a state.
      replica: one of all.
      facts: of the step.
      scalars: a dtype that holds weights.

    Returns:
      The means, in the order of their numbers.
    """
    trained = replica.trained(facts.state.params)
    params, opt_state, _ = _held_forms(inner, replica, trained, facts.state.opt_state)
    fields = fields_of(facts.state.opt_state, trained)
    several = steps.replicas(replica.group.parts)
    wired = partial(_wire, replica, several, scalars)

    def over_node(number: int) -> OwnMean:
        read = lambda view: _leaves(trained_leaves(replica, view.params))  # noqa: E731

        def write(view: TrainState, leaves: list[Any]) -> TrainState:
            treedef = jax.tree.structure(trained_leaves(replica, view.params), is_leaf=is_shard)
            return view._replace(params=with_trained(view.params, treedef.unflatten(leaves)))

        wire = wired(NODE, params, range(len(_leaves(params))), "neighbours")
        return OwnMean(number, wire, read, write, lambda local: jax.tree.leaves(local.shared), steps.mix)

    def of_field(number: int, name: str) -> OwnMean:
        places = fields[name]

        def read(view: TrainState) -> list[Any]:
            leaves = _leaves(view.opt_state.opt_state)
            return [leaves[at] for at in places]

        def write(view: TrainState, arrays: list[Any]) -> TrainState:
            held: Trains = view.opt_state
            leaves, treedef = jax.tree.flatten(held.opt_state, is_leaf=is_shard)
            new = dict(zip(places, arrays))
            opt_state = treedef.unflatten([new.get(at, x) for at, x in enumerate(leaves)])
            return view._replace(opt_state=held._replace(opt_state=opt_state))

        level = "all" if several == 1 else "network"
        return OwnMean(number, wired(name, opt_state, places, level), read, write)

    names = enumerate((name for name, _ in steps.others), start=steps.fragments)
    return [over_node(number) if name == NODE else of_field(number, name) for number, name in names]


def _wire(
    replica: Replica,
    several: int,
    scalars: Any,
    name: str,
    held: Any,
    places: Sequence[int],
    level: Level,
) -> Wire:
    """The wire of some arrays, given the forms of all that a replica holds."""
    named = jax.tree_util.tree_leaves_with_path(held, is_leaf=is_shard)
    chosen = [named[at] for at in places]
    # Where an island holds arrays in parts these go as they are; single numbers, which it never cuts, go with them.
    parts = 1 if any(is_shard(x) for _, x in chosen) else several
    forms = [_array(x) for _, x in chosen]
    travelling = [k for k, x in reversed(list(enumerate(forms))) if x.size]
    whole = replace(make_plan(forms, order=travelling, **replica.options.bucketing), parts=parts)

    def told(one: Reduction) -> Reduction:
        if one.bucket is None:
            return one._replace(name=f"{name} weight", carries="weight")
        first, *more = (leaf_name(chosen[k][0]) for k in whole.buckets[one.bucket].leaves)
        carries = f"{first} and {len(more)} more" if more else first
        return one._replace(name=f"{name} {one.bucket}", bucket=None, carries=carries)

    return Wire(replica.group, whole, level, scalars, None, told)


def _held_forms(inner: Way, replica: Replica, trained: Any, opt_state: Any) -> Any:
    """The forms of what a replica of an island holds: in shards what it holds a part of."""
    parts = replica.group.parts
    shapes = [x.shape for x in jax.tree.leaves(trained)]

    def cut(x: Any, leaf: int) -> Shard:
        depth, _ = cut_as_leaf(x.size, shapes[leaf], parts)
        return Shard(jax.ShapeDtypeStruct(part_dims(x.size, parts, depth), x.dtype), x.shape, depth=depth)

    params, opt_state, buffers = inner.hold(replica, trained, opt_state, None, cut, lambda x: x)
    params = jax.tree.map(lambda x, part: x if part is None else part, trained, params)
    return params, opt_state, buffers


def _leaves(tree: Any) -> list[Any]:
    return jax.tree.leaves(tree, is_leaf=is_shard)


def _array(x: Any) -> Any:
    return x.parts if is_shard(x) else x
