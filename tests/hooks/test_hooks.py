"""Each bucket is summed by its hook, on every schedule, and the bytes that travel are reported.

`on_ranks/hooks.py` tests hooks between processes; bench/hooks.py measures how they train.
"""

import re
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from _pytest.mark.structures import ParameterSet
from every_schedule import SCHEDULES
from jax.sharding import PartitionSpec
from trees import equal

import fddp
from fddp import hooks
from fddp.comm.communicator import as_uint32

pytestmark = pytest.mark.steps

REPLICAS = 4
RNG = np.random.default_rng(3)
LOSSY = {
    "bf16": hooks.bf16(),
    "fp16": hooks.fp16(),
    "quantize": hooks.quantize(block=16),
    "topk": hooks.topk(0.25),
    "adasum": hooks.adasum(),
    "powersgd": hooks.powersgd(1, start_step=1),
    "bf16 powersgd": hooks.bf16(hooks.powersgd(1, start_step=0)),
}


DEFAULTS = [
    hooks.bf16(),
    hooks.fp16(),
    hooks.quantize(),
    hooks.topk(0.2),
    hooks.powersgd(start_step=0),
]


def reduced(
    group: Any, hook: fddp.Hook, rows: np.ndarray, *steps: np.ndarray
) -> tuple[list[np.ndarray], Any]:
    """Sums and residuals of a hook for the replicas' buckets: one leaf each, one step after the
    other."""
    replicas = group(REPLICAS)
    form = jax.ShapeDtypeStruct(rows.shape[1:], rows.dtype)

    def on_replica(row: Any, memory: Any) -> tuple[Any, Any]:
        memory = jax.tree.map(lambda x: x[0], memory)
        total, memory = hook.apply(
            replicas.communicator, fddp.GradBucket(row.reshape(-1), (form,)), (memory,)
        )
        return total.reshape(form.shape), jax.tree.map(lambda x: x[None], memory[0])

    per_replica = replicas.placement.per_replica
    program = replicas.placement.program(
        on_replica, (per_replica, per_replica), (PartitionSpec(), per_replica)
    )
    memory = jax.tree.map(lambda x: jnp.stack([x] * REPLICAS), hook.init(form))
    totals = []
    for contributions in (rows, *steps):
        total, memory = program(contributions.reshape(-1, *rows.shape[2:]), memory)
        totals.append(np.asarray(total))
    return totals, memory


def tier(kinds: Mapping[str, fddp.Hook | None], *quick: str) -> list[ParameterSet]:
    """Hooks by name; all but some are slow."""
    return [
        pytest.param(hook, id=name, marks=[] if name in quick else [pytest.mark.slow])
        for name, hook in kinds.items()
    ]


def normal(*shape: int) -> np.ndarray:
    return RNG.normal(size=shape).astype(np.float32)


### Sums of each hook


def test_sixteen_bits_are_rounded_once_before_and_once_after_a_sum_in_float32(group):
    rows = normal(REPLICAS, 37)
    for hook, dtype, by in ((hooks.bf16(), jnp.bfloat16, 1), (hooks.fp16(), jnp.float16, REPLICAS)):
        ((total,), _) = reduced(group, hook, rows)
        rounded = (rows / by).astype(dtype).astype(np.float32)
        np.testing.assert_array_equal(total, by * rounded.sum(0).astype(dtype).astype(np.float32))


@pytest.mark.parametrize(
    ("hook", "dtype", "by"),
    [(hooks.bf16(), jnp.bfloat16, 1), (hooks.fp16(), jnp.float16, REPLICAS)],
    ids=["bf16", "fp16"],
)
def test_sixteen_bits_of_a_scattered_sum_are_rounded_once(group, hook, dtype, by):
    rows = normal(REPLICAS, 8)
    step = fddp.train_step(
        lambda w, x: jnp.mean(x @ w),
        optax.sgd(1.0),
        group=group(REPLICAS),
        hook=hook,
        shard="optimizer",
    )
    state, _ = step(step.init(np.zeros(8, np.float32)), rows)
    total = by * (rows / by).astype(dtype).astype(np.float32).sum(0)
    np.testing.assert_allclose(fddp.whole(state.params), -total / REPLICAS, rtol=1e-5, atol=1e-7)


