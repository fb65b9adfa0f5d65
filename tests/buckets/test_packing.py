"""Packing is lossless: every bit of every leaf and of the tail is restored."""

from functools import partial
from typing import Any

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from trees import same_bits

from fddp import make_plan, pack, unpack
from fddp.buckets.messages import add_tail, place_scalars, take_tail
from fddp.buckets.packing import SHARED, unpack_received
from fddp.jax_internals import CPU_OPTIONS

FLOATS = [
    np.dtype(d)
    for d in (jnp.bfloat16, np.float16, np.float32, np.float64, np.complex64, np.complex128)
]
OTHERS = [np.dtype(d) for d in (np.int8, np.uint8, np.int32, np.uint32, np.int64, np.bool_)]
SHAPES = [(), (0,), (3,), (2, 0), (2, 2)]
FEW = hypothesis.settings(max_examples=15)  # each compiles its own concatenation


def random_bits(shape: tuple[int, ...], dtype: np.dtype, seed: int) -> np.ndarray:
    """Arbitrary bits, including infinities, subnormal numbers and NaNs of every payload."""
    rng = np.random.default_rng(seed)
    if dtype == np.bool_:
        return np.asarray(rng.random(shape) < 0.5)
    bits = np.frombuffer(rng.bytes(int(np.prod(shape)) * dtype.itemsize), dtype).reshape(shape)
    # XLA:CPU joins bfloat16s by way of float32, which knows a single bfloat16 NaN.
    return np.where(np.isnan(bits), dtype.type(np.nan), bits) if dtype == jnp.bfloat16 else bits


leaves = st.builds(
    random_bits,
    st.sampled_from(SHAPES),
    st.sampled_from(FLOATS + OTHERS),
    st.integers(0, 2**32 - 1),
)
trees = st.dictionaries(
    st.sampled_from(["kernel", "bias", "scale", "mean", "count"]),
    st.none() | leaves | st.lists(leaves, max_size=3),
)


### Buckets


@pytest.mark.steps
@FEW
@given(trees, st.sampled_from([0, 20 / 2**20, 25]))
def test_unpack_inverts_pack_to_the_bit(tree, cap):
    with jax.enable_x64(True):
        plan = make_plan(tree, bucket_cap_mb=cap)
        buckets = pack(plan, tree)
        assert [(b.shape, b.dtype) for b in buckets] == [((b.size,), b.dtype) for b in plan.buckets]
        same_bits(unpack(plan, buckets), tree)


@pytest.mark.parametrize("count", [SHARED + 1, 3])
def test_what_was_received_unpacks_to_the_same_bits(count):
    draw = np.random.default_rng(0)
    tree = {"equal": [draw.normal(size=(2, 3)).astype(np.float32) for _ in range(count)]}
    tree["others"] = [np.arange(size, dtype=np.float32) for size in (4, 0, 7)]
    plan = make_plan(tree)
    same_bits(jax.jit(partial(unpack_received, plan))(pack(plan, tree)), tree)


def test_offsets_of_equal_leaves_are_arguments_of_kernels_on_cpus_alone():
    plan = make_plan([np.zeros(3, np.float32)] * 40)
    unpacking = jax.jit(partial(unpack_received, plan), compiler_options=CPU_OPTIONS)
    program = unpacking.trace(pack(plan, [np.ones(3, np.float32)] * 40))
    kernels = program.lower().compile().as_text()
    assert kernels is not None and "slice={" not in kernels
    on_gpus = program.lower(lowering_platforms=("cuda",)).as_text()
    assert "dynamic_slice" not in on_gpus and "barrier" not in on_gpus


def test_buckets_of_a_generator_are_unpacked_as_those_of_a_list():
    tree = {"a": np.arange(3, dtype=np.float32), "b": np.ones((2, 2), np.float32)}
    plan = make_plan(tree, bucket_cap_mb=0)
    same_bits(unpack(plan, (x for x in pack(plan, tree))), tree)
    scalars = r"\[\(\), \(\)\]"
    for wrong, shapes in ((iter([]), r"\[\]"), ("ab", scalars), ([1.0, 2.0], scalars)):
        with pytest.raises(ValueError, match=f"buckets of shapes {shapes} do not fit the plan"):
            unpack(plan, wrong)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("dtype", FLOATS[:4], ids=str)
