"""What each rank sees in its first batch, and what the ranks agree on: a pure function of it."""

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from hashlib import sha256
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from fddp.buckets import Bucket, BucketPlan, SentLeaf, scalar_dtype
from fddp.step.bucket_plan import plan_buckets
from fddp.step.first_trace import FirstTrace
from fddp.step.replica import Replica
from fddp.step.state import Mean, TrainState

ROWS = 8  # of a batch that are hashed
DIGEST = 16  # bytes


class Seen(NamedTuple):
    """The facts of one rank's first batch that may differ between ranks."""

    order: Sequence[SentLeaf]
    """The trained leaves, in the ready order of their gradients."""
    uses: Sequence[int]
    """The position of each leaf's first use in the forward pass."""
    has_path: Mapping[int, bool]
    """Trained leaf → whether it has a path to the loss."""
    touched: Mapping[int, int]
    """Trained leaf → number of non-zero rows of its gradient in a micro-batch."""
    rows: bytes = b""
    """Digest of the first rows; zeros if unknown, empty on one process."""
    wiring: bytes = b""
    """Digest of the operations of the gradients' program; empty on one process."""
    program: str = ""
    """Digest of the gradients' program if its loops may contain sums, else "". All ranks need the
    same program then."""


class Common(NamedTuple):
    """The facts of the first batch that were compared: they are equal on all ranks."""

    state: TrainState
    """Shapes and dtypes of the state that gradients are computed for, with whole arrays."""
    chosen: tuple[int, ...]
    """Indices of the trained leaves."""
    rows: Any
    """Shapes and dtypes of this process's rows."""
    outputs: Any
    """Shapes and dtypes of loss and aux."""
    collectives: tuple[str, ...]
    """Kinds of the loss's collectives."""
    first: FirstTrace
    """The contribution of the first micro-batch."""


class Agreed(NamedTuple):
    """What the ranks agree on at the first batch."""

    plan: BucketPlan
    common: Common
    uses: Sequence[int]
    """The position of each leaf's first use in the forward pass."""
    use: Callable[[TrainState, Mean], Any]
    """(state, mean) → the step's result."""

    def first_use(self, bucket: Bucket) -> int:
        """Finds the position of a bucket's first use in the forward pass."""
        return min(self.uses[i] for i in bucket.leaves)


def merge(
    replica: Replica,
    common: Common,
    seen: Sequence[Seen],
    use: Callable[[TrainState, Mean], Any],
) -> Agreed:
    """Merges what all ranks have seen, in order of rank. Equal on all ranks; sends nothing.

    Programs may differ between ranks (a branch in Python). Then rank 0's order is used, as in DDP.
    A leaf without a path to the loss on any rank is not sent.
    """
    first = seen[0]
    order = first.order
    if len({one.program for one in seen}) > 1:
        # They cannot agree on the order of a loop's sums and other messages.
        order = [part._replace(rounds=1) for part in order]
    reached = {i for i in common.chosen if any(one.has_path[i] for one in seen)}
    ready = [part for part in order if part.leaf in reached]
    if replica.strategy.in_shards:  # every trained leaf is gathered
        ready += [part for part in order if part.leaf not in reached]
    averaged = None
    if replica.options.broadcast_buffers == "mean":
        averaged = common.state.model_state
    plan = plan_buckets(
        replica,
        common.state.params,
        ready,
        dtype=scalar_dtype(jax.tree.leaves((common.outputs, averaged))),
        touched={
            i: replica.options.accumulation_steps * max(one.touched[i] for one in seen)
            for i in common.chosen
        },
    )
    return Agreed(replace(plan, collectives=common.collectives), common, first.uses, use)


def digest_of_rows(batch: PyTree) -> bytes:
    """Hashes the first rows of this process's batch into `DIGEST` bytes.

    Zeros mean "unknown": `jax.ShapeDtypeStruct`s, arrays with parts in other processes, and
    constant rows, which are placeholders for a trial.
    """
    arrays = list[np.ndarray]()
    for x in jax.tree.leaves(batch):
        if isinstance(x, jax.ShapeDtypeStruct) or not getattr(x, "is_fully_addressable", True):
            return bytes(DIGEST)
        if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            x = jax.random.key_data(x)
        arrays.append(np.asarray(x[:ROWS] if np.ndim(x) else x))
    if all(x.size == 0 or np.all(x == x.flat[0]) for x in arrays):
        return bytes(DIGEST)
    return sha256(b"".join(x.tobytes() for x in arrays)).digest()[:DIGEST]


def remarks(seen: Sequence[Seen]) -> list[str]:
    """Words about ranks with equal rows, and with unequal programs: a mistake, or intended.

    Without a sampler all ranks but one train in vain. A tuple from a set has another order on each
    rank, and the gradients of different parameters would be averaged with each other.
    """
    words = list[str]()
    for digest, ranks in _ranks_of(one.rows for one in seen).items():
        if len(ranks) > 1 and any(digest):
            words.append(
                f"fddp: ranks {_listed(ranks)} pass the same first rows: does each read different "
                "rows? group.rows(batch) selects the rows of a rank, and fddp.samples distributes "
                "those of an epoch."
            )
    sets = _ranks_of(one.wiring for one in seen).values()
    if len(sets) > 1:
        words.append(
            f"fddp: the losses of ranks {' and '.join(map(_listed, sets))} are different programs. "
            "That is right for a branch by rank; but arrays in the order of a set get mixed up: "
            "sort their names, or use a dict."
        )
    return words


def _ranks_of(values: Iterable[Hashable]) -> dict[Any, list[int]]:
    ranks = defaultdict[Any, list[int]](list)
    for rank, value in enumerate(values):
        ranks[value].append(rank)
    return ranks


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))
