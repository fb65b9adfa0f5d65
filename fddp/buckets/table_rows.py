"""Sends an embedding's gradient as the rows that it touched, with their numbers, in place of the whole table.

A message of rows has room for a fixed number of them, and is gathered. Rows that find no room are left in the bucket,
which is all-reduced if any replica says that it has some left. So the sum is exact however many rows are touched.

Source: `sparse=True` of `Embedding` in PyTorch, whose gradients DDP gathers; Kim et al., "Parallax" (EuroSys 2019).
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int32, Shaped, UInt

from fddp.buckets.assignment import make_plan
from fddp.buckets.bits import from_words, to_words
from fddp.buckets.groups import Groups, group_keys
from fddp.buckets.plan import Bucket, BucketPlan, Leaf, Rows

WORTH_BYTES = 64 * 1024  # as many take about as long as the messages that rows add


def plan_with_table_rows(
    tree: Any,
    touched: Mapping[int, int],
    replicas: int,
    *,
    order: Sequence[int],
    groups: Groups | None = None,
    **caps: Any,
) -> BucketPlan:
    """Makes a plan in which leaves travel as rows where that saves much, each in a bucket of its own.

    Args:
      tree: as for `make_plan`.
      touched: leaf index → number of its rows that a replica's gradient touches; leaves without an entry stay whole.
      replicas: number of replicas, which gather the rows.
      order: as for `make_plan`.
      groups: likewise; a leaf that is in a group stays whole.
      **caps: likewise.

    Returns:
      The plan.

    Example:
      >>> tree = {"bias": np.zeros(8, np.float32), "embed": np.zeros((9000, 8), np.float32)}
      >>> [bucket.rows for bucket in plan_with_table_rows(tree, {1: 64}, 2, order=(0, 1)).buckets]
      [None, Rows(most=64, of=9000)]
      >>> [bucket.rows for bucket in plan_with_table_rows(tree, {1: 8000}, 2, order=(0, 1)).buckets]
      [None]
    """
    leaves = make_plan(tree, order=order).leaves
    keys = dict(zip(order, group_keys([leaves[i].name for i in order], groups)))
    alone = {i: _bucket_of_rows(i, leaves[i], touched.get(i, 0)) for i in order if keys[i] is None}
    few = [one for i, one in alone.items() if one is not None and _saved(one, leaves[i], replicas) >= WORTH_BYTES]
    away = {one.leaves[0] for one in few}
    plan = make_plan(tree, order=[i for i in order if i not in away], groups=groups, **caps)
    ready = {i: at for at, i in enumerate(order)}
    return replace(plan, buckets=tuple(sorted([*plan.buckets, *few], key=lambda one: ready[one.leaves[-1]])))


def take_table_rows(bucket: Bucket, flat: Shaped[Array, " n"]) -> tuple[UInt[Array, " words"], Shaped[Array, " n"]]:
    """Takes the rows that are not zero out of a bucket.

    Args:
      bucket: a bucket that travels as rows.
      flat: its gradient.

    Returns:
      The message: numbers and rows as words, and a last word that says whether more rows are touched than there is room
      for; and the gradient without these rows.
    """
    rows = _rows(bucket)
    table = flat.reshape(rows.of, -1)
    touched = jnp.any(table != 0, axis=1)
    (numbers,) = jnp.nonzero(touched, size=rows.most, fill_value=rows.of)
    values = to_words(table.at[numbers].get(mode="fill", fill_value=0)).reshape(-1)
    more = jnp.sum(touched) > rows.most
    words = [_number_words(numbers.astype(jnp.int32), values.dtype), values, more[None].astype(values.dtype)]
    return jnp.concatenate(words), table.at[numbers].set(0, mode="drop").reshape(-1)


def add_table_rows(bucket: Bucket, words: UInt[Array, " words"], left: Shaped[Array, " n"]) -> Shaped[Array, " n"]:
    """Adds up the rows of all replicas: with one replica the inverse of `take_table_rows`.

    Rows are added replica by replica, in one order, which gives all replicas the same bits. Rows of 16-bit floats are
    added in 32 bits, and rounded once.

    Args:
      bucket: a bucket that travels as rows.
      words: the words of all replicas, one replica behind the other.
      left: the sum of the gradients without these rows.

    Returns:
      The sum of the bucket.
    """
    rows = _rows(bucket)
    table = left.reshape(rows.of, -1)
    form = (rows.most, table.shape[1])
    parts = (2,) if jnp.issubdtype(left.dtype, jnp.complexfloating) else ()
    numbers = rows.most * _words_of_number(words.dtype)

    def add(total: Array, one: Array) -> tuple[Array, None]:
        which, values, _ = jax.lax.split(one, [numbers, one.size - numbers - 1, 1])
        values = from_words(values.reshape(*parts, *form), left)
        return total.at[_numbers(which)].add(values.astype(total.dtype), mode="drop"), None

    wide = jnp.promote_types(left.dtype, jnp.float32)
    total, _ = jax.lax.scan(add, table.astype(wide), words.reshape(-1, _length(bucket)))
    return total.astype(left.dtype).reshape(-1)


def flags(bucket: Bucket, replicas: int) -> tuple[int, ...]:
    """Places of the flags among the words of all replicas: each flag says whether a replica has rows left."""
    words = _length(bucket)
    return tuple(range(words - 1, replicas * words, words))


def _length(bucket: Bucket) -> int:
    """Number of words that one replica sends."""
    return bucket.nbytes // bucket.word


def _bucket_of_rows(i: int, leaf: Leaf, touched: int) -> Bucket | None:
    """The bucket of a leaf in rows; None if none is touched, or if its numbers have less than 16 bits."""
    if not (touched and leaf.shape and leaf.size) or jnp.finfo(leaf.dtype).bits < 16:
        return None
    return Bucket((i,), (leaf.name,), leaf.dtype, leaf.size, Rows(min(touched, leaf.shape[0]), leaf.shape[0]))


def _saved(rows: Bucket, leaf: Leaf, replicas: int) -> int:
    """Bytes that a replica saves: it sends its rows to p − 1 others, and for an all-reduce 2 (p − 1)/p of the leaf."""
    return (replicas - 1) * (2 * leaf.nbytes // replicas - rows.nbytes)


def _rows(bucket: Bucket) -> Rows:
    if bucket.rows is None:
        raise ValueError(f"bucket {bucket.names} does not travel as rows.")
    return bucket.rows


# The number of a row has 32 bits: two words of 16 bits, or one word of 32 or more.


def _words_of_number(dtype: np.dtype) -> int:
    return max(1, 4 // dtype.itemsize)


def _number_words(numbers: Int32[Array, " rows"], dtype: np.dtype) -> UInt[Array, " words"]:
    if _words_of_number(dtype) == 1:
        return numbers.astype(dtype)
    return jax.lax.bitcast_convert_type(numbers, dtype).reshape(-1)


def _numbers(words: UInt[Array, " words"]) -> Int32[Array, " rows"]:
    each = _words_of_number(words.dtype)
    return words.astype(jnp.int32) if each == 1 else jax.lax.bitcast_convert_type(words.reshape(-1, each), jnp.int32)
