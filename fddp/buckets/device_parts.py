"""Packs the tensor-parallel parts of gradients on the devices that hold them.

Replicas lie along one axis of a mesh. Along the other axes the user places parameters as any JAX
array is placed (tensor parallelism), and XLA partitions the loss as under `jax.jit`. To pack leaves
that are cut along different dims, XLA would gather them first. So each device packs its own parts,
and an all-reduce joins the devices that hold the same parts.

Source: PyTorch's 2D parallelism, `DistributedDataParallel` over a `DeviceMesh` with a
tensor-parallel dim.
"""

from collections.abc import Callable
from typing import Any, TypeVar

from jax.sharding import PartitionSpec
from jaxtyping import PyTree

from fddp.buckets.messages import Messages, add_tail, take_tail
from fddp.buckets.packing import pack
from fddp.buckets.plan import BucketPlan
from fddp.jax_internals import over_axes


def pack_device_parts(
    axes: tuple[str, ...], plan: BucketPlan, tree: PyTree, tail: Any, where: Any
) -> Messages:
    """Packs gradients and tail into messages, on each device along `axes` its own parts.

    The plan is for the parts (`fddp.comm.device_parts`). `where` is the tree of the
    parameters' specs (`fddp.comm.specs`); the tail is replicated.
    """
    leaves = plan.treedef.flatten_up_to(tree)
    specs = plan.treedef.flatten_up_to(where)

    def pack_local(leaves: list[Any], tail: Any) -> Messages:
        return add_tail(plan, pack(plan, plan.treedef.unflatten(leaves)), tail)

    in_specs = ([None if x is None else spec for x, spec in zip(leaves, specs)], PartitionSpec())
    return by_device(axes, pack_local, in_specs, PartitionSpec(axes))(leaves, tail)


def unpack_device_parts(
    axes: tuple[str, ...],
    plan: BucketPlan,
    messages: Messages,
    where: Any,
    unpack: Callable[..., Any],
) -> tuple[list[Any], Any]:
    """Unpacks gradients and tail from summed messages: the inverse of `pack_device_parts`."""
    specs = plan.treedef.flatten_up_to(where)

    def unpack_local(messages: Messages) -> tuple[list[Any], Any]:
        buckets, tail = take_tail(plan, messages)
        return plan.treedef.flatten_up_to(unpack(plan, buckets)), tail

    out_specs = (specs, PartitionSpec())
    return by_device(axes, unpack_local, (PartitionSpec(axes),), out_specs)(messages)


Function = TypeVar("Function", bound=Callable[..., Any])


def by_device(axes: tuple[str, ...], f: Function, in_specs: PyTree, out_specs: PyTree) -> Function:
    """Turns `f`, which devices along `axes` run on their parts, into a function of whole arrays."""
    if not axes:
        return f
    return over_axes(f, in_specs=in_specs, out_specs=out_specs, axis_names=set(axes))
