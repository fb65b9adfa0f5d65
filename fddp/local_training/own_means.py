"""Means of an island's local arrays: moments of its optimizer, or its parameters over a node.

Each is a plain mean, in which an island's weight is the data it has trained on since the last one.
No hook sums it: a second moment that is rounded to zero would become a divisor, and the memory of
hooks covers only gradients and pseudo-gradients. Parameters are sent as changes since the last
synchronization, like pseudo-gradients, so that rounding to a narrow dtype costs less.

Source: Iacob et al., "DES-LOC" (arXiv 2505.22549), algorithm 1; `HierarchicalModelAverager` in
PyTorch.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from fddp.buckets import Messages, Shard, is_shard, leaf_layout, leaves_with_shards, make_plan
from fddp.comm import Level
from fddp.hooks import Reduction
from fddp.local_training.inside import Trains, trained_leaves
from fddp.local_training.wire import Averaged, Wire
from fddp.optim import NODE, LocalState, LocalSteps, fields_of
from fddp.step import Facts, Replica, TrainState, Way, with_trained
from fddp.wording import leaf_name


@dataclass(frozen=True)
class OwnMean:
    """A mean of some local arrays of an island, for one replica."""

    number: int
    wire: Wire
    read: Callable[[TrainState], list[Any]]
    """State → arrays of a replica, as shards where it holds a part."""
    write: Callable[[TrainState, list[Any]], TrainState]
    """(state, arrays) → state with these arrays."""
    origin: Callable[[LocalState], list[Any]] | None = None
    """State → whole arrays, equal on all islands, as origin of changes; None: arrays are sent as
    values."""
    mix: float = 0.0
    """Share of its local arrays that a replica retains."""

    @property
    def renews(self) -> tuple[int, ...]:
        """Numbers of the means that restart with it."""
        return (self.number,)

    def changed(self, local: LocalState, view: TrainState, rows: PyTree) -> Messages:
        """Packs this replica's part of the weighted arrays."""
        del rows
        leaves = self.read(view)
        arrays = self._from_origin(local, leaves, list(map(_array, leaves)))
        return self.wire.packed(
            view.opt_state.weight[self.number], list(map(self.wire.part, arrays)), None
        )

    def landed(
        self, local: LocalState, state: TrainState, mean: Averaged
    ) -> tuple[LocalState, TrainState]:
        """Replaces the island's arrays by the mean, unless no island has trained."""
        leaves = self.read(state)
        # Arrays without elements are not sent.
        arrays = [
            _array(x) if new is None else new
            for x, new in zip(leaves, self.wire.unpacked(mean.buckets))
        ]

        def after(x: Any, new: Array) -> Any:
            old = _array(x)
            new = new + self.mix * (old - new) if self.mix else new
            chosen = jnp.where(mean.weight == 0, old, new).astype(old.dtype)
            return replace(x, parts=chosen) if is_shard(x) else chosen

        return local, self.write(
            state, list(map(after, leaves, self._from_origin(local, leaves, arrays)))
        )

    def _from_origin(
        self, local: LocalState, leaves: Sequence[Any], arrays: list[Array]
    ) -> list[Array]:
        """Returns origin − arrays, which converts between arrays and changes both ways."""
        if self.origin is None:
            return arrays
        comm = self.wire.group.communicator.at("shards")

        def cut(x: Any, origin: Array) -> Array:
            return x.layout.part(origin, comm.replica_index()) if is_shard(x) else origin

        return [
            cut(x, origin) - array for x, origin, array in zip(leaves, self.origin(local), arrays)
        ]


def own_means(
    steps: LocalSteps, inner: Way, replica: Replica, facts: Facts, scalars: Any
) -> list[OwnMean]:
    """Makes the further means of `local_steps(every=)`, in the order of their numbers."""
    trained = replica.trained(facts.state.params)
    params, opt_state, _ = _held_forms(inner, replica, trained, facts.state.opt_state)
    fields = fields_of(facts.state.opt_state, trained)
    island_size = steps.replicas(replica.group.parts)
    wired = partial(_wire, replica, island_size, scalars)

    def over_node(number: int) -> OwnMean:
        read = lambda view: leaves_with_shards(trained_leaves(replica, view.params))  # noqa: E731

        def write(view: TrainState, leaves: list[Any]) -> TrainState:
            treedef = jax.tree.structure(trained_leaves(replica, view.params), is_leaf=is_shard)
            return view._replace(params=with_trained(view.params, treedef.unflatten(leaves)))

        wire = wired(NODE, params, range(len(leaves_with_shards(params))), "neighbours")
        return OwnMean(
            number, wire, read, write, lambda local: jax.tree.leaves(local.shared), steps.mix
        )

    def of_field(number: int, name: str) -> OwnMean:
        positions = fields[name]

        def read(view: TrainState) -> list[Any]:
            leaves = leaves_with_shards(view.opt_state.opt_state)
            return [leaves[k] for k in positions]

        def write(view: TrainState, arrays: list[Any]) -> TrainState:
            trains: Trains = view.opt_state
            leaves, treedef = jax.tree.flatten(trains.opt_state, is_leaf=is_shard)
            new_leaves = dict(zip(positions, arrays))
            opt_state = treedef.unflatten([new_leaves.get(k, x) for k, x in enumerate(leaves)])
            return view._replace(opt_state=trains._replace(opt_state=opt_state))

        level = "all" if island_size == 1 else "network"
        return OwnMean(number, wired(name, opt_state, positions, level), read, write)

    names = enumerate((name for name, _ in steps.others), start=steps.fragments)
    return [over_node(number) if name == NODE else of_field(number, name) for number, name in names]


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
    forms = [_array(x) for _, x in chosen]
    order = [k for k, x in reversed(list(enumerate(forms))) if x.size]
    plan = replace(make_plan(forms, order=order, **replica.options.bucketing), parts=num_parts)

    def told(reduction: Reduction) -> Reduction:
        if reduction.bucket is None:
            return reduction._replace(name=f"{name} weight", carries="weight")
        first, *more = (leaf_name(chosen[k][0]) for k in plan.buckets[reduction.bucket].leaves)
        carries = f"{first} and {len(more)} more" if more else first
        return reduction._replace(name=f"{name} {reduction.bucket}", bucket=None, carries=carries)

    return Wire(replica.group, plan, level, scalars, None, told)


def _held_forms(inner: Way, replica: Replica, trained: PyTree, opt_state: PyTree) -> Any:
    """Shapes and dtypes of a replica's arrays in an island, with shards for its parts."""
    layouts = [leaf_layout(x.shape, replica.group.parts) for x in jax.tree.leaves(trained)]

    def cut(x: Any, leaf: int) -> Shard:
        layout = layouts[leaf].of(x.shape)
        return Shard(jax.ShapeDtypeStruct(layout.dims, x.dtype), layout)

    params, opt_state, buffers = inner.hold(replica, trained, opt_state, None, cut, lambda x: x)
    params = jax.tree.map(lambda x, part: x if part is None else part, trained, params)
    return params, opt_state, buffers


def _array(x: Any) -> Any:
    return x.parts if is_shard(x) else x
