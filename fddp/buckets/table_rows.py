"""Sends an embedding's gradient as its touched rows with their numbers, not as the whole table.

A message of rows has a fixed capacity, and is all-gathered. Rows beyond the capacity stay in the
bucket, which is all-reduced if any replica has such rows. So the sum is exact for any number of
touched rows.

Source: `sparse=True` of `Embedding` in PyTorch, whose gradients DDP gathers; Kim et al., "Parallax"
(EuroSys 2019).
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int32, PyTree, Shaped, UInt

from fddp.buckets.assignment import make_plan, plan_together
from fddp.buckets.bits import from_words, to_words
from fddp.buckets.plan import Bucket, BucketPlan, Leaf
from fddp.buckets.travelling import Rows

WORTH_BYTES = 64 * 1024  # sending these takes about as long as the additional messages of rows


def plan_with_table_rows(
    tree: PyTree,
    touched: Mapping[int, int],
    replicas: int,
    *,
    order: Sequence[int],
    together: Mapping[int, Hashable] = MappingProxyType({}),
    **caps: Any,
) -> BucketPlan:
    """Makes a plan that sends leaves as rows, in separate buckets, if enough bytes are saved.

    `touched` maps the index of a leaf to the number of rows that a replica's gradient touches. The
    further arguments are those of `plan_together`.

    >>> tree = {"bias": np.zeros(8, np.float32), "embed": np.zeros((9000, 8), np.float32)}
    >>> [bucket.rows for bucket in plan_with_table_rows(tree, {1: 64}, 2, order=(0, 1)).buckets]
    [None, Rows(most=64, of=9000)]
    >>> [bucket.rows for bucket in plan_with_table_rows(tree, {1: 8000}, 2, order=(0, 1)).buckets]
    [None]
    """
    leaves = make_plan(tree, order=order).leaves
    sparse: dict[int, Bucket] = {}
    for i in order:
        bucket = _bucket_of_rows(i, leaves[i], touched.get(i, 0))
        if bucket and _saved(bucket, leaves[i], replicas) >= WORTH_BYTES:
            sparse[i] = bucket
    dense = [i for i in order if i not in sparse]
    plan = plan_together(tree, together, order=dense, **caps)
    position = {i: k for k, i in enumerate(order)}
    buckets = sorted(
        [*plan.buckets, *sparse.values()], key=lambda bucket: position[bucket.leaves[-1]]
    )
    return replace(plan, buckets=tuple(buckets))


def take_table_rows(
    bucket: Bucket, flat: Shaped[Array, " n"]
) -> tuple[UInt[Array, " words"], Shaped[Array, " n"]]:
    """Splits a gradient into a message of its nonzero rows, up to the capacity, and the residual.

    The message holds words: the row numbers, the rows, and a flag that is set if rows remain in the
    residual.
    """
    rows = _rows(bucket)
    table = flat.reshape(rows.of, -1)
    touched = jnp.any(table != 0, axis=1)
    (numbers,) = jnp.nonzero(touched, size=rows.most, fill_value=rows.of)
    values = to_words(table.at[numbers].get(mode="fill", fill_value=0)).reshape(-1)
    overflow = jnp.sum(touched) > rows.most
    words = [
        _number_words(numbers.astype(jnp.int32), values.dtype),
        values,
        overflow[None].astype(values.dtype),
    ]
    return jnp.concatenate(words), table.at[numbers].set(0, mode="drop").reshape(-1)


def add_table_rows(
    bucket: Bucket, words: UInt[Array, " words"], residual: Shaped[Array, " n"]
) -> Shaped[Array, " n"]:
    """Adds the gathered rows of all replicas to the summed residual.

    Rows are added replica by replica, so that all replicas compute the same bits. Rows of 16-bit
    floats are added in 32 bits, and rounded once.
    """
    rows = _rows(bucket)
    table = residual.reshape(rows.of, -1)
    shape = (rows.most, table.shape[1])
    components = (2,) if jnp.issubdtype(residual.dtype, jnp.complexfloating) else ()
    header_size = rows.most * _words_of_number(words.dtype)

    def add(total: Array, message: Array) -> tuple[Array, None]:
        header, values, _ = jax.lax.split(message, [header_size, message.size - header_size - 1, 1])
        values = from_words(values.reshape(*components, *shape), residual)
        return total.at[_numbers(header)].add(values.astype(total.dtype), mode="drop"), None

    wide = jnp.promote_types(residual.dtype, jnp.float32)
    total, _ = jax.lax.scan(add, table.astype(wide), words.reshape(-1, _length(bucket)))
    return total.astype(residual.dtype).reshape(-1)


def flags(bucket: Bucket, replicas: int) -> tuple[int, ...]:
    """Places of the overflow flags in the gathered words: the last word of each replica."""
    words = _length(bucket)
    return tuple(range(words - 1, replicas * words, words))


def _length(bucket: Bucket) -> int:
    """Number of words per replica."""
    return bucket.nbytes // bucket.word


def _bucket_of_rows(i: int, leaf: Leaf, touched: int) -> Bucket | None:
    """Returns a bucket of rows; None if no row is touched, or for floats of less than 16 bits."""
    if not (touched and leaf.shape and leaf.size) or jnp.finfo(leaf.dtype).bits < 16:
        return None
    return Bucket(
        (i,), (leaf.name,), leaf.dtype, leaf.size, Rows(min(touched, leaf.shape[0]), leaf.shape[0])
    )


def _saved(rows: Bucket, leaf: Leaf, replicas: int) -> int:
    """Bytes saved per replica: it sends its rows p − 1 times instead of 2 (p − 1)/p of the leaf."""
    return (replicas - 1) * (2 * leaf.nbytes // replicas - rows.nbytes)


def _rows(bucket: Bucket) -> Rows:
    if bucket.rows is None:
        raise ValueError(f"bucket {bucket.names} does not travel as rows.")
    return bucket.rows


# A row number has 32 bits: two words of 16 bits, or one wider word.


def _words_of_number(dtype: np.dtype) -> int:
    return max(1, 4 // dtype.itemsize)


def _number_words(numbers: Int32[Array, " rows"], dtype: np.dtype) -> UInt[Array, " words"]:
    if _words_of_number(dtype) == 1:
        return numbers.astype(dtype)
    return jax.lax.bitcast_convert_type(numbers, dtype).reshape(-1)


def _numbers(words: UInt[Array, " words"]) -> Int32[Array, " rows"]:
    count = _words_of_number(words.dtype)
    if count == 1:
        return words.astype(jnp.int32)
    return jax.lax.bitcast_convert_type(words.reshape(-1, count), jnp.int32)
