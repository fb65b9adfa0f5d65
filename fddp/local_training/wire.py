"""Weighted means of buckets over islands.

The arrays of an island are equal on all of its replicas. Each replica sends a part of them to the
replicas at its position in the other islands, and the island gathers the parts of the sum. So each
number is sent between islands once, whatever the size of an island. Arrays that an island holds in
parts already are sent as parts, and not gathered.

Source: `HierarchicalModelAverager` in PyTorch.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree, Shaped

from fddp.buckets import (
    BucketPlan,
    Messages,
    add_tail,
    at_least,
    leaf_layout,
    pack,
    place_scalars,
    plan_of_parts,
    take_tail,
    unpack,
    unpack_rows,
    widened,
)
from fddp.comm import Group, Level
from fddp.hooks import Hook, Reduction, reductions

# Weights of many steps times their changes overflow float16, but no dtype of this range.
RANGE = jnp.bfloat16


class Averaged(NamedTuple):
    """A mean over islands."""

    buckets: tuple[Array, ...]
    """Buckets of the mean: this replica's parts, or after the gather those of all replicas of the
    island."""
    weight: Array
    """Σ w of all islands."""
    more: Any
    """Sums of the other values in the messages."""


@dataclass(frozen=True)
class Wire:
    """Buckets to be averaged over islands, for one replica."""

    group: Group
    whole: BucketPlan
    """Plan of the whole arrays. With several parts each replica of an island sends one."""
    level: Level
    """The replicas that average: one of each island."""
    scalars: Any
    """A dtype for weights and the other values in the messages."""
    hook: Hook | None
    """Sums each bucket; None: the plain sum."""
    named: Callable[[Reduction], Reduction]
    """Sets the name of a message and its bucket in the step."""

    @property
    def sums(self) -> tuple[Reduction, ...]:
        """Weighted sums over islands."""
        return tuple(
            self.named(reduction)._replace(level=self.level)
            for reduction in reductions(self.sent, self.hook)
        )

    @property
    def gathers(self) -> tuple[Reduction, ...]:
        """Gathers of parts inside an island."""
        if self.whole.parts == 1:
            return ()
        gather = Reduction(
            carries="", collective="all_gather", level="node", replicas=self.whole.parts
        )
        gathers = []
        for k in range(len(self.whole.buckets)):
            reduction = self.named(Reduction(f"bucket {k}", bucket=k))
            name = f"gather {reduction.name.removeprefix('bucket ')}"
            gathers.append(gather._replace(name=name, bucket=reduction.bucket))
        return tuple(gathers)

    def part(self, x: Shaped[Array, " *dims"]) -> Shaped[Array, " *part"]:
        """Returns this replica's part of an array."""
        count = self.whole.parts
        index = self.group.communicator.at("node").replica_index() if count > 1 else jnp.int32(0)
        return leaf_layout(x.shape, count).part(x, index)

    def packed(self, weight: Array, arrays: PyTree, more: PyTree) -> Messages:
        """Packs this replica's parts, in the plan's tree with None for leaves outside of it."""

        def weighted(x: Array) -> Array:
            return (weight * x).astype(at_least(x.dtype, RANGE))

        return add_tail(self.sent, pack(self.sent, jax.tree.map(weighted, arrays)), (weight, more))

    def averaged(self, messages: Messages) -> Averaged:
        """Divides the sums over islands by their weight."""
        buckets, (weight, more) = take_tail(self.sent, messages)
        divisor = jnp.where(weight == 0, 1, weight)
        leaves = self.of_parts.treedef.flatten_up_to(unpack(self.sent, buckets))
        mean = [
            None if x is None else (x / divisor).astype(leaf.dtype)
            for x, leaf in zip(leaves, self.of_parts.leaves)
        ]
        return Averaged(pack(self.of_parts, self.of_parts.treedef.unflatten(mean)), weight, more)

    def unpacked(self, buckets: Sequence[Array]) -> list[Array | None]:
        """Unpacks the leaves of the plan's tree, with None for leaves outside the plan."""
        tree = unpack_rows(self.whole, self.of_parts, buckets)
        return self.whole.treedef.flatten_up_to(tree)

    @cached_property
    def of_parts(self) -> BucketPlan:
        """Plan of one replica's parts of the buckets."""
        return plan_of_parts(self.whole)

    @cached_property
    def sent(self) -> BucketPlan:
        """Plan of the messages: parts in dtypes for weighted changes, and the scalars."""
        return place_scalars(widened(self.of_parts, RANGE), self.scalars, exact=self.hook is None)
