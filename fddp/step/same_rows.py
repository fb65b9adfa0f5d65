"""Ranks that bring the same rows: a sampler was forgotten, and all but one of them train for nothing."""

import sys
from collections import defaultdict
from collections.abc import Sequence
from hashlib import sha256
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fddp.comm import Group

ROWS = 8
BYTES = 16


def digest(batch: Any) -> bytes:
    """A digest of the first rows of a batch.

    Args:
      batch: this process's rows.

    Returns:
      `BYTES` bytes; zeros where there is nothing to tell: of rows of one number, which are made up for a trial.
    """
    arrays = [_first_rows(x) for x in jax.tree.leaves(batch)]
    if any(x is None for x in arrays) or not any(x is not None and x.size and np.any(x != x.flat[0]) for x in arrays):
        return bytes(BYTES)
    return sha256(b"".join(x.tobytes() for x in arrays if x is not None)).digest()[:BYTES]


def tell_same_rows(group: Group, digests: Sequence[bytes]) -> None:
    """Says once, on rank 0, which ranks bring the same rows.

    Args:
      group: the replicas.
      digests: of each rank, in order.
    """
    ranks = defaultdict[bytes, list[int]](list)
    for rank, one in enumerate(digests):
        ranks[one].append(rank)
    for one, same in ranks.items():
        if len(same) > 1 and any(one):
            group.print(
                f"fddp: ranks {', '.join(map(str, same))} bring the same first rows: does each read its own? "
                "fddp.samples(rows, batch, rank=group.rank, size=group.processes) deals them out.",
                file=sys.stderr,
            )


def _first_rows(x: Any) -> np.ndarray | None:
    """The first rows of an array on the host; None for the form of one, or if other processes hold a part of it."""
    if isinstance(x, jax.ShapeDtypeStruct) or (isinstance(x, jax.Array) and not x.is_fully_addressable):
        return None
    if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    return np.asarray(x[:ROWS]) if np.ndim(x) else np.asarray(x)
