"""Metrics over all rows, against NumPy on the joined rows; real ranks are held to them in
`on_ranks/evaluation.py`."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import trees
from flax import linen as nn
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from on_ranks.evaluation import a_loader_may_refill_one_buffer

import fddp
from fddp.runtime.watching.recorder import Recorder
from fddp.runtime.watching.watcher.shared_memory import REPORT, SIZE

close = partial(trees.close, rtol=1e-12, atol=0)

RNG = np.random.default_rng(3)
X = RNG.normal(size=(29, 3))
W = RNG.normal(size=3)
LABELS = RNG.integers(3, size=29)
# Four replicas divide the first two alone; the fourth has no row.
ENDS = np.cumsum([8, 8, 3, 0, 6, 4])[:-1]


def unequal_batches(*arrays: np.ndarray) -> Any:
    """Rows in batches of unequal size."""
    batches = list(zip(*(np.split(x, ENDS) for x in arrays)))
    return [batch[0] for batch in batches] if len(arrays) == 1 else batches


def metrics(w: Any, x: Any) -> Any:
    return {"cubes": jnp.mean((x @ w) ** 3), "parts": [jnp.mean(x, axis=0), 0.25]}


def by_hand(w: Any) -> Any:
    return {"cubes": np.mean((X @ w) ** 3), "parts": [np.mean(X, axis=0), 0.25]}


### Means


@pytest.mark.parametrize("n", [1, 4])
def test_metrics_are_means_over_all_rows_however_they_lie_in_batches(group, x64, n):
    got = fddp.evaluate(metrics, W, unequal_batches(X), group=group(n))
    close(got, by_hand(W))
    assert type(got["cubes"]) is float and got["parts"][0].dtype == np.float64


def test_a_weighted_metric_is_a_mean_over_what_it_counts(group, x64):
    """The accuracy of each class: no batch has rows of the last, whose mean is then a number in
    none of them."""

    def of_classes(w: Any, batch: Any) -> Any:
        x, label = batch
        right = (x @ w > 0)[:, None]
        one_hot = jax.nn.one_hot(label, 4)
        count = jnp.sum(one_hot, axis=0)
        return fddp.Weighted(jnp.sum(right * one_hot, axis=0) / count, count)

    got = fddp.evaluate(of_classes, W, unequal_batches(X, LABELS), group=group(4))
    close(got, np.array([*(np.mean(X[k == LABELS] @ W > 0) for k in range(3)), np.nan]))


def test_many_batches_are_added_up_in_64_bits(group):
    numbers = np.array([2**24, *99 * [1]], np.float32)
    assert (
        fddp.evaluate(lambda w, x: jnp.mean(x), (), numbers[:, None], group=group(1))
        == (2**24 + 99) / 100
    )


def test_a_metric_of_16_bits_counts_with_what_it_is(group):
    half = lambda w, x: jnp.mean(x).astype(jnp.bfloat16)  # noqa: E731
    assert fddp.evaluate(half, W, [np.full(4, 1.5), np.full(12, 2.5)], group=group(1)) == 2.25


def test_a_metric_is_compiled_once_for_each_form_of_a_batch(group):
    traced = []

    def counting(w: Any, x: Any) -> Any:
        traced.append(x.shape)
        return jnp.mean(x)

    for _ in range(2):
        fddp.evaluate(counting, W, [X[:8], X[8:16], X[16:19]], group=group(4))
    assert traced == [(8, 3), (3, 3)]


def test_each_batch_is_a_sign_to_the_watchers_that_a_rank_moves(group):
    recorder = Recorder(bytearray(SIZE))
    moved = set()

    def batches() -> Iterator[np.ndarray]:
        for _ in range(3):
            moved.add(REPORT.read(recorder.memory)["moved"])
            yield X[:8]

    fddp.evaluate(metrics, W, batches(), group=replace(group(1), journal=recorder))
    assert len(moved) == 3


### States


@pytest.mark.steps
@pytest.mark.parametrize("kind", ["whole", "shards", "local"])
def test_a_state_is_evaluated_however_replicas_hold_it_and_goes_on(group, x64, kind):
    def loss(w: Any, x: Any, *, model_state: Any) -> Any:
        return jnp.mean((x @ w - model_state["seen"]) ** 2), ({"seen": jnp.mean(x[:, 0])}, None)

    def metric(w: Any, x: Any, *, model_state: Any) -> Any:
        return jnp.mean((x @ w - model_state["seen"]) ** 2)

    sgd = optax.sgd(0.1)
    replicas = group(4)
    optimizer: Any = fddp.local_steps(sgd) if kind == "local" else sgd
    options: Any = {"shard": "state"} if kind == "shards" else {}
    step = fddp.train_step(loss, optimizer, group=replicas, **options)
    state, _ = step(step.init(W, model_state={"seen": jnp.zeros(())}), X[:16])
    trained = jax.tree.map(np.array, fddp.whole((state.params, state.model_state), group=replicas))
    got = fddp.evaluate(metric, state, unequal_batches(X), group=replicas)
    close(got, np.mean((X @ trained[0] - trained[1]["seen"]) ** 2))
    step(state, X[:16])
    with pytest.raises(ValueError, match="donate=False"):
        fddp.evaluate(metric, state, unequal_batches(X), group=replicas)


def test_a_flax_module_stands_in_the_place_of_parameters(group):
    def built() -> nnx.Sequential:
        rngs = nnx.Rngs(0)
        return nnx.Sequential(
            nnx.Linear(3, 5, rngs=rngs), nnx.BatchNorm(5, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)
        )

    def metric(model: Any, x: Any) -> Any:
        return jnp.mean(model(x))

    module: Any = built()
    rows = X.astype(np.float32)
    module.eval()
    got = fddp.evaluate(metric, module, unequal_batches(rows), group=group(4))
    kernel, bias = (np.asarray(x[...]) for x in (module.layers[0].kernel, module.layers[0].bias))
    close(got, float(np.mean((rows @ kernel + bias) / np.sqrt(1 + 1e-5))), rtol=1e-5)


def test_rows_are_dealt_out_among_the_devices_of_a_process_where_they_can_be(group):
    shard_rows = {}

    def metric(w: Any, x: Any) -> Any:
        def note(where: Any) -> None:
            shard_rows[len(x)] = where.shard_shape(x.shape)[0]

        jax.debug.inspect_array_sharding(x, callback=note)
        return jnp.mean(x)

    fddp.evaluate(metric, W, unequal_batches(X), group=group(4))
    assert shard_rows == {8: 2, 3: 3, 0: 0, 6: 6, 4: 1}


def test_parameters_that_lie_along_another_axis_stay_there(x64):
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("replica", "model"))
    w = jax.device_put(np.stack([W, W], axis=1), NamedSharding(mesh, P(None, "model")))
    shardings = []

    def metric(w: Any, x: Any) -> Any:
        jax.debug.inspect_array_sharding(w, callback=shardings.append)
        return jnp.mean((x @ w) ** 3)

    got = fddp.evaluate(metric, w, unequal_batches(X), group=fddp.mesh_group(mesh))
    close(got, float(by_hand(W)["cubes"]))
    assert {sharding.shard_shape((3, 2)) for sharding in shardings} == {(3, 1)}


### Errors


def counted(w: Any, x: Any) -> Any:
    return {"right": jnp.sum(x > 0)}


def no_mean(w: Any, x: Any) -> Any:
    return x[:, 0]


class NoRows:
    """Rows of another library."""

    dtype, shape = X.dtype, X.shape

    def __repr__(self) -> str:
        return "<object>"


REFUSED: dict[str, tuple[Any, Any, type[Exception]]] = {
    "no rank has a batch": (metrics, [], ValueError),
    "batches must be an iterable of this process's batches, got int": (metrics, 8, TypeError),
    "Python lists of numbers, a: make arrays": (metrics, [{"a": [1.0, 2.0]}], ValueError),
    "the batch is empty": (metrics, [{}], ValueError),
    "leaves that are not numeric, x <object": (metrics, [{"x": NoRows()}], TypeError),
    "metric_fn must be a function, got float": (0.5, [X], TypeError),
    "metric_fn must return metrics, floats in a tree, got None": (
        lambda w, x: None,
        [X],
        TypeError,
    ),
    r"metric\['right'\] must be a float.* got int32: .*Weighted": (counted, [X], TypeError),
    r"metric must have one shape for all batches, got \[8\] and \[21\]": (
        no_mean,
        [X[:8], X[8:]],
        ValueError,
    ),
    r"metric weighs \[8\] and is \[\]": (
        lambda w, x: fddp.Weighted(jnp.mean(x), x[:, 0]),
        [X[:8]],
        ValueError,
    ),
    "division by zero": (lambda w, x: 1 / 0, [X], ZeroDivisionError),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_cannot_be_evaluated_is_refused(group, message: str):
    metric, batches, kind = REFUSED[message]
    with pytest.raises(kind, match=message):
        fddp.evaluate(metric, W, batches, group=group(1))


def test_a_state_that_is_no_tree_of_arrays_is_refused(group):
    with pytest.raises(TypeError, match="such as parameters or an nnx module; it holds Dense"):
        fddp.evaluate(metrics, nn.Dense(2), [X], group=group(1))


def test_an_evaluation_is_no_part_of_another_program(group):
    with pytest.raises(TypeError, match=r"cannot be called under jax.jit"):
        jax.jit(lambda w: fddp.evaluate(metrics, w, [X], group=group(1)))(W)


@pytest.mark.parametrize("replicas", [1, 4])
def test_a_loader_may_refill_one_buffer(group: Any, replicas: int):
    a_loader_may_refill_one_buffer.check(group(replicas))
