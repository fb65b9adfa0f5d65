"""PowerSGD sends gradients as products of thin matrices, for links much slower than computing.

A matrix M = Σ M_r of n × m numbers is sent as P (n × rank) and Q (m × rank), with M ≈ P Qᵀ. Each
training step is a step of subspace iteration: P = M Q, orthonormalized, then Q = Mᵀ P, with two
sums over replicas. The error of a replica's M_r is added to its next gradients.

Source: Vogels, Karimireddy, Jaggi, "PowerSGD" (NeurIPS 2019); `powerSGD_hook` in PyTorch.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from fddp.comm import Communicator
from fddp.hooks.first_steps import starting
from fddp.hooks.hook import GradBucket, Hook, State, split_bucket
from fddp.wording import check_number, check_switch, check_whole


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
      start_step: number of first steps with plain sums.
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
      >>> state.hook_state["then"]["q"].shape[1:]  # of each replica
      (64, 2)
    """
    check_whole("powersgd: rank", rank, 1)
    check_switch("powersgd: warm_start", warm_start)
    check_switch("powersgd: error_feedback", error_feedback)
    check_number("powersgd: min_compression_rate", min_compression_rate)
    if not min_compression_rate >= 0:
        raise ValueError(
            f"powersgd: min_compression_rate must be 0 or more, got {min_compression_rate!r}."
        )

    def rank_of(leaf: jax.ShapeDtypeStruct) -> int:
        """Number of columns of a leaf's factors; 0 if it is not compressed."""
        if (
            len(leaf.shape) < 2
            or not jnp.issubdtype(leaf.dtype, jnp.floating)
            or not math.prod(leaf.shape)
        ):
            return 0
        n, m = _matrix_shape(leaf)
        columns = min(rank, n, m)
        return columns if columns * (n + m) * min_compression_rate < n * m else 0

    def init(leaf: jax.ShapeDtypeStruct) -> Any:
        if not rank_of(leaf):
            return ()
        error = {"error": jnp.zeros(leaf.shape, leaf.dtype)} if error_feedback else {}
        count = {} if warm_start else {"step": jnp.zeros((), jnp.int32)}
        return {"q": _random(leaf, rank_of(leaf), 0)} | error | count

    def apply(comm: Communicator, bucket: GradBucket, memory: State) -> tuple[Array, State]:
        leaves = split_bucket(bucket)
        new_memory = list(memory)
        compressed = [i for i, leaf in enumerate(bucket.leaves) if rank_of(leaf)]
        plain = [i for i in range(len(leaves)) if i not in compressed]
        matrices = []
        starts = []
        for i in compressed:
            compensated = leaves[i] + (memory[i]["error"] if error_feedback else 0)
            matrices.append(compensated.reshape(_matrix_shape(bucket.leaves[i])))
            random_q = (
                None
                if warm_start
                else _random(bucket.leaves[i], rank_of(bucket.leaves[i]), memory[i]["step"] + 1)
            )
            starts.append(memory[i]["q"] if random_q is None else random_q)
        p_sums = _sums(comm, [m @ q for m, q in zip(matrices, starts)] + [leaves[i] for i in plain])
        bases = [_orthonormal(p) for p in p_sums[: len(compressed)]]
        q_sums = _sums(comm, [m.T @ p for m, p in zip(matrices, bases)])
        for i, total in zip(plain, p_sums[len(compressed) :]):
            leaves[i] = total
        for i, start, m, p, q in zip(compressed, starts, matrices, bases, q_sums):
            leaves[i] = (p @ q.T).reshape(bucket.leaves[i].shape)
            error = (
                {"error": (m - p @ (p.T @ m)).reshape(leaves[i].shape)} if error_feedback else {}
            )
            # The next step starts from the directions of Q, as its scale would grow without bound.
            # If the gradient has no component along a direction, that direction is retained.
            count = {} if warm_start else {"step": memory[i]["step"] + 1}
            directions = _orthonormal(q)
            q = jnp.where(jnp.any(directions != 0, axis=0), directions, start)
            new_memory[i] = {"q": q} | error | count
        return jnp.concatenate([leaf.reshape(-1) for leaf in leaves]), tuple(new_memory)

    words = (
        f"{rank}, warm_start={warm_start}, error_feedback={error_feedback}, {min_compression_rate}"
    )
    return starting(start_step, Hook(init, apply, f"powersgd({words})"))


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
    total = comm.all_reduce(jnp.concatenate([x.reshape(-1) for x in arrays]))
    pieces = jax.lax.split(total, [x.size for x in arrays])
    return [piece.reshape(x.shape) for piece, x in zip(pieces, arrays)]
