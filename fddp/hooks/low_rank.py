"""PowerSGD sends gradients as products of thin matrices, for links much slower than computing.

A matrix M = Σ M_r of n × m numbers is sent as P (n × rank) and Q (m × rank), with M ≈ P Qᵀ. Each
training step is a step of subspace iteration: P = M Q, orthonormalized, then Q = Mᵀ P, with two
sums over replicas. The error of a replica's M_r is added to its next gradients.

Source: Vogels, Karimireddy, Jaggi, "PowerSGD" (NeurIPS 2019); `powerSGD_hook` in PyTorch.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
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

    low_rank = _LowRank(rank, start_step, warm_start, error_feedback, min_compression_rate)
    words = (
        f"{rank}, start_step={start_step}, warm_start={warm_start}, "
        f"error_feedback={error_feedback}, {min_compression_rate}"
    )
    return Hook(low_rank.init, low_rank.apply, f"powersgd({words})")


@dataclass(frozen=True)
class _LowRank:
    """The two functions of the hook, for its arguments."""

    rank: int
    start_step: int
    warm_start: bool
    error_feedback: bool
    min_compression_rate: float

    def columns(self, leaf: jax.ShapeDtypeStruct) -> int:
        """Number of columns of a leaf's factors; 0 if it is not compressed."""
        if len(leaf.shape) < 2 or not is_float(leaf.dtype) or not math.prod(leaf.shape):
            return 0
        n, m = _matrix_shape(leaf)
        columns = min(self.rank, n, m)
        if columns * (n + m) * self.min_compression_rate >= n * m:
            return 0
        return columns

    def init(self, leaf: jax.ShapeDtypeStruct) -> Any:
        columns = self.columns(leaf)
        if not columns:
            return ()
        memory: dict[str, Array] = {
            "step": jnp.zeros((), jnp.int32),
            "q": _random(leaf, columns, 0),
        }
        if self.error_feedback:
            memory["error"] = jnp.zeros(leaf.shape, leaf.dtype)
        return memory

    def apply(self, comm: Communicator, bucket: GradBucket, memory: State) -> tuple[Array, State]:
        steps = [leaf["step"] for leaf in memory if leaf]
        if not steps:
            return comm.all_reduce(bucket.buffer), memory

        def counted(total: Callable[..., tuple[Array, State]]) -> Callable[[State], Any]:
            def branch(memory: State) -> Any:
                outputs, nbytes = count_aside(comm, total, bucket, memory)
                return outputs, as_uint32(nbytes)

            return branch

        branches = counted(self._plain), counted(self._compressed)
        (total, memory), nbytes = jax.lax.cond(steps[0] < self.start_step, *branches, memory)
        add_bytes(comm, nbytes)
        new_memory = (leaf and leaf | {"step": leaf["step"] + 1} for leaf in memory)
        return total, tuple(new_memory)

    def _plain(self, comm: Communicator, bucket: GradBucket, memory: State) -> tuple[Array, State]:
        return comm.all_reduce(bucket.buffer), memory

    def _compressed(
        self, comm: Communicator, bucket: GradBucket, memory: State
    ) -> tuple[Array, State]:
        leaves = leaves_of_buffer(bucket.buffer, bucket.leaves)
        new_memory = list(memory)
        compressed = [i for i, leaf in enumerate(bucket.leaves) if self.columns(leaf)]
        plain = [i for i in range(len(leaves)) if i not in compressed]
        matrices = [self._matrix(bucket.leaves[i], leaves[i], memory[i]) for i in compressed]
        starts = [self._start(bucket.leaves[i], memory[i]) for i in compressed]
        products = [m @ q for m, q in zip(matrices, starts)]
        p_sums = _sums(comm, [*products, *(leaves[i] for i in plain)])
        bases = [_orthonormal(p) for p in p_sums[: len(compressed)]]
        q_sums = _sums(comm, [m.T @ p for m, p in zip(matrices, bases)])
        for i, total in zip(plain, p_sums[len(compressed) :]):
            leaves[i] = total
        for i, start, m, p, q in zip(compressed, starts, matrices, bases, q_sums):
            leaves[i] = (p @ q.T).reshape(bucket.leaves[i].shape)
            new_memory[i] = self._next_memory(memory[i], start, m, p, q, leaves[i].shape)
        return flat_buffer(leaves), tuple(new_memory)

    def _matrix(self, form: jax.ShapeDtypeStruct, leaf: Array, memory: Any) -> Array:
        """A replica's matrix, with its error of the last step."""
        compensated = leaf + (memory["error"] if self.error_feedback else 0)
        return compensated.reshape(_matrix_shape(form))

    def _start(self, form: jax.ShapeDtypeStruct, memory: Any) -> Array:
        """The matrix Q with which a step starts."""
        if self.warm_start:
            return memory["q"]
        return _random(form, self.columns(form), memory["step"] + 1)

    def _next_memory(
        self, memory: Any, start: Array, m: Array, p: Array, q: Array, shape: tuple[int, ...]
    ) -> dict[str, Array]:
        # The next step starts from the directions of Q, as its scale would grow without bound.
        # If the gradient has no component along a direction, that direction is retained.
        directions = _orthonormal(q)
        new_memory = memory | {"q": jnp.where(jnp.any(directions != 0, axis=0), directions, start)}
        if self.error_feedback:
            new_memory["error"] = (m - p @ (p.T @ m)).reshape(shape)
        return new_memory


def _matrix_shape(leaf: jax.ShapeDtypeStruct) -> tuple[int, int]:
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
