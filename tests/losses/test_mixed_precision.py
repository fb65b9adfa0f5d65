"""Losses compute in 16 bits, and parameters, moments and gradients keep their 32.

PyTorch's `mixed_precision=` of DDP. Plain JAX with casts written by hand, on each replica's rows,
is the truth. Scales for float16 are in `test_loss_scale.py`.
"""

from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from every_schedule import SCHEDULES
from problems import rows, two_layers
from truth import by_plain_jax

import fddp

pytestmark = pytest.mark.steps

REPLICAS = 4
RNG = np.random.default_rng(8)
PARAMS = {"w": np.float32(RNG.normal(size=(3, 8))), "head": np.float32(RNG.normal(size=8))}
X = RNG.normal(size=(16, 3)).astype(np.float32)
HALVES = pytest.mark.parametrize(
    "dtype", [jnp.bfloat16, jnp.float16], ids=lambda dtype: dtype.__name__
)


def cast(params: Any, x: Any, dtype: Any = jnp.bfloat16) -> jax.Array:
    half = {"w": params["w"].astype(dtype), "head": params["head"].astype(dtype)}
    return two_layers(half, x.astype(dtype)).astype(jnp.float32)


def by_hand(dtype: Any, count: int = REPLICAS) -> tuple[Any, Any]:
    """Loss and gradients of casts written by hand, averaged over replicas in float64."""
    gradient = jax.jit(jax.value_and_grad(partial(cast, dtype=dtype)))
    grads = [gradient(PARAMS, part) for part in np.split(X, count)]
    return jax.tree.map(lambda *x: np.mean(np.asarray(x, np.float64), axis=0), *grads)


def close(got: Any, expected: Any, rtol: float = 1e-6) -> None:
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol * np.max(np.abs(b))),
        got,
        expected,
    )


def dtypes(tree: Any) -> set[str]:
    return {str(x.dtype) for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.inexact)}


@pytest.mark.quick("float16-overlap")
@SCHEDULES
@HALVES
def test_gradients_are_those_of_16_bits_summed_in_32(group, schedule, dtype):
    options: Any = {"group": group(REPLICAS), "schedule": schedule, "bucket_cap_mb": 0}
    loss, grads = fddp.value_and_grad(fddp.mixed_precision(two_layers, dtype), **options)(PARAMS, X)
    close((loss, grads), by_hand(dtype))
    assert dtypes((loss, grads)) == {"float32"}
    # The joined batch on one replica, as far as 16 bits tell.
    close(grads, by_hand(dtype, count=1)[1], rtol=4 * float(jnp.finfo(dtype).eps))
    # Sums in 16 bits would have lost these, and without a cast they would be others.
    assert all(np.any(g != g.astype(dtype)) for g in grads.values())
    exact = jax.grad(two_layers)(PARAMS, X)
    assert np.max(np.abs(grads["w"] - exact["w"])) > 1e-5


@SCHEDULES
def test_parameters_and_moments_stay_in_32_bits(group, schedule):
    step = fddp.train_step(
        fddp.mixed_precision(two_layers), optax.adam(0.1), group=group(REPLICAS), schedule=schedule
    )
    expected = by_plain_jax(cast, optax.adam(0.1), PARAMS, [X] * 3, parts=REPLICAS)
    state = step.init(PARAMS)
    for loss in expected.losses:
        state, info = step(state, X)
        close(info.loss, loss)
    # Of the 2nd moments Adam takes the root.
    close(state.params, expected.params, rtol=1e-4)
    assert dtypes(state) == {"float32"}


def test_float64_stays_out(group, x64):
    step = fddp.train_step(fddp.mixed_precision(two_layers), optax.adam(0.1), group=group(REPLICAS))
    state, info = step(step.init(PARAMS), X)
    assert dtypes((state, info)) == {"float32"}
    assert dtypes(
        fddp.mixed_precision(two_layers)(jax.tree.map(np.float64, PARAMS), np.float64(X))
    ) == {"float32"}


