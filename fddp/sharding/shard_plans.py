"""The layouts of a replica's leaves in parts, and the plans of their buckets."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, TypeVar

from jax.sharding import PartitionSpec
from jaxtyping import PyTree

from fddp.buckets import BucketPlan, Layout, by_device, plan_of_parts
from fddp.comm import specs
from fddp.step import Agreed, Replica, leaf_layouts

Function = TypeVar("Function", bound=Callable[..., Any])


@dataclass(frozen=True)
class ShardPlans:
    """The layouts of a replica's leaves, and the plans of the buckets that carry their parts."""

    replica: Replica
    agreed: Agreed

    @property
    def plan(self) -> BucketPlan:
        """The buckets of whole leaves, or of a device's parts if a replica is several devices."""
        return self.agreed.plan

    @cached_property
    def part_plan(self) -> BucketPlan:
        """The same buckets, with one replica's parts of the leaves."""
        return plan_of_parts(self.plan)

    @cached_property
    def leaf_layouts(self) -> list[Layout]:
        """The layout of each leaf in parts of replicas."""
        group = self.replica.group
        params = self.agreed.state.params
        return leaf_layouts(group, params, specs(group.placement, params))

    def only(self, bucket: int) -> tuple[BucketPlan, BucketPlan]:
        """Two plans of a single bucket: of whole leaves, and of parts."""
        plan = replace(self.plan, buckets=(self.plan.buckets[bucket],))
        return plan, replace(self.part_plan, buckets=(self.part_plan.buckets[bucket],))

    @property
    def message_spec(self) -> PartitionSpec:
        """The spec of a message, which differs between the devices of a replica."""
        return PartitionSpec(self.replica.group.placement.other_axes)

    def travelling(self, tree: PyTree) -> list[Any]:
        """The leaves of a tree; None for leaves that are not sent."""
        numbers = _leaves_of(self.plan)
        leaves = self.plan.treedef.flatten_up_to(tree)
        return [x if i in numbers else None for i, x in enumerate(leaves)]

    def specs(self, kind: Literal["spec", "rows"]) -> list[PartitionSpec | None]:
        """The specs of whole leaves or of their rows; None for leaves that are not sent."""
        numbers = _leaves_of(self.plan)
        specs = [getattr(layout.cut, kind) for layout in self.leaf_layouts]
        return [spec if i in numbers else None for i, spec in enumerate(specs)]

    def by_device(self, f: Function, in_specs: PyTree, out_specs: PyTree) -> Function:
        """Maps a function over the devices of a replica."""
        return by_device(self.replica.group.placement.other_axes, f, in_specs, out_specs)


def _leaves_of(plan: BucketPlan) -> set[int]:
    return {i for bucket in plan.buckets for i in bucket.leaves}
