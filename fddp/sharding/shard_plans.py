"""The layouts of a replica's leaves in parts, and the plans of their buckets."""

from dataclasses import dataclass
from functools import cached_property

import jax

from fddp.buckets import BucketPlan, ShardLayout, plan_of_parts
from fddp.step import Agreed, Replica, leaf_layouts


@dataclass(frozen=True)
class ShardPlans:
    """The layouts of a replica's leaves, and the plans of the buckets that carry their parts."""

    replica: Replica
    agreed: Agreed

    @property
    def plan(self) -> BucketPlan:
        """The buckets of whole leaves."""
        return self.agreed.plan

    @cached_property
    def part_plan(self) -> BucketPlan:
        """The same buckets, with one replica's parts of the leaves."""
        return plan_of_parts(self.plan)

    @cached_property
    def leaf_layouts(self) -> list[ShardLayout]:
        """The layout of each leaf in parts of replicas."""
        return jax.tree.leaves(leaf_layouts(self.replica.group, self.agreed.state.params))
