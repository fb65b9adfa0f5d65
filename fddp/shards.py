"""A replica that is several devices: what lies where on the axes of a mesh beside its own.

Replicas lie along one axis. Along the others the user places parameters as any JAX array is placed (tensor
parallelism), and the loss is partitioned by XLA as under `jax.jit`. Two things must not be left to it. Buckets: packing
leaves that are cut in different dims would gather them first, so each device packs the parts that it holds, and an
all-reduce joins the devices that hold the same parts. And what a step returns, which lies as what it was given.

Source: PyTorch's 2D parallelism, `DistributedDataParallel` over a `DeviceMesh` with a tensor-parallel dim.
"""

import math
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from fddp.flat import Wires, add_tail, pack, take_tail, unpack
from fddp.jax_internals import over_axes
from fddp.member import EVERYWHERE, Member
from fddp.optimizer import map_state, masked
from fddp.plan import BucketPlan

Function = TypeVar("Function", bound=Callable[..., Any])


def pack_parts(member: Member, plan: BucketPlan, tree: Any, tail: Any, where: Any) -> Wires:
    """Packs gradients and tail into what is sent, on each device the parts that it holds; inside a program.

    Args:
      member: how this process takes part.
      plan: made for the parts (see `parts`).
      tree: gradients, with None for leaves that have none.
      tail: a tree of small numbers, whole on every device of a replica.
      where: a tree like the parameters, from `specs`.

    Returns:
      What is sent.
    """
    leaves, inside = plan.treedef.flatten_up_to(tree), plan.treedef.flatten_up_to(where)

    def pack_here(leaves: list[Any], tail: Any) -> Wires:
        return add_tail(plan, pack(plan, plan.treedef.unflatten(leaves)), tail)

    in_specs = ([None if x is None else spec for x, spec in zip(leaves, inside)], EVERYWHERE)
    return _on_each_device(member, pack_here, in_specs, PartitionSpec(other_axes(member)))(leaves, tail)


def unpack_parts(member: Member, plan: BucketPlan, wires: Wires, where: Any) -> tuple[list[Any], Any]:
    """Takes gradients and tail out of what came back: the inverse of `pack_parts`.

    Args:
      member: how this process takes part.
      plan: the plan that `pack_parts` followed.
      wires: what it returned, summed over replicas.
      where: as there.

    Returns:
      A gradient for each leaf of the plan, None for those that did not travel; and the tail.
    """
    inside = plan.treedef.flatten_up_to(where)

    def unpack_here(wires: Wires) -> tuple[list[Any], Any]:
        buckets, tail = take_tail(plan, wires)
        return plan.treedef.flatten_up_to(unpack(plan, buckets)), tail

    out_specs = (inside, EVERYWHERE)
    return _on_each_device(member, unpack_here, (PartitionSpec(other_axes(member)),), out_specs)(wires)


def other_axes(member: Member) -> tuple[str, ...]:
    """The axes along which the devices of one replica lie."""
    return member.view.auto_axes


def specs(member: Member, tree: Any) -> Any:
    """Where the parts of each array lie: a `PartitionSpec` over the other axes for each leaf."""
    return jax.tree.map(member.spec, tree)


def parts(member: Member, tree: Any) -> Any:
    """The shapes of the parts that one device holds of each array."""

    def part(x: Any) -> jax.ShapeDtypeStruct:
        cuts = [math.prod(member.view.shape[axis] for axis in _axes(entry)) for entry in member.spec(x)]
        shape = jnp.shape(x)
        kept = tuple(n // cut for n, cut in zip(shape, cuts)) + shape[len(cuts) :]
        return jax.ShapeDtypeStruct(kept, jnp.result_type(x))

    return jax.tree.map(part, tree)


def laid_out(member: Member, tree: Any, where: Any) -> Any:
    """Says to XLA, inside a program, where the parts of each array are to lie.

    Args:
      member: how this process takes part.
      tree: arrays.
      where: a tree like it, from `specs`.

    Returns:
      The arrays.
    """
    if not other_axes(member):
        return tree
    return jax.tree.map(jax.lax.with_sharding_constraint, tree, where)


def optimizer_laid_out(member: Member, opt_state: Any, params: Any, where: Any) -> Any:
    """Says to XLA where an optimizer's state is to lie: what has the shape of a parameter, as that parameter.

    Args:
      member: how this process takes part.
      opt_state: of any optax transformation.
      params: the parameters that it trains.
      where: a tree like them, from `specs`.

    Returns:
      The optimizer's state.
    """
    if not other_axes(member):
        return opt_state

    def put(x: Any, param: Any, where: PartitionSpec) -> Any:
        if masked(x):
            return x
        return jax.lax.with_sharding_constraint(x, where if jnp.shape(x) == jnp.shape(param) else EVERYWHERE)

    return map_state(
        lambda part: jax.tree.map(put, part, params, where, is_leaf=masked),
        lambda x: jax.lax.with_sharding_constraint(x, EVERYWHERE),
        params,
        opt_state,
    )


def from_first_replica(member: Member, tree: Any) -> Any:
    """Gives every replica the first one's values of arrays that lie in parts, bit for bit, where they lie."""

    def broadcast(x: jax.Array) -> jax.Array:
        # Bytes to which only the first replica contributes: exact for any dtype.
        words = x.view(jnp.uint8)
        return member.communicator.psum(
            jnp.where(member.communicator.number() == 0, words, jnp.zeros_like(words))
        ).view(x.dtype)

    where = specs(member, tree)
    program = member.program(
        lambda tree: laid_out(member, jax.tree.map(broadcast, tree), where), (EVERYWHERE,), EVERYWHERE
    )
    return program(member.place(tree, EVERYWHERE))


def _on_each_device(member: Member, f: Function, in_specs: Any, out_specs: Any) -> Function:
    """A function of whole arrays, of what each device does with the parts that it holds."""
    axes = other_axes(member)
    if not axes:
        return f
    return over_axes(f, in_specs=in_specs, out_specs=out_specs, axis_names=set(axes))


def _axes(entry: Any) -> tuple[str, ...]:
    return () if entry is None else entry if isinstance(entry, tuple) else (entry,)
