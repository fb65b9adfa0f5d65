"""Hooks that send buckets in 16 bits, or not at all."""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Shaped

from fddp.comm import Communicator, add_rows
from fddp.hooks.hook import GradBucket, Hook, State, allreduce, check_hook, nothing
from fddp.wording import check_number


def noop() -> Hook:
    """Sends nothing, to measure a step without communication (PyTorch's `noop_hook`).

    Each replica continues as if all replicas had its gradients. Replicas then differ, so it is for
    debugging only.
    """
    return Hook(
        nothing, lambda comm, bucket, memory: (bucket.buffer * comm.size, memory), "noop", True
    )


def bf16(hook: Hook | None = None) -> Hook:
    """Sends float sums as bfloat16, in half the bytes (PyTorch's `bf16_compress_hook` and wrapper).

    Args:
      hook: the hook whose sums are sent in bfloat16, or in float16 if they have that dtype. None:
        `allreduce()`.

    Returns:
      The hook. On CPUs and under MPI, which have no all-reduce in 16 bits, each replica receives
      one part of every replica's words (all-to-all), adds them in float32, and sends the sum to all
      replicas (all-gather).
    """
    hook = allreduce() if hook is None else check_hook("bf16: hook", hook)

    return _narrow(hook, f"bf16({hook.name})", lambda comm: {"dtype": jnp.bfloat16})


def fp16(hook: Hook | None = None, *, predivide: float | None = None) -> Hook:
    """Sends float sums as float16, in half the bytes (PyTorch's `fp16_compress_hook` and wrapper).

    Args:
      hook: the hook whose sums are sent in float16, or in bfloat16 if they have that dtype. None:
        `allreduce()`.
      predivide: factor that divides a replica's summand before it is rounded, and multiplies the
        sum afterwards, so that the sum stays below 65,504. None: the number of replicas. A summand
        is Σ w·g over micro-batches: with accumulation, a loss scale or `fddp.Weighted` losses, give
        the product of all these factors.

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


def is_float(dtype: DTypeLike) -> bool:
    return jnp.issubdtype(dtype, jnp.floating)


def _narrow(hook: Hook, name: str, options: Callable[[Communicator], dict[str, Any]]) -> Hook:
    """Returns the hook with a communicator that sends sums and scatters in 16 bits."""

    def narrow(comm: Communicator) -> Communicator:
        kwargs = options(comm)
        all_reduce = partial(_narrow_all_reduce, comm, **kwargs)
        scatter = partial(_narrow_scatter, comm, **kwargs)
        return replace(
            comm, all_reduce=all_reduce, reduce_scatter=scatter, unrounded=comm.exact_sum
        )

    def apply(comm: Communicator, bucket: GradBucket, memory: State) -> tuple[Array, State]:
        return hook.apply(narrow(comm), bucket, memory)

    half = hook.scatter
    scatter = None if half is None else lambda comm, rows, memory: half(narrow(comm), rows, memory)
    return Hook(hook.init, apply, name, hook.by_element, scatter)


def _narrow_scatter(
    comm: Communicator, rows: Shaped[Array, "replicas n"], dtype: DTypeLike, by: float = 1
) -> Shaped[Array, " n"]:
    """Reduce-scatters floats as 16-bit words, and adds them in float32."""
    if jnp.issubdtype(rows.dtype, jnp.complexfloating):
        components = _narrow_scatter(
            comm, jnp.concatenate([jnp.real(rows), jnp.imag(rows)], axis=1), dtype, by
        )
        return jax.lax.complex(*jnp.split(components, 2)).astype(rows.dtype)
    if not is_float(rows.dtype):
        return comm.reduce_scatter(rows)
    dtype = rows.dtype if rows.dtype.itemsize == 2 else dtype
    words = jax.lax.bitcast_convert_type((rows / by).astype(dtype), jnp.uint16)
    received = jax.lax.bitcast_convert_type(comm.all_to_all(words), dtype)
    return (by * add_rows(received.astype(jnp.float32))).astype(rows.dtype)


def _narrow_all_reduce(
    comm: Communicator, x: Shaped[Array, " n"], dtype: DTypeLike, by: float = 1
) -> Shaped[Array, " n"]:
    """All-reduces floats as 16-bit words; 16-bit floats keep their dtype, integers are not cast."""
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        components = _narrow_all_reduce(
            comm, jnp.concatenate([jnp.real(x), jnp.imag(x)]), dtype, by
        )
        return jax.lax.complex(*jnp.split(components, 2)).astype(x.dtype)
    if not is_float(x.dtype):
        return comm.all_reduce(x)
    dtype = x.dtype if x.dtype.itemsize == 2 else dtype
    summand = (x / by).astype(dtype)
    if comm.native16:
        return by * comm.all_reduce(summand).astype(x.dtype)
    rows = jax.lax.bitcast_convert_type(padded_rows(summand, comm.size), jnp.uint16)
    received = jax.lax.bitcast_convert_type(comm.all_to_all(rows), dtype)
    summand = add_rows(received.astype(jnp.float32)).astype(dtype)
    total = comm.all_gather(jax.lax.bitcast_convert_type(summand, jnp.uint16))
    return by * jax.lax.bitcast_convert_type(total, dtype).astype(x.dtype).reshape(-1)[: x.size]


def padded_rows(x: Shaped[Array, " n"], count: int, multiple: int = 1) -> Shaped[Array, "count m"]:
    """Cuts an array into `count` equal rows; zeros pad their length to a multiple of `multiple`."""
    length = multiple * math.ceil(x.size / (count * multiple))
    return jnp.pad(x, (0, count * length - x.size)).reshape(count, length)
