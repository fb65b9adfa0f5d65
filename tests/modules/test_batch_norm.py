"""BatchNorm over replicas is BatchNorm over all rows that count, wherever they lie.

The truth is plain BatchNorm, written out in float64, over the joined rows without the padding;
forward, gradients, running averages. Without mask and replicas the truth is Flax's own.
"""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from trees import close

import fddp

RNG = np.random.default_rng(2)
ROWS = 16
FEATURES = 3
X = RNG.normal(loc=[0, 1, 30], size=(ROWS, 4, FEATURES))
Y = RNG.normal(size=(ROWS, 4, FEATURES))
# So many rows count on eight replicas: 2, 1, none, 2, 2, 1, none, 2; on fewer they are as unequal.
VALID = np.array([1, 1, 1, 0, 0, 0, 1, 1, 1, 1, 0, 1, 0, 0, 1, 1], bool)
BATCH = {"x": np.where(VALID[:, None, None], X, np.nan), "y": Y, "valid": VALID}
MOMENTUM = 0.9
EPSILON = 1e-5


class Net(nn.Module):
    """A layer before BatchNorm and one after it, so that gradients pass through."""

    axis_name: str | None = None

    @nn.compact
    def __call__(self, x: Any, mask: Any) -> Any:
        w = self.param("w", lambda _: 1 + 0.1 * jnp.arange(FEATURES, dtype=jnp.float64))
        norm = fddp.BatchNorm(
            False, momentum=MOMENTUM, axis_name=self.axis_name, param_dtype=jnp.float64, name="norm"
        )
        return jnp.tanh(norm(jnp.where(mask, x, 0) * w, mask=mask)) + w


def loss(axis_name: str | None) -> Any:
    """The mean over the rows that count, weighted by their number."""

    def loss_fn(params: Any, batch: Any, *, model_state: Any) -> Any:
        count = jnp.sum(batch["valid"])
        variables = {"params": params, **model_state}
        mask = batch["valid"][:, None, None]
        out, state = Net(axis_name).apply(variables, batch["x"], mask, mutable=["batch_stats"])
        errors = jnp.mean((out - batch["y"]) ** 2, axis=(1, 2))
        mean = jnp.sum(jnp.where(batch["valid"], errors, 0)) / jnp.maximum(count, 1)
        return fddp.Weighted(mean, count), (state, None)

    return loss_fn


PARAMS = {
    "w": 1 + 0.1 * np.arange(FEATURES),
    "norm": {"scale": np.array([1.0, 0.5, 2.0]), "bias": np.array([0.1, -0.2, 0.3])},
}
STATE = {
    "batch_stats": {"norm": {"mean": np.array([0.0, 5.0, 1.0]), "var": np.array([1.0, 2.0, 3.0])}}
}


def truth(params: Any, state: Any, valid: np.ndarray) -> tuple[Any, Any]:
    """Plain BatchNorm of the rows that count, and the running averages after it."""
    x = X[valid] * params["w"]
    norm = params["norm"]
    old = state["batch_stats"]["norm"]
    mean = jnp.mean(x, axis=(0, 1))
    var = jnp.var(x, axis=(0, 1))
    out = (
        jnp.tanh((x - mean) / jnp.sqrt(var + EPSILON) * norm["scale"] + norm["bias"]) + params["w"]
    )
    new = {
        "mean": MOMENTUM * old["mean"] + (1 - MOMENTUM) * mean,
        "var": MOMENTUM * old["var"] + (1 - MOMENTUM) * var,
    }
    return jnp.mean((out - Y[valid]) ** 2), {"batch_stats": {"norm": new}}


@pytest.mark.quick("8-overlap")
@pytest.mark.steps
@pytest.mark.parametrize(
    ("replicas", "schedule"),
    [
        (1, "overlap"),
        (2, "overlap"),
        (4, "overlap"),
        (8, "overlap"),
        (2, "after"),
    ],
)
def test_unequal_counts_give_the_batchnorm_of_all_rows_that_count(group, x64, replicas, schedule):
    f = fddp.value_and_grad(
        loss("replica"), group=group(replicas), schedule=schedule, bucket_cap_mb=0
    )
    (value, (state, _)), grads = f(PARAMS, BATCH, model_state=STATE)
    (expected, averages), gradients = jax.value_and_grad(truth, has_aux=True)(PARAMS, STATE, VALID)
    np.testing.assert_allclose(value, expected, rtol=1e-12)
    close(grads, gradients)
    close(state, averages, 1e-12)


