"""Parameters of any float or complex dtype and of any size are averaged over replicas as they are.

PyTorch's test_fp16, test_ddp_complex_params and test_ddp_zero_output_features, and trees of several
dtypes. How dtypes lie in buckets is tested in `test_packing.py`, that losses of 16 bits are
averaged in 32 in `test_step.py`.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from every_schedule import SCHEDULES

import fddp
from fddp import hooks

REPLICAS = 4
RNG = np.random.default_rng(6)
X = RNG.normal(size=(16, 3))
HALVES = pytest.mark.parametrize(
    "dtype", [jnp.bfloat16, jnp.float16], ids=lambda dtype: dtype.__name__
)


def double(x: Any) -> np.ndarray:
    return np.asarray(x).astype(np.complex128 if jnp.iscomplexobj(x) else np.float64)


def mean_of_parts(loss: Callable[[Any, Any], Any], params: Any, x: Any) -> Any:
    """The gradients of each replica's rows by plain JAX, averaged in double precision."""
    gradient = jax.jit(jax.grad(loss))
    grads = [jax.tree.map(double, gradient(params, part)) for part in np.split(x, REPLICAS)]
    return jax.tree.map(lambda *replica_grads: sum(replica_grads) / REPLICAS, *grads)


def close(got: Any, expected: Any, form: Any, ulps: float = 4) -> None:
    """Equal within so many units in the last place of each leaf's largest element, in the dtypes of
    `form`."""
    assert jax.tree.map(lambda x: (x.shape, x.dtype), got) == jax.tree.map(
        lambda x: (x.shape, x.dtype), form
    )

    def leaf(got: Any, expected: Any) -> None:
        if got.size:
            error = np.max(np.abs(double(got) - double(expected)))
            assert error <= ulps * float(jnp.finfo(got.dtype).eps) * np.max(
                np.abs(double(expected))
            )

    jax.tree.map(leaf, got, expected)


### 16 bits


@SCHEDULES
@HALVES
def test_means_of_16_bits_are_exact_where_16_bits_are(group, schedule, dtype):
    params = {"w": jnp.ones(2, dtype), "v": jnp.zeros((), dtype)}
    x = jnp.asarray(np.repeat([1, 2, 4, 8], 2), dtype)
    f = fddp.value_and_grad(
        lambda p, x: jnp.mean(x) * (p["w"][0] + 3 * p["v"]),
        group=group(REPLICAS),
        schedule=schedule,
        bucket_cap_mb=0,
    )
    loss, grads = f(params, x)
    assert {name: (g.dtype, g.tolist()) for name, g in grads.items()} == {
        "w": (dtype, [3.75, 0]),
        "v": (dtype, 11.25),
    }
    assert (loss.dtype, float(loss)) == (jnp.float32, 3.75)


@pytest.mark.steps
@HALVES
@pytest.mark.parametrize("weight", [40_000.0, 257.0, 1.0])
def test_a_weight_may_be_more_than_16_bits_hold(group, dtype, weight):
    def loss(w: Any, x: Any) -> Any:
        return fddp.Weighted(jnp.mean(w.astype(jnp.float32) * x), weight)

    f = fddp.value_and_grad(loss, group=group(REPLICAS))
    _, grad = f(np.ones((), dtype), np.full(REPLICAS, 2.0**-10, np.float32))
    assert grad.dtype == dtype and float(grad) == pytest.approx(
        2.0**-10, rel=REPLICAS * float(jnp.finfo(dtype).eps)
    )


def test_a_weight_of_less_than_1_divides_before_the_sum_which_would_overflow(group):
    def f(weight: float) -> Any:
        loss = lambda w, x: fddp.Weighted(jnp.mean(w.astype(jnp.float32) * x), weight)  # noqa: E731
        return fddp.value_and_grad(loss, group=group(REPLICAS))(
            np.ones((), np.float16), np.full(REPLICAS, 30_000.0)
        )

    assert float(f(1)[1]) == np.inf
    assert [float(x) for x in f(1 / REPLICAS)] == [30_000, 30_000]


@SCHEDULES
@HALVES
def test_parameters_of_16_bits_are_trained(group, schedule, dtype):
    def loss(params: Any, x: Any) -> jax.Array:
        return jnp.mean((jnp.tanh(x.astype(dtype) @ params["w"]) @ params["head"] - 1) ** 2)

    params = {
        "w": jnp.asarray(RNG.normal(size=(3, 8)), dtype),
        "head": jnp.asarray(RNG.normal(size=8), dtype),
    }
    step = fddp.train_step(
        loss, optax.sgd(1.0), group=group(REPLICAS), schedule=schedule, bucket_cap_mb=0
    )
    state, info = step(step.init(params), X.astype(np.float32))
    assert [bucket.dtype for bucket in step.plan.buckets] == [dtype] * 2
    moved = jax.tree.map(
        lambda p, g: double(p) - g, params, mean_of_parts(loss, params, X.astype(np.float32))
    )
    close(state.params, moved, params)
    assert info.loss.dtype == jnp.float32


