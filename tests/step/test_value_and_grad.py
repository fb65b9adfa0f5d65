"""Gradients over many replicas are those of one on the joined batch, and travel as the plan
says."""

import re
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import trees
from problems import square

import fddp

pytestmark = pytest.mark.steps

REPLICAS = [1, 4]
RNG = np.random.default_rng(0)
PARAMS = {
    "layer": {"w": RNG.normal(size=(5, 7)), "b": RNG.normal(size=7), "count": np.int32(3)},
    "phase": RNG.normal(size=5) + 1j * RNG.normal(size=5),
    "head": RNG.normal(size=(7,)),
}
# Eight replicas × four micro-batches × two rows.
BATCH = {"x": RNG.normal(size=(64, 5)), "y": RNG.normal(size=64)}
close = partial(trees.close, rtol=1e-12, atol=1e-14)


def net(params: Any, batch: Any) -> Any:
    """Mean squared error of a small net, and metrics; complex and integer parameters take part."""
    x = jnp.real(batch["x"] * params["phase"])
    h = jnp.tanh(x @ params["layer"]["w"] + params["layer"]["b"]) * params["layer"]["count"]
    error = h @ params["head"] - batch["y"]
    return jnp.mean(error**2), {"absolute": jnp.mean(jnp.abs(error)), "hidden": jnp.mean(h)}


def net_loss(params: Any, batch: Any) -> Any:
    return net(params, batch)[0]


def rows(k: int, count: int = 4) -> Any:
    """Part k of `count` parts of the batch."""
    size = 64 // count
    return jax.tree.map(lambda x: x[k * size : (k + 1) * size], BATCH)


@cache
def by_jax() -> Any:
    """((loss, aux), grads) of one replica on the whole batch, by JAX itself."""
    trained = {**PARAMS, "layer": {k: v for k, v in PARAMS["layer"].items() if k != "count"}}

    def loss(trained: Any) -> Any:
        layer = trained["layer"] | {"count": PARAMS["layer"]["count"]}
        return net(trained | {"layer": layer}, BATCH)

    value, grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(trained)
    grads["layer"]["count"] = np.zeros((), np.int32)
    return value, grads


@pytest.fixture
def reference(x64) -> Any:
    return by_jax()


### The drop-in for jax.value_and_grad


@pytest.mark.parametrize("n", REPLICAS)
def test_value_and_grad_equals_jax_on_the_joined_batch(group, reference, n):
    f = fddp.value_and_grad(net, group=group(n), has_aux=True, bucket_cap_mb=0)
    close(f(PARAMS, BATCH), reference)


def test_a_part_of_the_parameters_may_be_none(group):
    f = fddp.value_and_grad(lambda p, x: jnp.mean(x @ p["w"]), group=group(2))
    params = {"w": np.ones(3, np.float32), "activation": None, "count": np.int32(2)}
    value, grads = f(params, np.ones((4, 3), np.float32))
    close((value, grads), (3.0, {"w": np.ones(3), "activation": None, "count": 0}))


@pytest.mark.parametrize(
    "options",
    [
        {"schedule": "after"},
        {"accumulation_steps": 4},
        {"order": "reverse"},
        {"bucket_cap_mb": 1e-4},
    ],
    ids=str,
)
def test_no_option_changes_the_mathematics(group, reference, options):
    f = fddp.value_and_grad(net_loss, group=group(4), **options)
    close(f(PARAMS, BATCH), (reference[0][0], reference[1]))


def test_value_and_grad_passes_model_state_and_keys(group, x64):
    def loss(w: Any, x: Any, *, model_state: Any, rng: Any) -> Any:
        mask = jax.random.bernoulli(rng, shape=x.shape)
        return jnp.mean((x * mask - w) ** 2), (
            {"seen": model_state["seen"] + 1},
            {"kept": jnp.mean(mask * 1.0)},
        )

    w = np.float64(0.5)
    x = BATCH["y"]
    key = jax.random.key(3)
    f = fddp.value_and_grad(loss, group=group(2), has_aux=True)
    state = {"seen": np.int32(41)}
    (value, (new, aux)), grad = f(w, x, model_state=state, rng=key)
    # By hand: two halves, each with the key of step 0, micro-batch 0 and its own number.
    halves = [
        jax.value_and_grad(loss, has_aux=True)(
            w,
            half,
            model_state=state,
            rng=jax.random.fold_in(jax.random.fold_in(jax.random.fold_in(key, 0), 0), k),
        )
        for k, half in enumerate(np.split(x, 2))
    ]
    mean = jax.tree.map(
        lambda *values: sum(values) / 2, *[((v, a["kept"]), g) for (v, (_, a)), g in halves]
    )
    close(((value, aux["kept"]), grad), mean)
    assert int(new["seen"]) == 42


def test_every_replica_computes_the_same_bits(group):
    step = fddp.train_step(net_loss, optax.adam(1e-2), group=group(8), bucket_cap_mb=1e-4)
    state = step.init(PARAMS)
    for k in range(3):
        state, _ = step(state, rows(k))
    for x in jax.tree.leaves((state.params, state.opt_state)):
        assert len(x.addressable_shards) == 8
        assert len({np.asarray(shard.data).tobytes() for shard in x.addressable_shards}) == 1


