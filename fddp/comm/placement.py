"""Where the parts of arrays lie among the devices of one replica.

Replicas lie along one axis of a mesh; along the others the user places arrays as any JAX array is placed.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp

from fddp.comm.member import Member


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


def _axes(entry: Any) -> tuple[str, ...]:
    return () if entry is None else entry if isinstance(entry, tuple) else (entry,)
