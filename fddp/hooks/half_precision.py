"""Hooks that send buckets in 16 bits, or not at all."""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Shaped

from fddp.comm import Communicator, add_rows
from fddp.hooks.hook import GradBucket, Hook, State, allreduce, check_hook, is_float, nothing
from fddp.wording import check_range


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
    if hook is None:
        hook = allreduce()
    check_hook("bf16: hook", hook)
    return _narrow(hook, f"bf16({hook.name})", jnp.bfloat16, predivide=1)


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
        check_range("fp16: predivide", predivide, "more than 0", lambda x: x > 0)
    if hook is None:
        hook = allreduce()
    check_hook("fp16: hook", hook)
    name = f"fp16({hook.name}, predivide={predivide})"
    return _narrow(hook, name, jnp.float16, predivide)


def _narrow(hook: Hook, name: str, dtype: DTypeLike, predivide: float | None) -> Hook:
    """Returns the hook with a communicator that sends sums and scatters in 16 bits."""

    def narrow(comm: Communicator) -> Communicator:
        by = predivide or comm.size
        return replace(
            comm,
            all_reduce=_of_floats(comm.all_reduce, partial(_all_reduce, comm, by), dtype),
            reduce_scatter=_of_floats(comm.reduce_scatter, partial(_scatter, comm, by), dtype),
            unrounded=comm.exact_sum,
        )

    def apply(comm: Communicator, bucket: GradBucket, memory: State) -> tuple[Array, State]:
        return hook.apply(narrow(comm), bucket, memory)

    return Hook(hook.init, apply, name, hook.by_element)


def _of_floats(
    plain: Callable[[Array], Array], narrow: Callable[[Array, DTypeLike], Array], dtype: DTypeLike
) -> Callable[[Array], Array]:
    """Sends floats by `narrow` in `dtype`, or in their dtype of 16 bits; integers by `plain`."""

    def send(x: Array) -> Array:
        if jnp.issubdtype(x.dtype, jnp.complexfloating):
            components = send(jnp.concatenate([jnp.real(x), jnp.imag(x)], axis=-1))
            return jax.lax.complex(*jnp.split(components, 2)).astype(x.dtype)
        if not is_float(x.dtype):
            return plain(x)
        if x.dtype.itemsize == 2:
            return narrow(x, x.dtype)
        return narrow(x, dtype)

    return send


def _scatter(
    comm: Communicator, by: float, rows: Shaped[Array, "replicas n"], dtype: DTypeLike
) -> Shaped[Array, " n"]:
    """Reduce-scatters floats as 16-bit words, and adds them in float32."""
    words = jax.lax.bitcast_convert_type((rows / by).astype(dtype), jnp.uint16)
    received = jax.lax.bitcast_convert_type(comm.all_to_all(words), dtype)
    return (by * add_rows(received.astype(jnp.float32))).astype(rows.dtype)


def _all_reduce(
    comm: Communicator, by: float, x: Shaped[Array, "*dims"], dtype: DTypeLike
) -> Shaped[Array, "*dims"]:
    """All-reduces floats as 16-bit words."""
    summand = (x / by).astype(dtype)
    if comm.native16:
        return by * comm.all_reduce(summand).astype(x.dtype)
    rows = jax.lax.bitcast_convert_type(padded_rows(summand, comm.size), jnp.uint16)
    received = jax.lax.bitcast_convert_type(comm.all_to_all(rows), dtype)
    summand = add_rows(received.astype(jnp.float32)).astype(dtype)
    words = comm.all_gather(jax.lax.bitcast_convert_type(summand, jnp.uint16))
    total = jax.lax.bitcast_convert_type(words, dtype).astype(x.dtype).reshape(-1)[: x.size]
    return by * total.reshape(x.shape)


def padded_rows(
    x: Shaped[Array, "*dims"], count: int, multiple: int = 1
) -> Shaped[Array, "count m"]:
    """Cuts an array into `count` equal rows; zeros pad their length to a multiple of `multiple`."""
    length = multiple * math.ceil(x.size / (count * multiple))
    return jnp.pad(x.reshape(-1), (0, count * length - x.size)).reshape(count, length)
