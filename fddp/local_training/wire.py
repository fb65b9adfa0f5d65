"""The wire between islands: buckets of weighted arrays go out, and their mean comes back.

An island's arrays are equal on all of its replicas. Each sends a part of them to the replicas of the same place in the
other islands, and they gather the parts of the sum: so between islands each number travels once, however many replicas
an island has. What the replicas of an island hold in parts already is sent so, and nothing is gathered.

Source: `HierarchicalModelAverager` in PyTorch.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Shaped

from fddp.buckets import (
    BucketPlan,
    Messages,
    add_tail,
    at_least,
    depth_of,
    own_part,
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

RANGE = jnp.bfloat16  # weights of many steps times their changes outgrow float16, and no dtype of this range


class Averaged(NamedTuple):
    """A mean over islands, as it came back."""

    buckets: tuple[Array, ...]
    """This replica's parts of the mean, a bucket each; or those of all replicas of the island, once they are
    gathered."""
    weight: Array
    """Σ w of all islands."""
    more: Any
    """Sums of what travelled beside the buckets."""


@dataclass(frozen=True)
class Wire:
    """Buckets on their way between islands, from one replica's point of view."""

    group: Group
    whole: BucketPlan
    """The plan of the arrays. Of the parts in which they travel each replica of an island sends one; where there is one
    part, each sends all that it holds."""
    level: Level
    """The replicas that average: one of each island."""
    scalars: Any
    """A dtype that holds weights, and what else travels beside the buckets."""
    hook: Hook | None
    """Sums each bucket; None: the plain sum."""
    named: Callable[[Reduction], Reduction]
    """Names a message, and says for which bucket of the step it counts."""

    @property
    def sums(self) -> tuple[Reduction, ...]:
        """The weighted sums over islands."""
        return tuple(self.named(one)._replace(level=self.level) for one in reductions(self.sent, self.hook, None))

    @property
    def gathers(self) -> tuple[Reduction, ...]:
        """The gathers of parts inside of an island."""
        if self.whole.parts == 1:
            return ()
        gather = Reduction(carries="", collective="all_gather", level="node", replicas=self.whole.parts)
        named = (self.named(Reduction(f"bucket {k}", bucket=k)) for k in range(len(self.whole.buckets)))
        return tuple(gather._replace(name=f"gather {x.name.removeprefix('bucket ')}", bucket=x.bucket) for x in named)

    def part(self, x: Shaped[Array, " *dims"]) -> Shaped[Array, " *part"]:
        """This replica's part of an array."""
        parts = self.whole.parts
        index = self.group.communicator.at("node").replica_index() if parts > 1 else jnp.int32(0)
        return own_part(x, parts, index, depth_of(x.size, x.shape, parts))

    def packed(self, weight: Array, parts: Any, more: Any) -> Messages:
        """Makes the messages of this replica's parts, in the plan's tree, None for those that stay."""

        def weighted(x: Array) -> Array:
            return (weight * x).astype(at_least(x.dtype, RANGE))

        return add_tail(self.sent, pack(self.sent, jax.tree.map(weighted, parts)), (weight, more))

    def averaged(self, messages: Messages) -> Averaged:
        """The mean of what came back."""
        buckets, (weight, more) = take_tail(self.sent, messages)
        divisor = jnp.where(weight == 0, 1, weight)
        leaves = self.of_parts.treedef.flatten_up_to(unpack(self.sent, buckets))
        mean = [None if x is None else (x / divisor).astype(of.dtype) for x, of in zip(leaves, self.of_parts.leaves)]
        return Averaged(pack(self.of_parts, self.of_parts.treedef.unflatten(mean)), weight, more)

    def unpacked(self, buckets: Sequence[Array]) -> list[Array | None]:
        """The arrays of the plan's tree; None for those that stay."""
        came = unpack_rows(self.of_parts, self.whole, self.whole.parts, buckets)
        return self.whole.treedef.flatten_up_to(came)

    @cached_property
    def of_parts(self) -> BucketPlan:
        """The same buckets, of one replica's parts."""
        return plan_of_parts(self.whole)

    @cached_property
    def sent(self) -> BucketPlan:
        """The same, as they are summed: in dtypes that hold weighted changes, with the scalars among them."""
        return place_scalars(widened(self.of_parts, RANGE), self.scalars, exact=self.hook is None)