def test_float16_sums_do_not_overflow_because_they_are_divided_first(group):
    rows = np.full((REPLICAS, 3), 30_000, np.float32)
    assert reduced(group, hooks.fp16(), rows)[0][0].tolist() == [120_000] * 3
    assert reduced(group, hooks.fp16(predivide=1), rows)[0][0].tolist() == [np.inf] * 3


def test_what_has_16_bits_already_travels_in_its_own_dtype(group):
    small = np.full((REPLICAS, 3), 1e-9, jnp.bfloat16)
    large = np.full((REPLICAS, 3), 1 + 2**-10, np.float16)
    for hook in (hooks.bf16(), hooks.fp16()):
        np.testing.assert_array_equal(reduced(group, hook, small)[0][0], (small * REPLICAS)[0])
        np.testing.assert_array_equal(reduced(group, hook, large)[0][0], (large * REPLICAS)[0])


def test_integers_stay_integers(group):
    rows = np.full((REPLICAS, 3), 4097, np.int32)
    for hook in DEFAULTS:
        ((total,), _) = reduced(group, hook, rows)
        assert (total.dtype, total.tolist()) == (np.int32, [4097 * REPLICAS] * 3)


def test_more_bytes_than_are_counted_are_told_as_the_most():
    assert [int(as_uint32(nbytes)) for nbytes in (5, 2**40, jnp.uint32(7))] == [5, 2**32 - 1, 7]


def test_complex_and_whole_numbers_are_not_harmed(group):
    rows = (RNG.integers(-9, 9, (REPLICAS, 5)) + 1j * RNG.integers(-9, 9, (REPLICAS, 5))).astype(
        np.complex64
    )
    for hook in DEFAULTS:
        ((total,), _) = reduced(group, hook, rows)
        np.testing.assert_array_equal(total, rows.sum(0))


def test_eight_bits_are_exact_to_the_rounding_of_each_block(group):
    rows = normal(REPLICAS, 100) * (10.0 ** RNG.integers(-3, 3, (1, 100))).astype(np.float32)
    ((total,), residual) = reduced(group, hooks.quantize(block=10), rows)
    step = (
        np.abs(rows.reshape(REPLICAS, 10, 10)).max(-1, keepdims=True) / 127
    )  # the value of a unit of each block
    rounded = np.round(rows.reshape(REPLICAS, 10, 10) / step) * step
    sums = rounded.sum(0)
    # Each replica remembers what it rounded away, and what it did of the part of the sum that it
    # made.
    lost = rows - rounded.reshape(rows.shape)
    np.testing.assert_allclose(residual["sent"], lost, atol=1e-6 * np.abs(rows).max())
    of_sums = (sums.reshape(-1) - total, 1e-5 * np.abs(rows).max())
    np.testing.assert_allclose(np.sum(residual["summed"], 0), of_sums[0], atol=of_sums[1])
    assert np.sum(residual["summed"] != 0, axis=0).max() <= 1
    # Half a unit of the sum's own block is the second rounding.
    assert np.all(
        np.abs(total.reshape(10, 10) - sums) <= 0.501 * np.abs(sums).max(-1, keepdims=True) / 127
    )


def test_topk_sends_the_largest_numbers_of_each_replica_and_remembers_the_others(group):
    rows = np.zeros((REPLICAS, 8), np.float32)
    rows[0] = [1, -9, 2, 0, 3, 0, 0, 8]
    rows[1, 3] = 5
    rows[2] = 1
    ((total,), residual) = reduced(group, hooks.topk(0.25), rows)
    # Two a replica; of equal numbers the first.
    assert total.tolist() == [1, -8, 0, 5, 0, 0, 0, 8]
    assert np.asarray(residual)[:3].tolist() == [
        [1, 0, 2, 0, 3, 0, 0, 0],
        [0] * 8,
        [0, 0] + [1] * 6,
    ]


