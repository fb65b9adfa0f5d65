"""Compares replicas bit for bit, by a digest of each leaf, every few steps.

Replicas start equal and run the same operations, so they stay equal, unless a bit flips in memory,
a chip miscomputes, or a script changes a state on a single rank. Such an error has no other
symptom: the sums are still equal on all ranks.
"""

from collections import Counter
from collections.abc import Callable
from itertools import compress

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PyTree, UInt32

from fddp.buckets import split_shards, to_words
from fddp.comm import REPLICATED, Group, add_replica_dim, shortened
from fddp.jax_internals import without_context_mesh
from fddp.step import TrainState, finished
from fddp.wording import leaf_name

ODD = 0x9E3779B1  # odd, so that its product with a word is zero modulo 2³² only for zero


def comparing(group: Group, every: int) -> Callable[[TrainState, int], None]:
    """Makes `check(state, number)`, which compares the replicas' parameters and optimizer states.

    Every rank calls it before the first step, as number 0, and after each step. `number` counts the
    calls, which are equal on all ranks, even if one goes on from an older state. It compares in
    calls divisible by `every` (0: never), and raises a RuntimeError on all ranks with the unequal
    step numbers or leaves and their ranks.
    """
    per_replica = group.placement.per_replica
    program = group.placement.program(
        lambda tree: add_replica_dim(_digests(tree)), (REPLICATED,), per_replica
    )

    @without_context_mesh
    def check(state: TrainState, number: int) -> None:
        if not every or number % every:
            return
        state = finished(state)
        # A shard exists on one replica only, and has no equal.
        tree, _ = split_shards({"params": state.params, "opt_state": state.opt_state})
        digests = program(group.placement.place(tree, REPLICATED))
        shards = [shard for shard in digests.addressable_shards if shard.replica_id == 0]
        local_digests = np.concatenate([np.asarray(shard.data) for shard in shards])
        step = int(state.step)
        with group.journal.inside("the comparison of check_replicas_every"):
            rows = group.all_gather(np.insert(local_digests, 0, step, axis=1))
        steps, rows = rows[:, 0, 0], rows[..., 1:]
        if np.all(rows == local_digests[0]) and np.all(steps == step):
            return
        replicas = rows.reshape(-1, rows.shape[-1])
        ranks = list[str]()
        for rank in range(len(rows)):
            if len(local_digests) == 1:
                ranks.append(f"rank {rank}")
            else:
                ranks += [f"rank {rank}, replica {k}" for k in range(len(local_digests))]
        differences = list[str]()
        for rank in np.flatnonzero(steps != steps[0]):
            differences.append(f"rank {rank} is at step {steps[rank]}, rank 0 at step {steps[0]}")
        for (path, _), column in zip(jax.tree_util.tree_leaves_with_path(tree), replicas.T):
            if len(set(column)) > 1:
                differences.append(_difference(leaf_name(path), ranks, column))
        when = "not equal before the first step"
        if number:
            when = f"no longer equal after step {steps[0]}"
        raise RuntimeError(
            f"replicas are {when}: {shortened(differences)}. A bit has flipped, or only one rank "
            "has changed its state; continue from an earlier checkpoint."
        )

    return check


def _difference(name: str, ranks: list[str], digests: np.ndarray) -> str:
    ((mode, votes), *minorities) = Counter(digests.tolist()).most_common()
    if minorities and minorities[0][1] == votes:
        return f"{name} differs, without a majority for one value"
    minority = " and ".join(compress(ranks, digests != mode))
    return f"{name} of {minority} differs from the others'"


def _digests(tree: PyTree) -> UInt32[Array, " leaves"]:
    return jnp.array(list(map(_digest, jax.tree.leaves(tree))), jnp.uint32)


def _digest(x: Array) -> UInt32[Array, ""]:
    """Hashes words with their positions: any change of a single bit changes the sum."""
    words = to_words(x)
    if words.dtype.itemsize == 8:
        words = jax.lax.bitcast_convert_type(words, jnp.uint32)
    words = words.reshape(-1).astype(jnp.uint32)
    places = 2 * jax.lax.iota(jnp.uint32, words.size) + 1
    return jnp.sum(words * (places * jnp.uint32(ODD)), dtype=jnp.uint32)
