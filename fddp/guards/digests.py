"""Whether replicas that ought to be equal still are, bit for bit: a digest of each leaf, compared now and then.

Replicas start equal and do the same, so they stay equal, unless a bit flips in memory, a chip computes wrongly, or a
script changes a state on one rank only. Nobody would notice: the sums are still the same on all.
"""

from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, UInt32

from fddp.buckets import take_apart, to_words
from fddp.comm import REPLICATED, Group, add_replica_dim, shortened
from fddp.jax_internals import without_context_mesh
from fddp.step import TrainState
from fddp.wording import leaf_name

ODD = 0x9E3779B1  # an odd number, by which no word but zero is multiplied to zero modulo 2³²


def comparing(group: Group, every: int) -> Callable[[TrainState, int], None]:
    """Makes a function that compares the replicas' parameters and optimizer states.

    Args:
      group: the replicas.
      every: after how many steps; 0: never.

    Returns:
      `check(state, number)`, to be called on every rank before the first step, whose number is 0, and after each step;
      it raises a RuntimeError on all of them if a leaf differs, which names the leaf and whose it is.
    """
    own = group.placement.per_replica
    program = group.placement.program(lambda tree: add_replica_dim(_digests(tree)), (REPLICATED,), own)

    @without_context_mesh
    def check(state: TrainState, number: int) -> None:
        if not every or number % every:
            return
        # What each replica has a part of is on no other.
        tree, _ = take_apart({"params": state.params, "opt_state": state.opt_state})
        found = program(group.placement.place(tree, REPLICATED))
        mine = np.concatenate([np.asarray(shard.data) for shard in found.addressable_shards if shard.replica_id == 0])
        rows = group.all_gather(mine)
        if np.all(rows == mine[0]):
            return
        replicas = rows.reshape(-1, rows.shape[-1])
        paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(tree)]
        names = [leaf_name(path) for path in paths]
        # rank, or rank and replica where it has several
        who = [f"rank {k // len(mine)}" + f", replica {k % len(mine)}" * (len(mine) > 1) for k in range(len(replicas))]
        told = [_difference(name, who, column) for name, column in zip(names, replicas.T) if len(set(column)) > 1]
        when = f"no longer equal after step {number}" if number else "not equal before the first step"
        raise RuntimeError(
            f"replicas are {when}: {shortened(told)}. A bit has flipped, or a rank has changed its state "
            "alone; go on from a checkpoint that was made before."
        )

    return check


def _difference(name: str, who: list[str], digests: np.ndarray) -> str:
    ((most, votes), *others) = Counter(digests.tolist()).most_common()
    if others and others[0][1] == votes:
        return f"{name} differs, and not more of them have one value than the other"
    return (
        f"{name} of {' and '.join(one for one, x in zip(who, digests.tolist()) if x != most)} differs from the others'"
    )


def _digests(tree: Any) -> UInt32[Array, " leaves"]:
    return jnp.array([_digest(x) for x in jax.tree.leaves(tree)], jnp.uint32)


def _digest(x: Array) -> UInt32[Array, ""]:
    """A sum over words and their places, which any single bit changes."""
    words = to_words(x)
    if words.dtype.itemsize == 8:
        words = jax.lax.bitcast_convert_type(words, jnp.uint32)
    words = words.reshape(-1).astype(jnp.uint32)
    places = 2 * jax.lax.iota(jnp.uint32, words.size) + 1
    return jnp.sum(words * (places * jnp.uint32(ODD)), dtype=jnp.uint32)
