"""PowerSGD sends gradients as products of thin matrices, for links much slower than computing.

A matrix M = Σ M_r of n × m numbers is sent as P (n × rank) and Q (m × rank), with M ≈ P Qᵀ. Each
training step is a step of subspace iteration: P = M Q, orthonormalized, then Q = Mᵀ P, with two
sums over replicas. The error of a replica's M_r is added to its next gradients.

Source: Vogels, Karimireddy, Jaggi, "PowerSGD" (NeurIPS 2019); `powerSGD_hook` in PyTorch.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from fddp.comm import Communicator, add_bytes, as_uint32, count_aside
from fddp.hooks.hook import GradBucket, Hook, State, flat_buffer, is_float, leaves_of_buffer
from fddp.wording import check_range, check_switch, check_whole


def powersgd(
    rank: int = 1,
    *,
    start_step: int = 1000,
    warm_start: bool = True,
    error_feedback: bool = True,
    min_compression_rate: float = 2,
) -> Hook:
    """Sends matrices as products of two thin matrices (PyTorch's `powerSGD_hook`).

    Args:
      rank: number of columns of the thin matrices; more columns give a more exact sum in more
        bytes.
      start_step: number of first steps with plain sums, since compression harms early gradients
        most.
      warm_start: whether a step starts from the last step's Q, and not from random numbers.
      error_feedback: whether the error is added to the next step's gradients.
      min_compression_rate: a leaf is compressed if it shrinks by more than this factor, and summed
        plainly otherwise, like vectors. In leaves of more than two dims the last dim counts as the
        columns.

    Returns:
      The hook.

    Raises:
      ValueError: an argument is out of its range.

    Example:
      >>> import fddp, jax, jax.numpy as jnp, optax
      >>> loss = lambda w, x: jnp.mean((x @ w) ** 2)
      >>> step = fddp.train_step(loss, optax.sgd(0.1), hook=fddp.hooks.powersgd(2, start_step=0))
      >>> state, info = step(step.init(jnp.ones((64, 64))), jnp.eye(64))
      >>> state.hook_state["q"].shape[1:]  # of each replica
      (64, 2)
    """
    check_whole("powersgd: rank", rank, 1)
    check_whole("powersgd: start_step", start_step, 0)
    check_switch("powersgd: warm_start", warm_start)
    check_switch("powersgd: error_feedback", error_feedback)
    check_range(
        "powersgd: min_compression_rate", min_compression_rate, "0 or more", lambda x: x >= 0
    )

    def columns(leaf: jax.ShapeDtypeStruct) -> int:
        """Number of columns of a leaf's factors; 0 if it is not compressed."""
        if len(leaf.shape) < 2 or not is_float(leaf.dtype) or not math.prod(leaf.shape):
            return 0
        n, m = _matrix_shape(leaf)
        count = min(rank, n, m)
        return 0 if count * (n + m) * min_compression_rate >= n * m else count

    def init(leaf: jax.ShapeDtypeStruct) -> Any:
        if not (count := columns(leaf)):
            return ()
        memory = {"step": jnp.zeros((), jnp.int32), "q": _random(leaf, count, 0)}
        if error_feedback:
            memory["error"] = jnp.zeros(leaf.shape, leaf.dtype)
        return memory

    def plain(comm: Communicator, bucket: GradBucket, memory: State) -> tuple[Array, State]:
        return comm.all_reduce(bucket.buffer), memory

    def start(leaf: jax.ShapeDtypeStruct, memory: Any) -> Array:
        """The matrix Q with which a step starts."""
        return memory["q"] if warm_start else _random(leaf, columns(leaf), memory["step"] + 1)

    def compressed(comm: Communicator, bucket: GradBucket, memory: State) -> tuple[Array, State]:
        leaves = leaves_of_buffer(bucket.buffer, bucket.leaves)
        new_memory = list(memory)
        chosen = [i for i, leaf in enumerate(bucket.leaves) if columns(leaf)]
        others = [i for i in range(len(leaves)) if i not in chosen]
        errors = [memory[i]["error"] if error_feedback else 0 for i in chosen]
        matrices = [
            (leaves[i] + error).reshape(_matrix_shape(leaves[i]))
            for i, error in zip(chosen, errors)
        ]
        starts = [start(bucket.leaves[i], memory[i]) for i in chosen]
        products = [m @ q for m, q in zip(matrices, starts)]
        p_sums = _sums(comm, [*products, *(leaves[i] for i in others)])
        bases = [_orthonormal(p) for p in p_sums[: len(chosen)]]
        q_sums = _sums(comm, [m.T @ p for m, p in zip(matrices, bases)])
        for i, total in zip(others, p_sums[len(chosen) :]):
            leaves[i] = total
        for i, first, m, p, q in zip(chosen, starts, matrices, bases, q_sums):
            shape = leaves[i].shape
            leaves[i] = (p @ q.T).reshape(shape)
            # The next step starts from the directions of Q, as its scale would grow without bound.
            # If the gradient has no component along a direction, that direction is retained.
            directions = _orthonormal(q)
            new_q = jnp.where(jnp.any(directions != 0, axis=0), directions, first)
            new_memory[i] = memory[i] | {"q": new_q}
            if error_feedback:
                new_memory[i]["error"] = (m - p @ (p.T @ m)).reshape(shape)
        return flat_buffer(leaves), tuple(new_memory)

    def apply(comm: Communicator, bucket: GradBucket, memory: State) -> tuple[Array, State]:
        steps = [leaf["step"] for leaf in memory if leaf]
        if not steps:
            return plain(comm, bucket, memory)

        def branch(reduce: Callable[..., tuple[Array, State]], memory: State) -> Any:
            outputs, nbytes = count_aside(comm, reduce, bucket, memory)
            return outputs, as_uint32(nbytes)

        branches = partial(branch, plain), partial(branch, compressed)
        (total, memory), nbytes = jax.lax.cond(steps[0] < start_step, *branches, memory)
        add_bytes(comm, nbytes)
        new_memory = (leaf and leaf | {"step": leaf["step"] + 1} for leaf in memory)
        return total, tuple(new_memory)

    words = (
        f"{rank}, start_step={start_step}, warm_start={warm_start}, "
        f"error_feedback={error_feedback}, {min_compression_rate}"
    )
    return Hook(init, apply, f"powersgd({words})")


def _matrix_shape(leaf: Array | jax.ShapeDtypeStruct) -> tuple[int, int]:
    return math.prod(leaf.shape[:-1]), leaf.shape[-1]


def _random(leaf: jax.ShapeDtypeStruct, rank: int, step: int | Array) -> Float[Array, "m rank"]:
    """Draws random numbers, equal on all replicas."""
    return jax.random.normal(
        jax.random.fold_in(jax.random.key(0), step), (leaf.shape[-1], rank), leaf.dtype
    )


def _orthonormal(x: Float[Array, "n rank"]) -> Float[Array, "n rank"]:
    """Orthonormalizes the columns by Gram-Schmidt, each column twice, as in PyTorch.

    A column in the span of earlier columns becomes zeros. A column that is not finite becomes NaN.
    A QR decomposition would be a library call, which XLA cannot fuse.
    """
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    tolerance = 8 * jnp.finfo(wide.dtype).eps

    def add(k: int | Array, basis: Array) -> Array:
        column = wide[:, k]
        residual = column
        for _ in range(2):
            residual = residual - basis @ (basis.T @ residual)
        length = jnp.linalg.norm(residual)
        independent = length > tolerance * jnp.linalg.norm(column)
        direction = jnp.where(independent, residual / jnp.where(independent, length, 1), 0)
        return basis.at[:, k].set(jnp.where(jnp.isfinite(length), direction, jnp.nan))

    return jax.lax.fori_loop(0, x.shape[1], add, jnp.zeros_like(wide)).astype(x.dtype)


def _sums(comm: Communicator, arrays: Sequence[Array]) -> list[Array]:
    """Sums arrays over replicas in one message."""
    if not arrays:
        return []
    return leaves_of_buffer(comm.all_reduce(flat_buffer(arrays)), arrays)
