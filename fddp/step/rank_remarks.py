"""Remarks on ranks with equal rows, and on ranks with unequal programs: a mistake, or intended.

Without a sampler all ranks but one train in vain. A tuple from a set has another order on each
rank, and the gradients of different parameters would be averaged with each other.
"""

import sys
from collections import defaultdict
from collections.abc import Sequence
from hashlib import sha256
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from fddp.comm import BESIDE, Group

ROWS = 8
DIGEST = BESIDE // 2


def digest(batch: PyTree) -> bytes:
    """Hashes the first rows of this process's batch into `DIGEST` bytes.

    Zeros mean "unknown": `jax.ShapeDtypeStruct`s, arrays with parts in other processes, and
    constant rows, which are placeholders for a trial.
    """
    leaves = jax.tree.leaves(batch)
    if not all(map(_is_here, leaves)):
        return bytes(DIGEST)
    arrays = [_first_rows(x) for x in leaves]
    if all(x.size == 0 or np.all(x == x.flat[0]) for x in arrays):
        return bytes(DIGEST)
    return sha256(b"".join(x.tobytes() for x in arrays)).digest()[:DIGEST]


def tell_other_programs(group: Group, digests: Sequence[bytes]) -> None:
    """Prints a warning on rank 0 unless the digests of all ranks' programs are equal."""
    sets = list(_ranks_by_digest(digests).values())
    if len(sets) > 1:
        ranks = " and ".join(", ".join(map(str, ranks)) for ranks in sets)
        group.print(
            f"fddp: the losses of ranks {ranks} are different programs. That is right for a branch "
            "by rank; but arrays in the order of a set get mixed up: sort their names, or use a "
            "dict.",
            file=sys.stderr,
        )


def tell_same_rows(group: Group, digests: Sequence[bytes]) -> None:
    """Prints a warning on rank 0 for ranks with equal digests."""
    for row_digest, ranks in _ranks_by_digest(digests).items():
        if len(ranks) > 1 and any(row_digest):
            group.print(
                f"fddp: ranks {', '.join(map(str, ranks))} pass the same first rows: does each "
                "read different rows? "
                "group.rows(batch) selects the rows of a rank, and fddp.samples distributes those "
                "of an epoch.",
                file=sys.stderr,
            )


def _ranks_by_digest(digests: Sequence[bytes]) -> dict[bytes, list[int]]:
    ranks = defaultdict[bytes, list[int]](list)
    for rank, digest in enumerate(digests):
        ranks[digest].append(rank)
    return ranks


def _is_here(x: object) -> bool:
    """Returns True if this process holds all of an array."""
    return not isinstance(x, jax.ShapeDtypeStruct) and (
        not isinstance(x, jax.Array) or x.is_fully_addressable
    )


def _first_rows(x: Any) -> np.ndarray:
    """Copies the first rows of an array to the host."""
    if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    return np.asarray(x[:ROWS]) if np.ndim(x) else np.asarray(x)