@pytest.mark.steps
def test_micro_batches_are_normalized_each_over_all_replicas(group, x64):
    step = fddp.train_step(loss("replica"), optax.sgd(1.0), group=group(2), accumulation_steps=2)
    state, info = step(step.init(PARAMS, model_state=STATE), BATCH)
    # Replica r has rows 8r … 8r + 7, its first micro-batch the first four of them.
    first = np.isin(np.arange(ROWS) % 8, range(4))
    micro_batches = [VALID & first, VALID & ~first]

    def joined(params: Any) -> tuple[Any, Any]:
        total = 0.0
        averages = STATE
        for valid in micro_batches:
            value, averages = truth(params, averages, valid)
            total += valid.sum() * value
        return total / VALID.sum(), averages

    (expected, averages), gradients = jax.value_and_grad(joined, has_aux=True)(PARAMS)
    np.testing.assert_allclose(info.loss, expected, rtol=1e-12)
    close(state.params, jax.tree.map(lambda p, g: p - g, PARAMS, gradients))
    close(state.model_state, averages, 1e-12)


def test_where_nothing_counts_anywhere_nothing_moves(group, x64):
    step = fddp.train_step(loss("replica"), optax.sgd(1.0), group=group(4))
    state, info = step(
        step.init(PARAMS, model_state=STATE), {**BATCH, "valid": np.zeros(ROWS, bool)}
    )
    assert float(info.loss) == 0
    jax.tree.map(np.testing.assert_array_equal, (state.params, state.model_state), (PARAMS, STATE))


def test_a_mean_far_from_zero_costs_no_digits(group):
    x = np.float32(RNG.normal(size=(64, 1)) + 1e4)
    norm = fddp.BatchNorm(False)
    y, _ = norm.apply(norm.init(jax.random.key(0), x), x, mutable=["batch_stats"])
    np.testing.assert_allclose(
        y[:, 0], (x - x.mean(dtype=float)) @ [1] / x.std(dtype=float), atol=3e-3
    )


def test_three_small_numbers_a_feature_are_all_that_is_sent(group):
    norm = fddp.BatchNorm(False, axis_name="replica")
    mesh = jax.sharding.Mesh(jax.devices()[:2], "replica")
    x = jnp.ones((4, 5, FEATURES))
    variables = norm.init(jax.random.key(0), x)
    forward = jax.shard_map(
        lambda x: norm.apply(variables, x, mutable=["batch_stats"])[0],
        mesh=mesh,
        in_specs=jax.sharding.PartitionSpec("replica"),
        out_specs=jax.sharding.PartitionSpec("replica"),
        check_vma=False,
    )
    sums = [text for text in str(jax.make_jaxpr(forward)(x)).splitlines() if " psum[" in text]
    assert [text.split(" = ")[0].split(":")[-1] for text in sums] == [
        f"f32[2,{FEATURES}]",
        f"f32[{FEATURES}]",
    ]


### In Flax's place

FORMS: dict[str, dict[str, Any]] = {
    "default": {},
    "features first": {"axis": 1},
    "without scale": {"use_scale": False, "epsilon": 1e-2},
    "without bias": {"use_bias": False, "momentum": 0.5},
    "half": {"dtype": jnp.bfloat16},
    "evaluating": {"use_running_average": True},
}


@pytest.mark.steps
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("masked", [False, True])
def test_alone_it_is_flaxs_batchnorm(form, masked):
    options = {"use_running_average": False, **FORMS[form]}
    norm = fddp.BatchNorm(**options)
    flax_norm = nn.BatchNorm(**options, use_fast_variance=False)
    x = jnp.asarray(RNG.normal(size=(6, 4, FEATURES)), jnp.float32)
    mask = jnp.arange(6)[:, None, None] < 4 if masked else None
    variables = flax_norm.init(jax.random.key(0), x)
    assert jax.tree.map(
        lambda x: (x.shape, x.dtype), norm.init(jax.random.key(0), x)
    ) == jax.tree.map(lambda x: (x.shape, x.dtype), variables)
    got, state = norm.apply(variables, x, mask=mask, mutable=["batch_stats"])
    expected, flaxs = flax_norm.apply(variables, x, mask=mask, mutable=["batch_stats"])
    assert (got.shape, got.dtype) == (expected.shape, expected.dtype)
    rows = slice(None) if mask is None else slice(4)
    tolerance = 1e-2 if got.dtype == jnp.bfloat16 else 1e-5
    np.testing.assert_allclose(
        np.float32(got[rows]), np.float32(expected[rows]), rtol=tolerance, atol=tolerance
    )
    close(state, flaxs, rtol=1e-5, atol=0)


def test_statistics_of_groups_of_replicas_are_refused():
    norm = fddp.BatchNorm(use_running_average=False, axis_index_groups=[[0], [1]])
    with pytest.raises(ValueError, match="got axis_index_groups: leave it out"):
        norm.init(jax.random.key(0), jnp.ones((2, 1)))
