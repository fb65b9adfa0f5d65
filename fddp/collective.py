"""The bucketed all-reduce by itself, for people who write their own step.

Source: `allreduce_coalesced` in `torch.distributed`; `flatten_util.ravel_pytree` in JAX for the way there and back.
"""

from collections.abc import Callable
from typing import Any

import jax

from fddp.flat import pack, unpack
from fddp.group import Group
from fddp.plan import BucketPlan


def all_reduce(
    tree: Any, plan: BucketPlan, *, axis_name: str | None = None, group: Group | None = None, op: str = "sum"
) -> Any:
    """Sums a tree over replicas, one all-reduce per bucket; for use inside `jax.shard_map`, or a jitted step under MPI.

    Args:
      tree: arrays with the shapes and dtypes of the plan's leaves, each replica's own.
      plan: which leaves travel together.
      axis_name: the mesh axis to sum over; or
      group: the group whose replicas to sum over.
      op: "sum", or "mean": the sum over the number of replicas.

    Returns:
      The reduced tree; leaves that do not travel under the plan stay each replica's own.

    Raises:
      ValueError: not exactly one of axis_name and group, another op, or a tree that does not fit the plan.

    Example:
      >>> import fddp, jax, jax.numpy as jnp
      >>> from jax.sharding import Mesh, PartitionSpec as P
      >>> mesh, grads = Mesh(jax.devices(), "replica"), {"w": jnp.ones(3), "b": jnp.zeros(())}
      >>> plan = fddp.make_plan(grads)
      >>> mean = lambda g: fddp.all_reduce(g, plan, axis_name="replica", op="mean")
      >>> jax.shard_map(mean, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)(grads)["w"].tolist()
      [1.0, 1.0, 1.0]
    """
    if (axis_name is None) == (group is None):
        raise ValueError(f"give one of axis_name and group, got axis_name={axis_name!r} and group={group!r}.")
    if op not in ("sum", "mean"):
        raise ValueError(f"op must be 'sum' or 'mean', got {op!r}.")
    psum: Callable[[jax.Array], jax.Array] = (
        group.member.link.psum if group is not None else lambda x: jax.lax.psum(x, axis_name)
    )
    size = group.size if group is not None else jax.lax.axis_size(axis_name)
    over = size if op == "mean" else 1
    reduced = unpack(plan, [psum(bucket) / over if over != 1 else psum(bucket) for bucket in pack(plan, tree)])
    return jax.tree.map(lambda own, new: own if new is None else new, tree, reduced, is_leaf=lambda x: x is None)