### Accumulation


def test_between_synchronizations_every_replica_has_its_own_gradients(group):
    step = fddp.train_step(net_loss, optax.sgd(1.0), group=group(4))
    state, _ = step.no_sync(step.init(PARAMS), BATCH)
    assert state.accumulated is not None
    for grads in state.accumulated.sums.grads:
        assert grads.shape[0] == 4 and len(np.unique(grads, axis=0)) == 4
    assert state.accumulated.micro_batches.tolist() == [1] * 4


### Traffic


def compiled(lowered: jax.stages.Lowered) -> str:
    return lowered.compile().as_text() or ""


def all_reduces(text: str) -> list[str]:
    return re.findall(r"^.* all-reduce(?:-start)?\(.*$", text, re.M)


def entry(text: str) -> str:
    """The body of the main computation, outside of every loop and branch."""
    return re.split(r"^}", text[text.index("\nENTRY ") :], maxsplit=1, flags=re.M)[0]


@pytest.mark.parametrize(
    ("cap", "steps", "buckets"),
    [(25, 1, 1), (25, 4, 1), (1e-4, 1, 2), (1e-4, 4, 2), (0, 1, 3), (0, 4, 3)],
)
def test_a_step_sends_one_all_reduce_per_bucket_and_none_in_a_loop(group, cap, steps, buckets):
    def loss(params: Any, x: Any) -> Any:
        return jnp.mean(((x * params["a"]) @ params["w"] - params["z"]) ** 2), {"mean": jnp.mean(x)}

    params = {
        "a": np.ones(5, np.float32),
        "w": np.ones((5, 9), np.float32),
        "z": np.ones(9, np.float32),
    }
    options: Any = {"accumulation_steps": steps, "bucket_cap_mb": cap, "has_aux": True}
    step = fddp.train_step(loss, optax.sgd(0.1), group=group(4), **options)
    x = np.ones((16, 5), np.float32)
    text = compiled(step.lower(step.init(params), x))
    assert len(step.plan.buckets) == buckets
    assert len(all_reduces(text)) == len(all_reduces(entry(text))) == buckets
    assert (" while(" in text) == (steps > 1)


def test_gradients_of_16_bits_need_one_all_reduce_more_for_the_metrics(group):
    step = fddp.train_step(square, optax.sgd(0.1), group=group(4))
    state = step.init(jnp.zeros((), jnp.bfloat16))
    text = compiled(step.lower(state, np.ones(8, np.float32)))
    assert len(all_reduces(text)) == len(step.plan.buckets) + 1 == 2 and "bf16" in text


def test_buffers_and_metrics_ride_in_the_last_bucket(group):
    def loss(w: Any, x: Any, *, model_state: Any) -> Any:
        return jnp.mean((x - w) ** 2), (
            jax.tree.map(lambda m: m + 1, model_state),
            {"a": w, "b": {"c": 2 * w}},
        )

    step = fddp.train_step(loss, optax.sgd(0.1), group=group(4))
    state = step.init(
        np.float32(0), model_state={"mean": np.ones(3, np.float32), "count": np.int32(2**24 + 1)}
    )
    assert len(all_reduces(compiled(step.lower(state, np.ones(8, np.float32))))) == 1
    state, _ = step(state, np.ones(8, np.float32))
    assert (state.model_state["mean"].tolist(), int(state.model_state["count"])) == (
        [2, 2, 2],
        2**24 + 2,
    )


@pytest.mark.parametrize("schedule", ["overlap", "after"])
def test_an_ignored_parameter_is_neither_sent_nor_trained(group, schedule):
    params = {"body": jnp.ones(3), "head": {"w": jnp.ones(3)}}

    def loss_fn(params: Any, x: Any) -> Any:
        return jnp.mean((x * params["body"] * params["head"]["w"]) ** 2)

    step = fddp.train_step(
        loss_fn,
        optax.adamw(0.1),
        group=group(2),
        schedule=schedule,
        ignore=lambda path: path.startswith("head/"),
    )
    state, _ = step(step.init(params), np.ones((4, 3), np.float32))
    assert [bucket.names for bucket in step.plan.buckets] == [("body",)]
    np.testing.assert_array_equal(state.params["head"]["w"], params["head"]["w"])
    assert not np.any(np.asarray(state.params["body"]) == 1)
    assert {leaf.shape for leaf in jax.tree.leaves(state.opt_state)} == {(), (3,)}
    assert len(jax.tree.leaves(state.opt_state)) == 3  # count and the two moments of body alone


def test_a_predicate_that_ignores_everything_is_refused(group):
    step = fddp.train_step(
        lambda w, x: jnp.mean(w * x), optax.sgd(0.1), group=group(1), ignore=lambda path: True
    )
    with pytest.raises(ValueError, match="all of them ignored, so there is nothing to train"):
        step.init(jnp.ones(3))