def test_a_loss_sees_16_bits_where_it_had_floats_and_nothing_else_changes(group):
    dtype_of: dict[str, str] = {}

    def loss(params: Any, batch: Any, *, model_state: Any, rng: Any) -> Any:
        for name, x in {**params, **batch, **model_state}.items():
            dtype_of[name] = str(x.dtype)
        dtype_of["rng"] = str(rng.dtype)
        value = jnp.mean(batch["x"] * params["w"][batch["label"]])
        buffers = {
            "mean": model_state["mean"] + value,
            "half": model_state["half"] + 1,
            "count": model_state["count"],
        }
        buffers["mean"] = buffers["mean"].astype(jnp.bfloat16)  # as a careless module returns it
        weight = jnp.sum(batch["mask"])
        return fddp.Weighted(value, weight), (
            buffers,
            {"value": value, "noise": jax.random.uniform(rng)},
        )

    params = {"w": np.ones(4, np.float32), "double": np.ones(2, np.float32), "number": np.int32(3)}
    model_state = {"mean": np.float32(0), "half": jnp.bfloat16(0), "count": np.int32(2**24 + 1)}
    batch = {"x": np.ones(8, np.float32), "label": np.zeros(8, np.int32), "mask": np.ones(8, bool)}
    step = fddp.train_step(fddp.mixed_precision(loss), optax.sgd(1.0), group=group(2))
    state, info = step(step.init(params, model_state=model_state, rng=jax.random.key(0)), batch)
    halves = {name for name, dtype in dtype_of.items() if dtype == "bfloat16"}
    assert halves == {"w", "double", "x", "half"}
    assert (dtype_of["mean"], dtype_of["count"], dtype_of["mask"], dtype_of["label"]) == (
        "float32",
        "int32",
        "bool",
        "int32",
    )
    assert {name: str(x.dtype) for name, x in state.model_state.items()} == {
        "mean": "float32",
        "half": "bfloat16",
        "count": "int32",
    }
    assert dtypes(info) == {"float32"}
    assert state.params["w"].tolist() == [0, 1, 1, 1]
    assert int(state.model_state["count"]) == 2**24 + 1


def test_weights_and_metrics_are_summed_in_32_bits(group):
    """bfloat16 has no 1 + 2⁻⁹, but it may have a mean of two replicas."""
    loss = lambda w, x: (fddp.Weighted(jnp.mean(w * x), 256 * x[0]), {"x": x[0]})  # noqa: E731
    f = fddp.value_and_grad(fddp.mixed_precision(loss), group=group(2), has_aux=True)
    # Weights of 256 and 512: a sum of 768.
    (value, aux), grad = f(jnp.float32(1), rows(1, 2))
    expected = (256 * 1 + 512 * 2) / 768
    np.testing.assert_allclose([value, aux["x"], grad], expected, rtol=1e-6)


def test_batchnorms_statistics_stay_exact(group):
    """Flax's BatchNorm computes and stores its statistics in float32 for any dtype of its
    inputs."""

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            return nn.Dense(1)(nn.BatchNorm(use_running_average=False, momentum=0.0)(x))

    linen = fddp.from_linen(Net(), lambda model, x: jnp.mean(model(x) ** 2))
    params, model_state = linen.init(jax.random.key(0), X)
    step = fddp.train_step(fddp.mixed_precision(linen.loss_fn), optax.sgd(0.1), group=group(1))
    state, _ = step(step.init(params, model_state=model_state), X)
    expected = np.float64(jnp.asarray(X).astype(jnp.bfloat16)).mean(0)
    np.testing.assert_allclose(
        state.model_state["batch_stats"]["BatchNorm_0"]["mean"], expected, rtol=1e-5
    )
    assert dtypes(state) == {"float32"}


def test_a_wrong_loss_is_refused_in_the_words_of_the_step(group):
    half = fddp.mixed_precision(lambda params, x, model_state: (jnp.mean(x), ({}, None)))
    step = fddp.train_step(half, optax.sgd(1.0), group=group(1))
    with pytest.raises(ValueError, match="model_state of the structure it was given"):
        step(step.init(PARAMS, model_state={"mean": np.zeros(2)}), X)


def test_what_cannot_be_cast_is_refused():
    with pytest.raises(ValueError, match="dtype must be a float dtype, got int8"):
        fddp.mixed_precision(two_layers, jnp.int8)
    with pytest.raises(TypeError, match="loss_fn must be a function, got int"):
        fddp.mixed_precision(3)  # pyright: ignore[reportArgumentType]
