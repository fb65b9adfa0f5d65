"""The parts of leaves that each device of a replica holds, packed and sent by that device.

Replicas lie along one axis of a mesh. Along the others the user places parameters as any JAX array is placed (tensor
parallelism), and the loss is partitioned by XLA as under `jax.jit`. Packing must not be left to it: leaves that are cut
in different dims would be gathered first. So each device packs the parts that it holds, and an all-reduce joins the
devices that hold the same parts.

Source: PyTorch's 2D parallelism, `DistributedDataParallel` over a `DeviceMesh` with a tensor-parallel dim.
"""

from typing import Any

from jax.sharding import PartitionSpec

from fddp.buckets.by_device import by_device
from fddp.buckets.messages import Messages, add_tail, take_tail
from fddp.buckets.packing import pack, unpack
from fddp.buckets.plan import BucketPlan


def pack_device_parts(axes: tuple[str, ...], plan: BucketPlan, tree: Any, tail: Any, where: Any) -> Messages:
    """Packs gradients and tail into messages, on each device the parts that it holds; inside a program.

    Args:
      axes: mesh axes along which the devices of a replica lie.
      plan: a plan made for the parts (see `fddp.comm.device_parts`).
      tree: gradients, with None for leaves that have none.
      tail: a tree of small numbers, whole on every device of a replica.
      where: a tree of specs like the parameters, from `fddp.comm.specs`.

    Returns:
      The messages.
    """
    leaves = plan.treedef.flatten_up_to(tree)
    inside = plan.treedef.flatten_up_to(where)

    def pack_here(leaves: list[Any], tail: Any) -> Messages:
        return add_tail(plan, pack(plan, plan.treedef.unflatten(leaves)), tail)

    in_specs = ([None if x is None else spec for x, spec in zip(leaves, inside)], PartitionSpec())
    return by_device(axes, pack_here, in_specs, PartitionSpec(axes))(leaves, tail)


def unpack_device_parts(
    axes: tuple[str, ...], plan: BucketPlan, messages: Messages, where: Any
) -> tuple[list[Any], Any]:
    """Takes gradients and tail out of summed messages: the inverse of `pack_device_parts`.

    Args:
      axes: mesh axes along which the devices of a replica lie.
      plan: the plan that `pack_device_parts` followed.
      messages: the messages of `pack_device_parts`, summed over replicas.
      where: the specs that `pack_device_parts` was given.

    Returns:
      A gradient for each leaf of the plan, None for those that did not travel; and the tail.
    """
    inside = plan.treedef.flatten_up_to(where)

    def unpack_here(messages: Messages) -> tuple[list[Any], Any]:
        buckets, tail = take_tail(plan, messages)
        return plan.treedef.flatten_up_to(unpack(plan, buckets)), tail

    out_specs = (inside, PartitionSpec())
    return by_device(axes, unpack_here, (PartitionSpec(axes),), out_specs)(messages)
