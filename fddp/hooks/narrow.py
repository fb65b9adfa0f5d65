"""Hooks that send buckets in 16 bits, or not at all."""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Shaped

from fddp.comm import Communicator, added
from fddp.hooks.hook import GradBucket, Hook, State, allreduce, check_hook, nothing
from fddp.wording import check_number


def noop() -> Hook:
    """Sends nothing, to show the cost of a step without traffic: each replica goes on as if all had its gradients.

    Replicas then differ; only for debugging (PyTorch's `noop_hook`).
    """
    return Hook(nothing, lambda comm, bucket, state: (bucket.buffer * comm.size, state), "noop", True)


def bf16(hook: Hook | None = None) -> Hook:
    """Sends float sums as bfloat16 (float16 as it is): half the bytes (PyTorch's `bf16_compress_hook` and its wrapper).

    Args:
      hook: the hook whose sums are sent so; None: `allreduce()`.

    Returns:
      The hook. Where all-reduces know no 16 bits (CPUs, MPI) every replica gets one part of all replicas' words
      (all-to-all), adds these up in float32 and sends the sum to all (all-gather).
    """
    hook = allreduce() if hook is None else check_hook("bf16: hook", hook)

    return _narrow(hook, f"bf16({hook.name})", lambda comm: {"dtype": jnp.bfloat16})


def fp16(hook: Hook | None = None, *, predivide: float | None = None) -> Hook:
    """Sends float sums as float16 (bfloat16 as it is; PyTorch's `fp16_compress_hook` and its wrapper).

    Args:
      hook: the hook whose sums are sent so; None: `allreduce()`.
      predivide: factor by which a replica's summand is divided before it is rounded, and the sum multiplied
        afterwards, so that the sum stays below 65,504; None: the number of replicas. A summand is Σ w·g over
        micro-batches: with accumulation, a loss scale or `fddp.Weighted` losses give the product of all these factors.

    Returns:
      The hook.

    Raises:
      ValueError: predivide is not above 0.
    """
    if predivide is not None:
        check_number("fp16: predivide", predivide)
    if predivide is not None and not predivide > 0:
        raise ValueError(f"fp16: predivide must be more than 0, got {predivide!r}.")
    hook = allreduce() if hook is None else check_hook("fp16: hook", hook)

    name = f"fp16({hook.name}, predivide={predivide})"
    return _narrow(hook, name, lambda comm: {"dtype": jnp.float16, "by": predivide or comm.size})


def is_float(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jnp.floating)


def _narrow(hook: Hook, name: str, words: Callable[[Communicator], dict[str, Any]]) -> Hook:
    """The same hook, whose sums and scatters are sent in 16 bits."""

    def narrow(comm: Communicator) -> Communicator:
        own = words(comm)
        all_reduce = partial(_narrow_all_reduce, comm, **own)
        scatter = partial(_narrow_scatter, comm, **own)
        return replace(comm, all_reduce=all_reduce, reduce_scatter=scatter, unrounded=comm.exact_sum)

    def apply(comm: Communicator, bucket: GradBucket, state: State) -> tuple[Array, State]:
        return hook.apply(narrow(comm), bucket, state)

    half = hook.scatter
    scatter = None if half is None else lambda comm, rows, state: half(narrow(comm), rows, state)
    return Hook(hook.init, apply, name, hook.by_element, scatter)


def _narrow_scatter(
    comm: Communicator, rows: Shaped[Array, "replicas n"], dtype: Any, by: float = 1
) -> Shaped[Array, " n"]:
    """Sums rows over replicas, each for its replica, in float32; on the wire are 16-bit words of floats."""
    if jnp.issubdtype(rows.dtype, jnp.complexfloating):
        parts = _narrow_scatter(comm, jnp.concatenate([jnp.real(rows), jnp.imag(rows)], axis=1), dtype, by)
        return jax.lax.complex(*jnp.split(parts, 2)).astype(rows.dtype)
    if not is_float(rows.dtype):
        return comm.reduce_scatter(rows)
    dtype = rows.dtype if rows.dtype.itemsize == 2 else dtype
    words = jax.lax.bitcast_convert_type((rows / by).astype(dtype), jnp.uint16)
    came = jax.lax.bitcast_convert_type(comm.all_to_all(words), dtype)
    return (by * added(came.astype(jnp.float32))).astype(rows.dtype)


def _narrow_all_reduce(comm: Communicator, x: Shaped[Array, " n"], dtype: Any, by: float = 1) -> Shaped[Array, " n"]:
    """Sums over replicas with 16-bit words on the wire; integers go as they are, 16-bit floats in their own dtype."""
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        parts = _narrow_all_reduce(comm, jnp.concatenate([jnp.real(x), jnp.imag(x)]), dtype, by)
        return jax.lax.complex(*jnp.split(parts, 2)).astype(x.dtype)
    if not is_float(x.dtype):
        return comm.all_reduce(x)
    dtype = x.dtype if x.dtype.itemsize == 2 else dtype
    part = (x / by).astype(dtype)
    if comm.native16:
        return by * comm.all_reduce(part).astype(x.dtype)
    rows = jax.lax.bitcast_convert_type(as_rows(part, comm.size), jnp.uint16)
    came = jax.lax.bitcast_convert_type(comm.all_to_all(rows), dtype)
    part = added(came.astype(jnp.float32)).astype(dtype)
    total = comm.all_gather(jax.lax.bitcast_convert_type(part, jnp.uint16))
    return by * jax.lax.bitcast_convert_type(total, dtype).astype(x.dtype).reshape(-1)[: x.size]


def as_rows(x: Shaped[Array, " n"], count: int, multiple: int = 1) -> Shaped[Array, "count m"]:
    """Pads an array with zeros, and cuts it into `count` rows of one length, which `multiple` divides."""
    length = multiple * math.ceil(x.size / (count * multiple))
    return jnp.pad(x, (0, count * length - x.size)).reshape(count, length)