@SCHEDULES
def test_a_loss_in_bfloat16_trains_float32_masters_with_float32_sums(group, schedule):
    def loss(params: Any, x: Any) -> jax.Array:
        half = jax.tree.map(lambda p: p.astype(jnp.bfloat16), params)
        y = jnp.tanh(x.astype(jnp.bfloat16) @ half["w"]) @ half["head"]
        assert y.dtype == jnp.bfloat16
        return jnp.mean((y.astype(jnp.float32) - 1) ** 2)

    params = {"w": np.float32(RNG.normal(size=(3, 8))), "head": np.float32(RNG.normal(size=8))}
    x = np.float32(X)
    step = fddp.train_step(
        loss, optax.sgd(1e-3), group=group(REPLICAS), schedule=schedule, bucket_cap_mb=0
    )
    state, _ = step(step.init(params), x)
    assert [bucket.dtype for bucket in step.plan.buckets] == [np.float32] * 2
    f = fddp.value_and_grad(loss, group=group(REPLICAS), schedule=schedule, bucket_cap_mb=0)
    _, grads = f(params, x)
    expected = mean_of_parts(loss, params, x)
    close(grads, expected, params)
    close(state.params, jax.tree.map(lambda p, g: p - 1e-3 * g, params, expected), params)
    # Sums in bfloat16 would have lost these.
    assert all(np.any(double(g) != double(g.astype(jnp.bfloat16))) for g in grads.values())


### Complex numbers


def spectrum(params: Any, x: Any) -> jax.Array:
    """A filter in the frequency domain."""
    y = jnp.fft.ifft(jnp.fft.fft(x) * params["filter"]) + params["shift"]
    return jnp.mean(jnp.abs(y - x[:, ::-1]) ** 2)


@pytest.mark.steps
@SCHEDULES
@pytest.mark.parametrize("dtype", [np.complex64, np.complex128])
def test_complex_parameters_are_trained_as_on_one_replica(group, x64, schedule, dtype):
    numbers = RNG.normal(size=(2, 4))
    params: Any = {
        "filter": (numbers[0, :3] + 1j * numbers[1, :3]).astype(dtype),
        "shift": dtype(numbers[0, 3]),
    }
    x = X.astype(params["shift"].real.dtype)
    step = fddp.train_step(
        spectrum, optax.sgd(0.1), group=group(REPLICAS), schedule=schedule, bucket_cap_mb=0
    )
    state = step.init(params)
    gradient = jax.jit(jax.value_and_grad(spectrum))
    expected = params
    for _ in range(3):
        state, info = step(state, x)
        loss, grads = gradient(expected, x)
        expected = jax.tree.map(lambda p, g: p - (0.1 * g).astype(dtype), expected, grads)
        close((state.params, info.loss), (expected, loss), (params, x[0, 0]), ulps=16)
    assert np.min(np.abs(np.imag(state.params["filter"]) - np.imag(params["filter"]))) > 1e-3


### Parameters of size zero


@pytest.mark.steps
@SCHEDULES
@pytest.mark.parametrize("cap", [0, 25])
@pytest.mark.parametrize("where", ["first", "last", "alone"])
def test_an_empty_parameter_is_trained_like_any_other(group, schedule, cap, where):
    """A layer without outputs is ready first, last, or alone."""
    empty = np.zeros((3, 0), np.float32)
    full = np.ones(3, np.float32)
    params = {"empty": empty} if where == "alone" else {"empty": empty, "full": full}

    def loss(params: Any, x: Any) -> jax.Array:
        if where == "first":
            x = x * params["full"]
            return jnp.sum(x @ params["empty"]) + jnp.mean(x)
        nothing = jnp.sum(x @ params["empty"])
        return nothing + jnp.mean((x + nothing) * params.get("full", 1.0))

    options: Any = {
        "group": group(REPLICAS),
        "schedule": schedule,
        "bucket_cap_mb": cap,
        "accumulation_steps": 2,
    }
    x = np.arange(24, dtype=np.float32).reshape(8, 3)
    step = fddp.train_step(loss, optax.adam(0.5), **options)
    state, info = step(step.init(params), x)
    assert (state.params["empty"].shape, state.params["empty"].dtype) == ((3, 0), jnp.float32)
    np.testing.assert_allclose(info.loss, np.mean(x), rtol=1e-6)
    if where != "alone":
        np.testing.assert_allclose(
            state.params["full"], 0.5 * full, rtol=1e-5
        )  # Adam's first step is its rate


