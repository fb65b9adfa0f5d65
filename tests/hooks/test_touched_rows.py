"""Tables whose touched rows travel, and the sums of these rows over replicas."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fddp.buckets import SentLeaf, plan_with_table_rows
from fddp.buckets.table_rows import WORTH_BYTES
from fddp.comm import axis_communicator
from fddp.hooks.touched_rows import sum_of_table

DTYPES = ("float32", "float64", "bfloat16", "float16", "complex64", "complex128")
ALL = 70_000  # rows: more than 16 bits count
WIDTH = 3
MOST = 5


def bucket_of(dtype: str) -> Any:
    form = jax.ShapeDtypeStruct((ALL, WIDTH), dtype)
    (bucket,) = plan_with_table_rows(form, {0: MOST}, 2, order=[SentLeaf(0)]).buckets
    return bucket


def gradient(dtype: str, numbers: list[int], seed: int) -> Any:
    values = np.random.default_rng(seed).integers(-8, 8, size=(len(numbers), WIDTH)) + 9
    return (
        jnp.zeros((ALL, WIDTH), dtype)
        .at[np.array(numbers, int)]
        .add(values.astype(dtype))
        .reshape(-1)
    )


def total(bucket: Any, gradients: Any) -> Any:
    """The sums of replicas along an axis of `vmap`, equal on all."""
    comm = axis_communicator("replica", len(gradients), "cpu")
    sums = jax.vmap(lambda flat: sum_of_table(bucket.rows, comm, flat, ())[0], axis_name="replica")(
        jnp.stack(gradients)
    )
    assert len({np.asarray(x).tobytes() for x in sums}) == 1
    return np.asarray(sums[0])


@pytest.mark.steps
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("more", [[5], [0, 1, 2, 3, 4, 5, 6]])
def test_rows_of_replicas_add_up_also_if_a_message_has_no_room(
    x64: None, dtype: str, more: list[int]
):
    lookups = ([1, 5, 60_000], [], [69_999, 65_536], more)
    gradients = [gradient(dtype, numbers, k) for k, numbers in enumerate(lookups)]
    # Small whole numbers: exact in every dtype.
    assert np.array_equal(total(bucket_of(dtype), gradients), np.asarray(sum(gradients)))


@pytest.mark.steps
def test_rows_of_16_bits_are_rounded_once():
    """256 and seven times 1 are 263; sums one by one in bfloat16 stay 256."""
    gradients = [
        jnp.zeros(ALL * WIDTH, jnp.bfloat16).at[6].set(256 if rank == 0 else 1) for rank in range(8)
    ]
    assert float(total(bucket_of("bfloat16"), gradients)[6]) == float(jnp.bfloat16(263))


def test_a_row_that_is_no_number_travels(x64: None):
    flat = gradient("float32", [7], 0).at[7 * WIDTH].set(jnp.nan)
    assert np.isnan(total(bucket_of("float32"), [flat, flat])).nonzero()[0].tolist() == [7 * WIDTH]


def test_rows_travel_where_these_save_enough_bytes():
    """A replica sends its rows whole to each other replica, but only 2/n of an all-reduce: the more
    replicas, the fewer rows."""
    form = jax.ShapeDtypeStruct((100_000, 4), "float32")

    def travel(replicas: int, touched: int) -> bool:
        return (
            plan_with_table_rows(form, {0: touched}, replicas, order=[SentLeaf(0)]).buckets[0].rows
            is not None
        )

    bytes_of_all = 1_600_000
    bytes_of_row = 4 * 4 + 4
    for replicas in (2, 3, 8):
        most = (2 * bytes_of_all // replicas - WORTH_BYTES // (replicas - 1)) // bytes_of_row
        assert travel(replicas, most - 1) and not travel(replicas, most + 1)
    assert not travel(1, 1), "one replica sends nothing"


def test_what_no_batch_has_touched_yet_stays_whole():
    assert (
        plan_with_table_rows(
            jax.ShapeDtypeStruct((100_000, 4), "float32"), {0: 0}, 2, order=[SentLeaf(0)]
        )
        .buckets[0]
        .rows
        is None
    )


def test_the_last_bucket_of_the_others_is_small_before_a_table_too():
    tree = [jax.ShapeDtypeStruct((2**18,), "float32")] * 5 + [
        jax.ShapeDtypeStruct((100_000, 4), "float32")
    ]
    order = list(map(SentLeaf, range(6)))
    plan = plan_with_table_rows(tree, {5: 8}, 2, order=order)
    assert [bucket.leaves for bucket in plan.buckets] == [(0,), (1, 2, 3), (4,), (5,)]
    assert plan.digest != plan_with_table_rows(tree, {5: 9}, 2, order=order).digest
