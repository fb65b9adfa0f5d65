"""Warns about ranks with equal rows: without a sampler all ranks but one train in vain."""

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


def digest(batch: PyTree) -> bytes:
    """Hashes the first rows of this process's batch into `BESIDE` bytes.

    Zeros mean "unknown": `jax.ShapeDtypeStruct`s, arrays with parts in other processes, and
    constant rows, which are placeholders for a trial.
    """
    leaves = jax.tree.leaves(batch)
    if not all(map(_is_here, leaves)):
        return bytes(BESIDE)
    arrays = [_first_rows(x) for x in leaves]
    if all(x.size == 0 or np.all(x == x.flat[0]) for x in arrays):
        return bytes(BESIDE)
    return sha256(b"".join(x.tobytes() for x in arrays)).digest()[:BESIDE]


def tell_same_rows(group: Group, digests: Sequence[bytes]) -> None:
    """Prints a warning on rank 0 for ranks with equal digests."""
    ranks_by_digest = defaultdict[bytes, list[int]](list)
    for rank, row_digest in enumerate(digests):
        ranks_by_digest[row_digest].append(rank)
    for row_digest, ranks in ranks_by_digest.items():
        if len(ranks) > 1 and any(row_digest):
            group.print(
                f"fddp: ranks {', '.join(map(str, ranks))} pass the same first rows: does each "
                "read different rows? "
                "group.rows(batch) selects the rows of a rank, and fddp.samples distributes those "
                "of an epoch.",
                file=sys.stderr,
            )


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
