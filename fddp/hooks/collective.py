"""The bucketed all-reduce as a function, for users who write their own step.

Source: `allreduce_coalesced` in `torch.distributed`; `flatten_util.ravel_pytree` in JAX for packing
and its inverse.
"""

from typing import Any

import jax
from jaxtyping import Array, PyTree

from fddp.buckets import BucketPlan, check_plan, pack, unpack
from fddp.comm import Group, axis_communicator
from fddp.hooks.hook import Hook, allreduce, check_hook
from fddp.hooks.reductions import hooked


def all_reduce(
    tree: PyTree,
    plan: BucketPlan,
    *,
    axis_name: str | None = None,
    group: Group | None = None,
    op: str = "sum",
    hook: Hook | None = None,
) -> Any:
    """Sums a tree over replicas, one all-reduce per bucket.

    Call it inside `jax.shard_map`, or in a jitted step under MPI.

    Args:
      tree: this replica's arrays, with the shapes and dtypes of the plan's leaves.
      plan: the plan of the buckets.
      axis_name: the mesh axis to sum over; or
      group: the group whose replicas to sum over.
      op: "sum", or "mean": the sum divided by the number of replicas.
      hook: a hook without memory that sums each bucket. None: the plain sum.

    Returns:
      The reduced tree. Leaves outside all buckets are returned unchanged.

    Raises:
      ValueError: not exactly one of axis_name and group, another op, a hook with memory, or a tree
        that does not fit the plan.

    Example:
      >>> import fddp, jax, jax.numpy as jnp
      >>> from jax.sharding import Mesh, PartitionSpec as P
      >>> mesh, grads = Mesh(jax.devices(), "replica"), {"w": jnp.ones(3), "b": jnp.zeros(())}
      >>> plan = fddp.make_plan(grads)
      >>> mean = lambda g: fddp.all_reduce(g, plan, axis_name="replica", op="mean")
      >>> mean = jax.shard_map(mean, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
      >>> mean(grads)["w"].tolist()
      [1.0, 1.0, 1.0]
    """
    check_plan("fddp.all_reduce", plan)
    if (axis_name is None) == (group is None):
        raise ValueError(
            f"give either axis_name or group, got axis_name={axis_name!r} and group={group!r}."
        )
    if op not in ("sum", "mean"):
        raise ValueError(f"op must be 'sum' or 'mean', got {op!r}.")
    hook = allreduce() if hook is None else hook
    check_hook("fddp.all_reduce: hook", hook)
    forms = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in plan.leaves]
    memory = list(map(hook.init, forms))
    if jax.tree.leaves(memory):
        raise ValueError(f"{hook} has a memory from step to step: use it with fddp.train_step.")
    if group is not None:
        comm = group.communicator
    else:
        comm = axis_communicator(
            str(axis_name), jax.lax.axis_size(axis_name), jax.default_backend()
        )
    sums = list[Array]()
    for bucket, buffer in zip(plan.buckets, pack(plan, tree)):
        bucket_forms = tuple(forms[i] for i in bucket.leaves)
        total, _ = hooked(hook, bucket_forms, comm, buffer, tuple(memory[i] for i in bucket.leaves))
        sums.append(total / comm.size if op == "mean" else total)
    reduced = unpack(plan, sums)
    return jax.tree.map(
        lambda old, new: old if new is None else new, tree, reduced, is_leaf=lambda x: x is None
    )
