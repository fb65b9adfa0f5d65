"""Ranks that bring the same rows: a sampler was forgotten, and all but one of them train for nothing."""

import sys
from collections import defaultdict
from collections.abc import Sequence
from hashlib import sha256
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fddp.comm import BESIDE, Group

ROWS = 8


def digest(batch: Any) -> bytes:
    """A digest of the first rows of a batch.

    Args:
      batch: this process's rows.

    Returns:
      As many bytes as travel beside a comparison. Zeros where there is nothing to tell: of forms, of arrays that other
      processes hold a part of, and of rows of one number, which are made up for a trial.
    """
    leaves = jax.tree.leaves(batch)
    if not all(map(_is_here, leaves)):
        return bytes(BESIDE)
    arrays = [_first_rows(x) for x in leaves]
    if all(x.size == 0 or np.all(x == x.flat[0]) for x in arrays):
        return bytes(BESIDE)
    return sha256(b"".join(x.tobytes() for x in arrays)).digest()[:BESIDE]


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


def _is_here(x: Any) -> bool:
    """Whether this process has all of an array."""
    return not isinstance(x, jax.ShapeDtypeStruct) and (not isinstance(x, jax.Array) or x.is_fully_addressable)


def _first_rows(x: Any) -> np.ndarray:
    """The first rows of an array, on the host."""
    if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    return np.asarray(x[:ROWS]) if np.ndim(x) else np.asarray(x)