def test_negative_zeros_infinities_subnormals_and_nan_payloads_survive(dtype, x64):
    unsigned = np.dtype(f"u{dtype.itemsize}")
    infinity = np.array([np.inf], dtype).view(unsigned)[0]
    sign = unsigned.type(1 << (8 * dtype.itemsize - 1))
    nans = np.array([infinity + 1, infinity + 5, sign | (infinity + 3)], unsigned)
    one_nan = np.full(3, np.nan, dtype).view(unsigned)  # see random_bits
    bits = np.array(
        [sign, infinity, sign | infinity, 1, *(one_nan if dtype == jnp.bfloat16 else nans)],
        unsigned,
    )
    tree = [bits.view(dtype), np.full(3, -0.0, dtype)]
    plan = make_plan(tree)
    same_bits(unpack(plan, jax.jit(lambda tree: pack(plan, tree))(tree)), tree)


def test_leaves_lie_in_a_bucket_in_the_order_of_the_plan():
    tree = {
        "a": np.array([[1, 2], [3, 4]], np.float32),
        "b": np.float32(5),
        "c": np.array([6], np.float32),
    }
    plan = make_plan(tree, order=[1, 0, 2])
    assert [b.tolist() for b in pack(plan, tree)] == [[5, 1, 2, 3, 4, 6]]


def test_leaves_outside_the_order_come_back_as_none():
    tree = {"a": np.array([1, 2], np.float32), "b": np.array([3], np.int32), "c": np.float32(4)}
    plan = make_plan(tree, order=[2, 0])
    same_bits(unpack(plan, pack(plan, tree | {"b": None})), tree | {"b": None})


def test_pack_and_unpack_are_the_same_inside_a_program():
    tree = {
        "a": np.arange(6, dtype=np.float32).reshape(2, 3),
        "b": [np.float32(7), np.array([8, 9], np.float16)],
        "c": None,
    }
    plan = make_plan(tree, bucket_cap_mb=0)
    inside = jax.jit(lambda tree: (pack(plan, tree), unpack(plan, pack(plan, tree))))
    same_bits(inside(tree), (pack(plan, tree), tree))


### Tail


def wide_enough(dtype: Any) -> tuple[Any, tuple[jax.Array, ...]]:
    """A plan with a second bucket of this dtype, behind one of 16 bits; and its buckets."""
    tree = [
        np.arange(3).astype(dtype),
        np.arange(4).astype(jnp.bfloat16),
        np.arange(2, dtype=np.float16),
    ]
    plan = make_plan(tree, order=[1, 0, 2], bucket_cap_mb=0)
    return plan, pack(plan, tree)


EXTREMES = {
    "float32": np.array([0, 1 / 3, -1e-30, 3.4e38, 2**24 + 2], np.float32),
    "int32": np.array([0, -1, 2**31 - 1, -(2**31), 2**24 + 1], np.int32),
    "uint32": np.array([0, 1, 2**32 - 1, 2**31 + 1], np.uint32),
    "int64": np.array([0, -1, 2**63 - 1, -(2**63), 2**53 + 1], np.int64),
    "uint8": np.array([0, 255], np.uint8),
    "int16": np.array([-(2**15), 2**15 - 1], np.int16),
    "bool": np.array([True, False]),
    "bfloat16": np.array([1 / 3, -3e38], jnp.bfloat16),
    "nested": {"mean": np.zeros((0, 2), np.float32), "count": np.int32(7), "none": None},
}


@pytest.mark.parametrize(
    ("dtype", "wires"),
    [(np.float32, 3), (np.float64, 3), (np.complex64, 3), (jnp.bfloat16, 4), (np.int32, 4)],
)
def test_every_tail_comes_back_exactly_on_the_bucket_that_holds_it(dtype, wires, x64):
    plan, buckets = wide_enough(dtype)
    messages = jax.jit(lambda buckets: add_tail(plan, buckets, EXTREMES))(buckets)
    assert len(messages.arrays) == wires and plan.carrier.bucket == (1 if wires == 3 else None)
    unpacked, tail = jax.jit(lambda messages: take_tail(plan, messages))(messages)
    same_bits((unpacked, tail), (buckets, EXTREMES))