@pytest.mark.steps
@SCHEDULES
@pytest.mark.parametrize(
    "hook",
    [
        None,
        hooks.quantize(),
        hooks.topk(1.0),
        hooks.bf16(hooks.powersgd(start_step=1)),
        hooks.fp16(),
    ],
    ids=str,
)
def test_empty_parameters_go_with_hooks_and_repeated_no_sync_on_several_devices(
    group, schedule, hook
):
    params: Any = {
        "w": np.ones(3, np.float32),
        "rows": np.zeros((0, 3), np.float32),
        "half": np.zeros((4, 0), jnp.bfloat16),
    }
    options: Any = {"group": group(REPLICAS), "schedule": schedule, "hook": hook}

    def loss(params: Any, x: Any) -> jax.Array:
        return (
            jnp.mean(x @ params["w"])
            + jnp.sum(params["rows"] @ x.T)
            + jnp.sum(params["half"].astype(jnp.float32))
        )

    step = fddp.train_step(loss, optax.sgd(0.5, momentum=0.9), **options)
    state = step.init(params)
    for _ in range(2):
        for _ in range(2):
            state, _ = step.no_sync(state, np.ones((8, 3), np.float32))
        state, _ = step(state, np.ones((8, 3), np.float32))
    assert {name: (x.shape, x.dtype) for name, x in state.params.items()} == {
        name: (x.shape, x.dtype) for name, x in params.items()
    }
    np.testing.assert_allclose(state.params["w"], 1 - 0.5 * (1 + 1.9), rtol=1e-2)
    assert [bucket.names for bucket in step.plan.buckets] == [("w",)]


### Several dtypes

DTYPES = [jnp.bfloat16, jnp.float16, jnp.float32, jnp.float64, jnp.complex64, jnp.complex128]


@pytest.mark.steps
@SCHEDULES
@pytest.mark.parametrize("cap", [0, 25])
def test_a_tree_of_all_dtypes_keeps_them_and_averages_each_as_precisely_as_it_can(
    group, x64, schedule, cap
):
    params = {
        f"{dtype.__name__}{k}": jnp.asarray(RNG.normal(size=3), dtype)
        for dtype in DTYPES
        for k in range(2)
    } | {"count": jnp.int32(3)}

    def loss(params: Any, x: Any) -> jax.Array:
        terms = [
            jnp.mean(jnp.abs(x.astype(p.dtype) * p - 1) ** 2)
            for name, p in params.items()
            if name != "count"
        ]
        return sum(part.astype(np.float64) for part in terms) * params["count"]

    f = fddp.value_and_grad(loss, group=group(REPLICAS), schedule=schedule, bucket_cap_mb=cap)
    value, grads = f(params, X)
    floats = {name: p for name, p in params.items() if name != "count"}
    assert int(grads.pop("count")) == 0
    close(
        grads,
        mean_of_parts(lambda p, x: loss(p | {"count": params["count"]}, x), floats, X),
        floats,
    )
    assert value.dtype == np.float64


@SCHEDULES
def test_a_bucket_has_one_dtype_however_leaves_alternate(group, schedule):
    params = {
        f"p{k}": jnp.ones(4, dtype) for k, dtype in enumerate(4 * [jnp.bfloat16, jnp.float32])
    }

    def loss(params: Any, x: Any) -> jax.Array:
        return jnp.mean(x * sum(p.astype(jnp.float32) for p in params.values()))

    step = fddp.train_step(loss, optax.sgd(4.0), group=group(REPLICAS), schedule=schedule)
    state, _ = step(step.init(params), np.ones((8, 4), np.float32))
    assert sorted(str(bucket.dtype) for bucket in step.plan.buckets) == ["bfloat16", "float32"]
    assert {name: (p.dtype, p.tolist()) for name, p in state.params.items()} == {
        name: (p.dtype, [0.0] * 4) for name, p in params.items()
    }


@pytest.mark.steps
@pytest.mark.parametrize("schedule", ["overlap", "after"])
def test_64_bits_inside_a_loss_are_right(group: Callable[[int], fddp.Group], schedule: Any):
    def loss(params: Any, x: Any) -> jax.Array:
        with jax.enable_x64(True):
            square = (params["a"] + 2 * jnp.eye(4)).astype(jnp.float64)
            solved = jnp.linalg.solve(square, params["b"].astype(jnp.float64))
            solved = solved.astype(jnp.float32)
        return jnp.mean((x @ solved) ** 2)

    params = {"a": np.eye(4, dtype=np.float32), "b": np.ones((4, 2), np.float32)}
    x = np.arange(32, dtype=np.float32).reshape(8, 4) / 32
    step = fddp.train_step(loss, optax.sgd(0.1), group=group(2), schedule=schedule)
    state = step.init(params)
    _, info = step(state, x)
    np.testing.assert_allclose(info.loss, jnp.mean((x.sum(1) / 3) ** 2), rtol=1e-6)