@pytest.mark.quick("3", "4")
@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_adasum_adds_pair_by_pair_what_is_not_along_the_other(group, n):
    def pair(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        return a * (1 - np.vdot(a, b) / (2 * np.vdot(a, a))) + b * (
            1 - np.vdot(a, b) / (2 * np.vdot(b, b))
        )

    draw = np.random.default_rng(n)
    rows = {
        name: draw.normal(size=(n, *shape)).astype(np.float32)
        for name, shape in (("w", (5, 3)), ("b", (7,)))
    }
    expected = {}
    for name, row in rows.items():
        vectors = list(row.astype(np.float64))
        while len(vectors) > 1:
            vectors = [
                pair(*two) if len(two) == 2 else two[0]
                for two in (vectors[k : k + 2] for k in range(0, len(vectors), 2))
            ]
        expected[name] = vectors[0]
    # A loss whose gradient is the replica's own row.
    loss = lambda p, x: sum(jnp.sum(p[name] * x[name][0]) for name in p)  # noqa: E731
    step = fddp.train_step(loss, optax.sgd(1.0), group=group(n), hook=hooks.adasum())
    state, _ = step(step.init(jax.tree.map(lambda x: np.zeros(x.shape[1:], x.dtype), rows)), rows)
    jax.tree.map(
        lambda got, expected: np.testing.assert_allclose(-got, expected, rtol=1e-4, atol=1e-6),
        state.params,
        expected,
    )


@pytest.mark.parametrize("size", [1e-6, 1e3])
@pytest.mark.parametrize("narrow", [hooks.fp16, hooks.bf16])
def test_adasum_in_16_bits_takes_its_products_in_32(group, narrow, size):
    rows = np.full((REPLICAS, 5), size, np.float32)
    np.testing.assert_allclose(
        reduced(group, narrow(hooks.adasum()), rows)[0][0] / REPLICAS, rows[0], rtol=1e-5
    )


@pytest.mark.parametrize(
    "hook",
    [hooks.topk(0.25), hooks.quantize(bits=4), hooks.quantize()],
    ids=["topk", "4 bits", "quantize"],
)
def test_what_a_hook_remembers_counts_for_nothing_where_nothing_has_weight(group, hook):
    def loss(w: Any, batch: Any) -> Any:
        return fddp.Weighted(jnp.mean(batch["x"] @ w), jnp.sum(batch["tokens"]))

    step = fddp.train_step(loss, optax.sgd(0.1), group=group(2), hook=hook)
    state = step.init(np.zeros(4, np.float32))
    x = RNG.normal(size=(8, 4)).astype(np.float32)
    for tokens in (500.0, 500.0, 0.0):
        before = np.asarray(state.params)
        state, _ = step(state, {"x": x, "tokens": np.full(8, tokens, np.float32)})
    np.testing.assert_array_equal(state.params, before)


def test_adasum_of_equal_gradients_is_their_mean_and_of_orthogonal_ones_their_sum(group):
    equal_rows = np.stack([np.linspace(-1, 2, 6, dtype=np.float32)] * REPLICAS)
    np.testing.assert_allclose(
        reduced(group, hooks.adasum(), equal_rows)[0][0] / REPLICAS, equal_rows[0], rtol=1e-5
    )
    orthogonal = np.diag([1, 2, 0, 4]).astype(np.float32)  # one replica has nothing to say
    np.testing.assert_allclose(
        reduced(group, hooks.adasum(), orthogonal)[0][0] / REPLICAS, orthogonal.sum(0)
    )


def test_topk_of_float64_loses_no_digit(group, x64):
    rows = np.random.default_rng(1).normal(size=(REPLICAS, 7))
    np.testing.assert_allclose(
        reduced(group, hooks.topk(1.0), rows)[0][0], rows.sum(0), rtol=1e-14, atol=1e-15
    )


@pytest.mark.parametrize(
    "hook",
    [
        hooks.topk(0.1),
        hooks.quantize(bits=4, block=16),
        hooks.powersgd(1, start_step=0),
    ],
    ids=str,
)
def test_with_error_feedback_nothing_is_lost_for_ever(group, hook):
    steps = [normal(REPLICAS, 12, 10) for _ in range(6)]
    totals, memory = reduced(group, hook, *steps)
    residual = memory["error"] if isinstance(memory, dict) and "error" in memory else memory
    residual = sum(np.sum(x, 0) for x in jax.tree.leaves(residual))
    np.testing.assert_allclose(sum(totals) + residual, sum(x.sum(0) for x in steps), atol=4e-5)


def test_powersgd_is_one_step_of_subspace_iteration(group, x64):
    rows = RNG.normal(size=(REPLICAS, 12, 3, 10))
    ((first, second), memory) = reduced(
        group, hooks.powersgd(2, start_step=0, error_feedback=False), rows, rows
    )
    # The same in NumPy: span{M Q}, then the projection on it.
    matrix = rows.sum(0).reshape(36, 10)
    q = np.asarray(jax.random.normal(jax.random.fold_in(jax.random.key(0), 0), (10, 2)))
    for got in (first, second):
        p, _ = np.linalg.qr(matrix @ q)
        q = matrix.T @ p
        np.testing.assert_allclose(got.reshape(36, 10), p @ p.T @ matrix, atol=1e-12)
    assert memory["q"].shape == (REPLICAS, 10, 2)


def test_powersgd_finds_the_singular_vectors_with_a_warm_start_only(group, x64):
    rows = RNG.normal(size=(REPLICAS, 20, 15))
    best = np.linalg.norm(np.linalg.svd(rows.sum(0)).S[2:])
    for warm, error in ((True, 1.01), (False, 1.6)):
        hook = hooks.powersgd(2, start_step=0, warm_start=warm, error_feedback=False)
        totals, _ = reduced(group, hook, *[rows] * 60)
        ratios = [np.linalg.norm(total - rows.sum(0)) / best for total in totals[-5:]]
        assert (max(ratios) < error) if warm else (min(ratios) > 1.05)


def test_powersgd_of_full_rank_is_the_plain_sum(group):
    for shape in ((9, 6), (6, 9), (2, 3, 7)):
        rows = normal(REPLICAS, *shape)
        hook = hooks.powersgd(9, start_step=0, min_compression_rate=0)
        np.testing.assert_allclose(reduced(group, hook, rows)[0][0], rows.sum(0), atol=1e-5)


### In a step

PARAMS = {"a": normal(12, 16), "b": normal(16), "c": normal(16, 8)}
X = normal(32, 12)
OPTIONS: dict[str, Any] = {"bucket_cap_mb": 1e-4, "first_bucket_mb": 1e-4, "last_bucket_mb": 1e-4}


def loss_fn(params: Any, x: Any) -> Any:
    return jnp.mean((jnp.tanh(x @ params["a"] + params["b"]) @ params["c"] - 1) ** 2)


@cache
def trained(
    group: Any, hook: fddp.Hook | None, steps: int = 3, **options: Any
) -> tuple[Any, list[fddp.StepInfo]]:
    step = fddp.train_step(
        loss_fn, optax.sgd(0.1), group=group(REPLICAS), hook=hook, **OPTIONS | options
    )
    state = step.init(PARAMS)
    infos = []
    for k in range(steps):
        if k == 1:
            state, info = step.no_sync(state, X)
            assert np.sum(info.sent) == 0
        state, info = step(state, X)
        infos.append(info)
    return state, infos


@SCHEDULES
def test_the_plain_hook_is_no_hook(group, schedule):
    equal(
        *(trained(group, hook, schedule=schedule)[0].params for hook in (hooks.allreduce(), None))
    )


def test_until_it_starts_powersgd_is_the_plain_sum_bit_for_bit(group):
    plain, never, then = (
        trained(group, hook)[0].params
        for hook in (None, *(hooks.powersgd(1, start_step=k) for k in (3, 2)))
    )
    equal(never, plain)
    assert np.any(then["a"] != never["a"])


def test_noop_sends_nothing_but_the_loss(group):
    _, infos = trained(group, hooks.noop())
    assert infos[-1].sent.tolist() == [0, 0, 0, 12]


def test_a_hook_of_the_users_own_sees_its_leaves_and_keeps_what_it_likes(group):
    def apply(comm: fddp.Communicator, bucket: fddp.GradBucket, state: Any) -> Any:
        shapes.append([leaf.shape for leaf in bucket.leaves])
        return comm.all_reduce(bucket.buffer) / 2, tuple(count + 1 for count in state)

    shapes: list[Any] = []
    halving = fddp.Hook(lambda leaf: jnp.zeros((), jnp.int32), apply, "halving")
    state, _ = trained(group, halving, steps=1)
    plain, _ = trained(group, None, steps=1)
    for name in PARAMS:
        moved = np.asarray(plain.params[name]) - PARAMS[name]
        np.testing.assert_allclose(
            state.params[name], PARAMS[name] + moved / 2, rtol=1e-5, atol=1e-6
        )
        assert state.hook_state[name].tolist() == [1] * REPLICAS
    assert shapes == [[(16, 8)], [(16,)], [(12, 16)]] or shapes == [[(16, 8)], [(16,), (12, 16)]]


def test_a_hook_and_unused_parameters_go_together(group):
    step = fddp.train_step(
        lambda p, x: loss_fn(p["used"], x), optax.adamw(0.1), group=group(REPLICAS),
        hook=hooks.topk(0.5), find_unused_parameters=True,
    )  # fmt: skip
    params = {"used": PARAMS, "unused": np.ones(3, np.float32)}
    state, info = step(step.init(params), X)
    np.testing.assert_array_equal(state.params["unused"], 1)
    assert (int(info.used["unused"]), int(info.used["used"]["a"])) == (0, REPLICAS)


@pytest.mark.parametrize("name", ["quantize", "topk", "powersgd"])
def test_a_step_that_overflows_leaves_no_trace_in_what_a_hook_remembers(group, name):
    optimizer = fddp.dynamic_scale(optax.sgd(0.1), initial=4.0)
    step = fddp.train_step(
        loss_fn, optimizer, group=group(REPLICAS), hook=LOSSY[name], donate=False, **OPTIONS
    )
    before, _ = step(step.init(PARAMS), X)
    bad = X.copy()
    bad[0] = np.inf  # on one replica
    after, _ = step(before, bad)
    assert float(after.opt_state.scale) == 2
    equal((after.params, after.hook_state), (before.params, before.hook_state))


### Non-finite gradients

SIZES: dict[str, tuple[int, ...]] = {"one": (), "few": (37,), "many": (4099,), "matrix": (40, 30)}
PLACES = [
    ("one", ()),
    ("few", (0,)),
    ("few", (36,)),
    ("many", (77,)),
    ("many", (4098,)),
    ("matrix", (39, 29)),
]
FLOATS = [np.float32, np.float64, np.float16, jnp.bfloat16, np.complex64]
FINITE = {
    "none": None,
    "allreduce": hooks.allreduce(),
    "bf16": hooks.bf16(),
    "fp16": hooks.fp16(),
    "quantize": hooks.quantize(),
    "quantize without memory": hooks.quantize(error_feedback=False),
    "topk": hooks.topk(0.01),
    "adasum": hooks.adasum(),
    "topk without memory": hooks.topk(0.01, error_feedback=False),
    "powersgd": hooks.powersgd(2, start_step=0),
    "powersgd without memory": hooks.powersgd(
        2, start_step=0, warm_start=False, error_feedback=False
    ),
    "bf16 powersgd": hooks.bf16(hooks.powersgd(2, start_step=0)),
    "fp16 powersgd": hooks.fp16(hooks.powersgd(2, start_step=0)),
}


def zeros(*dtypes: Any) -> dict[str, np.ndarray]:
    return {
        f"{np.dtype(dtype)} {name}": np.zeros(shape, dtype)
        for dtype in dtypes
        for name, shape in SIZES.items()
    }


def product(params: Any, rows: Any) -> Any:
    """Its gradient is the mean of the rows."""
    return sum(
        jnp.sum(jnp.real(p * rows[name][0]).astype(jnp.float32)) for name, p in params.items()
    )


def pulls(params: Any, *bad: tuple[int, str, tuple[int, ...], float]) -> dict[str, np.ndarray]:
    """A row for each replica, and its values that are not finite: (replica, leaf, place, value)."""
    rng = np.random.default_rng(4)
    rows = {
        name: rng.normal(size=(REPLICAS, *p.shape)).astype(p.dtype) for name, p in params.items()
    }
    for replica, name, place, value in bad:
        rows[name][(replica, *place)] = value
    return rows


def infinite_everywhere(x: jax.Array, place: tuple[int, ...]) -> bool:
    """True if an array, which should be equal on all devices, is not finite on each of them."""
    return not any(np.isfinite(shard.data[place]) for shard in x.addressable_shards)


@pytest.mark.quick("quantize", "fp16")
@pytest.mark.parametrize("hook", tier(FINITE, "none", "fp16", "quantize", "powersgd"))
def test_what_is_not_finite_on_a_replica_is_so_in_the_sum_on_all_and_is_forgotten(group, x64, hook):
    params = zeros(*FLOATS)
    options: Any = {"group": group(REPLICAS), "hook": hook, "donate": False}
    step = fddp.train_step(product, optax.sgd(1.0), **options)
    state, _ = step(step.init(params), pulls(params))
    for k, (leaf, place) in enumerate(PLACES):
        for value in (np.nan, np.inf, -np.inf):
            names = [f"{np.dtype(dtype)} {leaf}" for dtype in FLOATS]
            after, _ = step(
                state, pulls(params, *((k % REPLICAS, name, place, value) for name in names))
            )
            assert [
                name for name in names if not infinite_everywhere(after.params[name], place)
            ] == [], value
            equal(after.hook_state, state.hook_state)
    both = pulls(params, (0, "float32 many", (9,), np.inf), (1, "float32 many", (9,), -np.inf))
    assert infinite_everywhere(step(state, both)[0].params["float32 many"], (9,))


def test_low_rank_factors_that_overflow_are_not_zeros(group):
    rows = np.full((REPLICAS, 40, 30), 1e30, np.float32)  # squares of it are infinite
    totals, _ = reduced(group, hooks.powersgd(1, start_step=0), rows)
    assert not np.any(np.isfinite(totals[0]))


def test_what_is_left_of_16_bits_is_finite_where_the_sum_is(group):
    rows = np.zeros((REPLICAS, 4), np.float16)
    # The codes of the first number and of its rounded sum are too large for float16.
    rows[:2] = [[65504, 6632, 55232, -21408], [-1841, 34560, 6716, -42752]]
    totals, residual = reduced(group, hooks.quantize(block=4), rows)
    assert np.all(np.isfinite(totals[0])) and all(
        np.all(np.isfinite(x)) for x in jax.tree.leaves(residual)
    )


@SCHEDULES
@pytest.mark.parametrize(
    "name",
    [
        "quantize",
        *(pytest.param(x, marks=pytest.mark.slow) for x in ("topk", "powersgd")),
    ],
)
def test_a_step_in_which_anything_overflows_leaves_no_trace_in_any_bucket(group, name, schedule):
    options: Any = {"hook": FINITE[name], "schedule": schedule, "donate": False, "bucket_cap_mb": 0}
    optimizer = fddp.dynamic_scale(optax.adam(0.1), initial=4.0)
    step = fddp.train_step(product, optimizer, group=group(REPLICAS), **options)
    params = zeros(np.float32)
    before, _ = step(step.init(params), pulls(params))
    after = before
    for leaf, place in PLACES:
        after, _ = step(before, pulls(params, (2, f"float32 {leaf}", place, np.nan)))
        assert float(after.opt_state.scale) == 2
        same = lambda state: (state.params, state.opt_state.inner, state.hook_state)  # noqa: E731
        equal(same(after), same(before))
    on, _ = step(after, pulls(params))
    assert float(on.opt_state.scale) == 2 and int(on.opt_state.inner[0].count) == 2
    assert all(np.all(np.isfinite(x)) for x in jax.tree.leaves((on.params, on.hook_state)))


### Bytes

WORD = {"f32": 4, "u16": 2, "s32": 4, "u8": 1}


def traffic(text: str) -> int:
    """Bytes that each replica sends in a compiled program, by its collectives' operands."""
    total = 0
    for result, kind in re.findall(r"= (\(.*?\)|\S+) (all-reduce|all-gather|all-to-all)\(", text):
        shapes = re.findall(r"(f32|u16|s32|u8)\[([\d,]*)\]", result)
        nbytes = sum(
            WORD[dtype] * int(np.prod([int(n) for n in dims.split(",") if n]))
            for dtype, dims in shapes
        )
        # An all-gather's result holds all replicas' parts, including its own.
        times = {
            "all-reduce": 2 * (REPLICAS - 1),
            "all-gather": REPLICAS - 1,
            "all-to-all": REPLICAS - 1,
        }[kind]
        total += nbytes * times // REPLICAS
    return total


@pytest.mark.parametrize("name", [None, "bf16", "fp16", "quantize", "topk"])
def test_the_bytes_that_are_told_are_those_in_the_compiled_program(group, name):
    step = fddp.train_step(
        loss_fn, optax.sgd(0.1), group=group(REPLICAS), hook=LOSSY.get(name or ""), **OPTIONS
    )
    state = step.init(PARAMS)
    text = step.lower(state, X).compile().as_text() or ""
    _, info = step(state, X)
    assert int(info.sent.sum()) == traffic(text) > 0


def test_hooks_send_what_they_promise(group):
    def buckets(hook: fddp.Hook) -> int:
        step = fddp.train_step(loss_fn, optax.sgd(0.1), group=group(REPLICAS), hook=hook, **OPTIONS)
        state, _ = step(step.init(PARAMS), X)
        _, info = step(state, X)
        return sum(info.sent.tolist()[:3])

    plain = sum(x.size for x in PARAMS.values()) * 4 * 2 * (REPLICAS - 1) // REPLICAS
    assert buckets(hooks.allreduce()) == plain
    assert buckets(hooks.bf16()) == plain // 2
    assert (
        buckets(hooks.quantize(block=16)) <= plain * (1 / 4 + 1 / 16) * 1.15
    )  # and zeros at the end of a bucket
    # a and c as factors, b as it is.
    low = (12 + 16 + 16 + 16 + 8) * 4 * 2 * (REPLICAS - 1) // REPLICAS
    assert buckets(LOSSY["powersgd"]) == low
    assert buckets(LOSSY["bf16 powersgd"]) == low // 2


def test_a_hook_that_starts_later_tells_the_bytes_of_each_step(group):
    _, infos = trained(group, LOSSY["powersgd"])
    first, then, last = (int(info.sent.sum()) for info in infos)
    assert first > 3 * then and then == last


### State and errors


def test_what_a_hook_remembers_is_each_replicas_own(group):
    state, _ = trained(group, hooks.topk(0.1))
    for residual in jax.tree.leaves(state.hook_state):
        assert (
            len(residual) == REPLICAS
            and len(np.unique(residual.reshape(REPLICAS, -1), axis=0)) == REPLICAS
        )


def test_a_state_without_the_hooks_memory_or_of_other_replicas_is_refused(group):
    make = lambda n, hook: fddp.train_step(loss_fn, optax.sgd(0.1), group=group(n), hook=hook)  # noqa: E731
    plain = make(4, None)
    four = make(4, hooks.topk(0.1))
    two = make(2, hooks.topk(0.1))
    with pytest.raises(
        ValueError, match=r"hook_state is not that of Hook\(topk.* nothing instead of"
    ):
        four(plain.init(PARAMS), X)
    with pytest.raises(
        ValueError, match=r"on 2 replicas: it has .*float32\[4, 12, 16\].* instead of"
    ):
        two(four.init(PARAMS), X)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: hooks.fp16(predivide=0), "predivide must be more than 0, got 0"),
        (lambda: hooks.quantize(block=0), "block must be a whole number of 1 or more, got 0"),
        (lambda: hooks.topk(0), "ratio must be above 0 and at most 1, got 0"),
        (lambda: hooks.powersgd(0), "rank must be a whole number of 1 or more, got 0"),
        (
            lambda: hooks.powersgd(min_compression_rate=-1),
            "min_compression_rate must be 0 or more, got -1",
        ),
        (
            lambda: hooks.powersgd(start_step=-1),
            "start_step must be a whole number of 0 or more, got -1",
        ),
    ],
)
def test_a_hook_out_of_its_range_is_refused_where_it_is_made(make: Callable[[], Any], message):
    with pytest.raises(ValueError, match=message):
        make()