@pytest.mark.parametrize(("early", "sizes"), [(True, [1, 6, 4]), (False, [6, 4, 1])])
def test_a_tail_that_may_ride_nowhere_travels_first_or_last(early, sizes):
    tree = {"a": jnp.arange(4.0), "b": jnp.arange(6.0)}
    plan = place_scalars(make_plan(tree, bucket_cap_mb=0), exact=False, early=early)
    messages = add_tail(plan, pack(plan, tree), jnp.float32(0.5))
    assert [x.size for x in messages.arrays] == sizes
    buckets, tail = take_tail(plan, messages)
    same_bits((unpack(plan, buckets), tail), (tree, jnp.float32(0.5)))


def test_float64_tails_come_back_exactly_on_a_float64_bucket(x64):
    plan, buckets = wide_enough(np.float64)
    tail = {"loss": np.float64(1 / 3)}
    same_bits(take_tail(plan, add_tail(plan, buckets, tail))[1], tail)


def test_a_bucket_that_would_round_scalars_is_refused(x64):
    plan, buckets = wide_enough(np.float32)
    with pytest.raises(ValueError, match=r"bucket 1, of float32, cannot carry scalars of float64"):
        add_tail(plan, buckets, np.float64(1 / 3))
    exact = place_scalars(plan, np.float64)
    assert exact.carrier.bucket is None
    assert take_tail(exact, add_tail(exact, buckets, np.float64(1 / 3)))[1] == 1 / 3


@pytest.mark.steps
def test_a_sum_over_replicas_to_which_only_one_contributes_is_a_broadcast(x64):
    plan, buckets = wide_enough(np.float32)
    zeros = jax.tree.map(np.zeros_like, EXTREMES)
    root_messages = add_tail(plan, buckets, EXTREMES)
    zero_messages = add_tail(plan, buckets, zeros)
    same_bits(take_tail(plan, jax.tree.map(jnp.add, root_messages, zero_messages))[1], EXTREMES)


### Errors


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"a": np.zeros(2, np.float32)}, "does not fit the plan"),
        ([np.zeros(2, np.float32)] * 2, "does not fit the plan"),
        (
            {"a": np.zeros(3, np.float32), "b": np.zeros(2, np.float32)},
            r"leaf a float32\[2\].*got float32\[3\]",
        ),
        (
            {"a": np.zeros(2, np.float32), "b": np.zeros(2, np.int32)},
            r"leaf b float32\[2\].*got int32\[2\]",
        ),
    ],
    ids=["leaf missing", "other structure", "other shape", "other dtype"],
)
def test_a_tree_that_does_not_fit_the_plan_is_refused(tree, message):
    plan = make_plan({"a": np.zeros(2, np.float32), "b": np.zeros(2, np.float32)})
    with pytest.raises(ValueError, match=message):
        pack(plan, tree)


@pytest.mark.parametrize(
    "buckets", [[], [jnp.zeros(3)], [jnp.zeros(2), jnp.zeros(2)], [jnp.zeros((2, 1))]]
)
def test_buckets_that_do_not_fit_the_plan_are_refused(buckets):
    with pytest.raises(ValueError, match=r"do not fit the plan, which has \[\(2,\)\]"):
        unpack(make_plan([np.zeros(2, np.float32)]), buckets)


def test_numpy_arrays_of_64_bits_are_packed_as_jax_takes_them():
    tree = {"a": np.arange(3.0), "b": np.arange(2)}
    plan = make_plan(tree)
    buckets = pack(plan, tree)
    assert sorted(str(bucket.dtype) for bucket in buckets) == ["float32", "int32"]
    jax.tree.map(np.testing.assert_array_equal, unpack(plan, buckets), tree)
