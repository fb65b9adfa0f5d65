"""Means of an island's local arrays: moments of its optimizer, or its parameters over a node.

Each is a plain mean, in which an island's weight is the data it has trained on since the last one.
No hook sums it: a second moment that is rounded to zero would become a divisor, and the memory of
hooks covers only gradients and pseudo-gradients. Parameters are sent as changes since the last
synchronization, like pseudo-gradients, so that rounding to a narrow dtype costs less.

Source: Iacob et al., "DES-LOC" (arXiv 2505.22549), algorithm 1; `HierarchicalModelAverager` in
PyTorch.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from fddp.buckets import Messages, Shard, is_shard, leaf_layout, leaves_with_shards, make_plan
from fddp.comm import Level
from fddp.hooks import Reduction
from fddp.jaxpr import with_trained
from fddp.local_training.inside import array_of, parts_held, trained_leaves, with_array
from fddp.local_training.local_optimizer import LocalSteps
from fddp.local_training.periods import NODE, fields_of
from fddp.local_training.wire import Averaged, Wire
from fddp.step import Agreed, LocalState, Replica, TrainState, Way
from fddp.wording import leaf_name


@dataclass(frozen=True)
class LocalMean:
    """A mean of some arrays of the inner optimizer's state, for one replica."""

    number: int
    wire: Wire
    positions: Sequence[int]
    """Positions of their leaves in the state."""

    @property
    def renews(self) -> tuple[int, ...]:
        """Numbers of the means that restart with it."""
        return (self.number,)

    def changed(self, local: LocalState, view: TrainState, rows: PyTree) -> Messages:
        """Packs this replica's part of the weighted arrays."""
        del rows
        leaves = self._leaves(view)
        arrays = self._changes(local, leaves, [array_of(x) for x in leaves])
        parts = [self.wire.part(x) for x in arrays]
        return self.wire.packed(view.opt_state.weight[self.number], parts, None)

    def landed(
        self, local: LocalState, state: TrainState, mean: Averaged
    ) -> tuple[LocalState, TrainState]:
        """Replaces the island's arrays by the mean, unless no island has trained."""
        leaves, treedef = jax.tree.flatten(self._tree(state), is_leaf=is_shard)
        old = [leaves[k] for k in self.positions]
        arrays = self.wire.unpacked(mean.buckets)
        for k, x in enumerate(old):
            if arrays[k] is None:  # an array without elements, which is not sent
                arrays[k] = array_of(x)
        for k, x, new in zip(self.positions, old, self._changes(local, old, arrays)):
            leaves[k] = self._updated(x, new, mean.weight)
        return local, self._with_tree(state, treedef.unflatten(leaves))

    def _updated(self, x: Any, new: Array, weight: Array) -> Any:
        old = array_of(x)
        return with_array(x, jnp.where(weight == 0, old, new).astype(old.dtype))

    def _changes(self, local: LocalState, leaves: Sequence[Any], arrays: list[Any]) -> list[Any]:
        """Converts between arrays and the changes that are sent in their place, both ways."""
        del local, leaves
        return arrays

    def _leaves(self, view: TrainState) -> list[Any]:
        """Lists the arrays of a replica, as shards where it holds a part."""
        leaves = leaves_with_shards(self._tree(view))
        return [leaves[k] for k in self.positions]

    def _tree(self, view: TrainState) -> Any:
        return view.opt_state.opt_state

    def _with_tree(self, view: TrainState, tree: PyTree) -> TrainState:
        return view._replace(opt_state=view.opt_state._replace(opt_state=tree))


@dataclass(frozen=True)
class NodeMean(LocalMean):
    """A mean of the parameters over the islands of a node, sent as changes."""

    replica: Replica
    mix: float
    """Share of its local arrays that a replica retains."""

    def _updated(self, x: Any, new: Array, weight: Array) -> Any:
        if self.mix:
            new = new + self.mix * (array_of(x) - new)
        return super()._updated(x, new, weight)

    def _changes(self, local: LocalState, leaves: Sequence[Any], arrays: list[Any]) -> list[Any]:
        """Subtracts arrays from the shared parameters, which are equal on all islands."""
        shared = jax.tree.leaves(local.shared)
        return [self._cut(x, old) - array for x, old, array in zip(leaves, shared, arrays)]

    def _cut(self, x: Any, shared: Array) -> Array:
        if not is_shard(x):
            return shared
        index = self.wire.group.communicator.at("shards").replica_index()
        return x.layout.part(shared, index)

    def _tree(self, view: TrainState) -> Any:
        return trained_leaves(self.replica, view.params)

    def _with_tree(self, view: TrainState, tree: PyTree) -> TrainState:
        return view._replace(params=with_trained(view.params, tree))


def local_means(
    steps: LocalSteps, inner: Way, replica: Replica, agreed: Agreed, scalars: Any
) -> list[LocalMean]:
    """Makes the further means of `local_steps(every=)`, in the order of their numbers."""
    trained = replica.trained(agreed.state.params)
    params, opt_state = _held_forms(inner, replica, trained, agreed.state.opt_state)
    fields = fields_of(agreed.state.opt_state, trained)
    island_size = steps.replicas(replica.group.parts)
    level = steps.level(replica.group.parts)
    means = []
    for number, (name, _) in enumerate(steps.others, start=steps.fragments):
        if name == NODE:
            positions = range(len(leaves_with_shards(params)))
            wire = _wire(replica, island_size, scalars, name, params, positions, "neighbours")
            means.append(NodeMean(number, wire, positions, replica, steps.mix))
        else:
            wire = _wire(replica, island_size, scalars, name, opt_state, fields[name], level)
            means.append(LocalMean(number, wire, fields[name]))
    return means


def _wire(
    replica: Replica,
    island_size: int,
    scalars: Any,
    name: str,
    tree: PyTree,
    positions: Sequence[int],
    level: Level,
) -> Wire:
    """Makes the wire of the leaves at some positions of a replica's tree."""
    leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_shard)
    chosen = [leaves[k] for k in positions]
    # Parts that an island holds are sent unchanged, together with its scalars, which are never cut.
    num_parts = 1 if any(is_shard(x) for _, x in chosen) else island_size
    forms = [array_of(x) for _, x in chosen]
    order = [k for k, x in reversed(list(enumerate(forms))) if x.size]
    plan = replace(make_plan(forms, order=order, **replica.options.bucketing), parts=num_parts)

    def told(reduction: Reduction) -> Reduction:
        if reduction.bucket is None:
            return reduction._replace(name=f"{name} weight", carries="weight")
        first, *more = (leaf_name(chosen[k][0]) for k in plan.buckets[reduction.bucket].leaves)
        carries = f"{first} and {len(more)} more" if more else first
        return reduction._replace(name=f"{name} {reduction.bucket}", bucket=None, carries=carries)

    return Wire(replica.group, plan, level, scalars, None, told)


def _held_forms(
    inner: Way, replica: Replica, trained: PyTree, opt_state: PyTree
) -> tuple[Any, Any]:
    """Shapes and dtypes of a replica's arrays in an island, with shards for its parts."""
    layouts = [leaf_layout(x.shape, replica.group.parts) for x in jax.tree.leaves(trained)]

    def cut(x: Any, leaf: int) -> Shard:
        layout = layouts[leaf].of(x.shape)
        return Shard(jax.ShapeDtypeStruct(layout.dims, x.dtype), layout)

    return parts_held(inner, replica, trained, opt_state, cut)