def test_a_number_may_be_a_numpy_scalar():
    half: Any = np.float32(0.5)
    assert hooks.topk(half).name == hooks.topk(0.5).name
    with pytest.raises(TypeError, match="ratio must be a number, got True"):
        hooks.topk(True)


def test_what_is_no_hook_or_needs_a_state_is_refused(group):
    with pytest.raises(
        TypeError, match=r"hook must be a fddp.Hook, such as one of fddp.hooks, got str"
    ):
        fddp.train_step(loss_fn, optax.sgd(0.1), group=group(1), hook="bf16")  # pyright: ignore[reportArgumentType]
    sum_alone: Any = lambda comm, bucket, memory: bucket.buffer  # noqa: E731
    hook = fddp.Hook(lambda leaf: (), sum_alone)
    f = fddp.value_and_grad(loss_fn, group=group(2), hook=hook)
    with pytest.raises(TypeError, match=r"apply must return \(sum, memory\), got "):
        f(PARAMS, X)
    f = fddp.value_and_grad(loss_fn, group=group(2), hook=hooks.topk(0.1))
    with pytest.raises(ValueError, match=r"topk.* has a memory from step to step"):
        f(PARAMS, X)
    with pytest.raises(ValueError, match=r"topk.* has a memory from step to step"):
        fddp.all_reduce(PARAMS, fddp.make_plan(PARAMS), group=group(2), hook=hooks.topk(0.1))


def test_all_reduce_takes_a_hook_without_a_memory(group):
    four = group(REPLICAS)
    plan = fddp.make_plan(PARAMS)
    summed = lambda tree: fddp.all_reduce(tree, plan, group=four, hook=hooks.bf16(), op="mean")  # noqa: E731
    got = four.placement.program(summed, (PartitionSpec(),), PartitionSpec())(PARAMS)
    for name, x in PARAMS.items():
        np.testing.assert_allclose(got[name], x, rtol=2**-7)
