"""A checkpoint between `no_sync` and a step: its gradients are in the mean of the next step."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from tiers import crossed
from trees import bits, close

import fddp

pytestmark = pytest.mark.steps

ROWS = np.random.default_rng(3).normal(size=(36, 3))
RATE = 0.5
BUFFERS = {"calls": np.int32(0), "last": np.float32(0)}
START = {"w": np.linspace(-1, 1, 3), "unused": np.ones(2)}


class Metrics(NamedTuple):
    """Metrics in a class of the user's."""

    mean: jax.Array


AUX: dict[str, Callable[[Any], Any]] = {
    "none": lambda x: None,
    "dict": lambda x: {"mean": jnp.mean(x), "more": [jnp.max(x), (jnp.min(x), {})]},
    "number": jnp.mean,
}


def loss_of(params: Any, x: Any) -> jax.Array:
    return jnp.mean((jnp.tanh(x @ params["w"]) - 1) ** 2)


def make(
    group: fddp.Group, aux: Callable[[Any], Any] = AUX["dict"], **options: Any
) -> fddp.TrainStep:
    def loss(params: Any, x: Any, *, model_state: Any) -> Any:
        return loss_of(params, x), (
            {"calls": model_state["calls"] + 1, "last": jnp.sum(x, dtype=jnp.float32)},
            aux(x),
        )

    options = {"broadcast_buffers": False} | options
    return fddp.train_step(loss, optax.sgd(RATE), group=group, **options)


def start(step: fddp.TrainStep) -> fddp.TrainState:
    return step.init(START, model_state=BUFFERS)


def saved(step: fddp.TrainStep, folder: Path) -> fddp.TrainState:
    """A state with the pending gradients of 24 rows, from two calls."""
    state = start(step)
    for rows in (ROWS[:12], ROWS[12:24]):
        state, _ = step.no_sync(state, rows)
    with fddp.Checkpoints(folder, step) as checkpoints:
        assert checkpoints.save(state, now=True)
    return state


def restored(step: fddp.TrainStep, folder: Path, like: fddp.TrainState) -> fddp.TrainState:
    with fddp.Checkpoints(folder, step) as checkpoints:
        return checkpoints.restore(like)[0]


def by_plain_jax(rows: np.ndarray) -> Any:
    """The parameters after one step of plain JAX on all these rows."""
    return jax.tree.map(lambda p, g: p - RATE * g, START, jax.grad(loss_of)(START, rows))


@crossed(
    options=[{"find_unused_parameters": True}, {"shard": "optimizer"}, {"shard": "state"}, {}],
    replicas=[(4, 2), (2, 4), (3, 1), (1, 3), (4, 3), (2, 2)],
)
def test_pending_gradients_count_on_any_number_of_replicas(
    group: Callable[[int], fddp.Group],
    x64: None,
    tmp_path: Path,
    replicas: tuple[int, int],
    options: Any,
):
    before, after = replicas
    saved(make(group(before), **options), tmp_path)
    step = make(group(after), **options)
    state, info = step(restored(step, tmp_path, start(step)), ROWS[24:])
    close(fddp.whole(state.params), by_plain_jax(ROWS))
    np.testing.assert_allclose(info.loss, loss_of(START, ROWS), rtol=1e-12)
    np.testing.assert_allclose(info.aux["mean"], np.mean(ROWS), rtol=1e-12)
    if options.get("find_unused_parameters"):
        assert info.used["unused"] == 0 < info.used["w"]


@pytest.mark.parametrize("after", [1, 2, 4])
def test_each_replica_has_the_buffers_of_one_that_was_saved(
    group: Callable[[int], fddp.Group], tmp_path: Path, after: int
):
    saved(make(group(3)), tmp_path)
    step = make(group(after))
    pending = restored(step, tmp_path, start(step)).accumulated
    assert pending is not None
    np.testing.assert_array_equal(pending.model_state["calls"], [2] * after)
    np.testing.assert_array_equal(pending.micro_batches, [2] * after)
    sums = [np.sum(rows) for rows in np.split(ROWS[12:24], 3)]
    np.testing.assert_allclose(pending.model_state["last"], [*sums, *sums][:after], rtol=1e-5)


@pytest.mark.parametrize("aux", AUX)
def test_metrics_of_any_plain_structure_come_back_in_a_first_state_and_a_form(
    group: Callable[[int], fddp.Group], tmp_path: Path, aux: str
):
    step = make(group(2), AUX[aux])
    state = saved(step, tmp_path)
    form = step.shapes(START, model_state=BUFFERS)
    for like in (start(step), form):
        restored_state = restored(step, tmp_path, like)
        assert jax.tree.structure(restored_state) == jax.tree.structure(state)
        assert bits(restored_state) == bits(state)


def test_metrics_in_a_class_are_refused_with_a_way_out_that_works(
    group: Callable[[int], fddp.Group], x64: None, tmp_path: Path
):
    aux = lambda x: Metrics(jnp.mean(x))  # noqa: E731
    saved(make(group(4), aux), tmp_path)
    step = make(group(2), aux)
    with pytest.raises(
        ValueError, match=r"accumulated/(?s:.*)give a state that step.no_sync returned"
    ):
        restored(step, tmp_path, start(step))
    like, _ = step.no_sync(start(step), ROWS[:12])
    state, info = step(restored(step, tmp_path, like), ROWS[24:])
    close(state.params, by_plain_jax(ROWS))
    np.testing.assert_allclose(info.aux.mean, np.mean(ROWS), rtol=1e-12)


def test_on_replicas_of_several_devices_a_state_with_pending_gradients_is_the_form(
    tmp_path: Path, x64: None
):
    def make(replicas: int) -> tuple[fddp.TrainStep, fddp.TrainState]:
        mesh = Mesh(
            np.array(jax.devices()[: 2 * replicas]).reshape(replicas, 2), ("replica", "model")
        )
        step = fddp.train_step(loss, optax.sgd(RATE), group=fddp.mesh_group(mesh))
        return step, step.init(
            jax.device_put(first, NamedSharding(mesh, PartitionSpec(None, "model")))
        )

    loss = lambda w, x: jnp.mean((jnp.tanh(x @ w) - 1) ** 2)  # noqa: E731
    first = np.linspace(-1, 1, 12).reshape(3, 4)
    step, state = make(4)
    state, _ = step.no_sync(state, ROWS[:24])
    with fddp.Checkpoints(tmp_path, step) as checkpoints:
        checkpoints.save(state, now=True)
    step, state = make(2)
    with pytest.raises(ValueError, match=r"give a state that step.no_sync returned"):
        restored(step, tmp_path, state)
    like, _ = step.no_sync(state, ROWS[:12])
    state, _ = step(restored(step, tmp_path, like), ROWS[24:])
    close(state.params, first - RATE * jax.grad(loss)(first, ROWS))


def test_another_models_pending_gradients_are_refused(
    group: Callable[[int], fddp.Group], tmp_path: Path
):
    saved(make(group(2)), tmp_path)
    step = fddp.train_step(loss_of, optax.sgd(RATE), group=group(2))
    with pytest.raises(ValueError, match="is of another training"):
        restored(step, tmp_path, step.init({"w": np.ones(3)}))


def test_gradients_in_16_bits_and_complex_ones_are_added_up(
    group: Callable[[int], fddp.Group], tmp_path: Path
):
    def loss(params: Any, x: Any) -> jax.Array:
        return (
            jnp.mean(x @ params["w"].astype(jnp.float32)) + jnp.mean(x) * jnp.abs(params["z"]) ** 2
        )

    params = {"w": jnp.ones(3, jnp.bfloat16), "z": jnp.complex64(1 + 2j)}
    rows = np.ones((12, 3), np.float32)
    make = lambda n: fddp.train_step(loss, optax.sgd(RATE), group=group(n))  # noqa: E731
    step = make(4)
    state, _ = step.no_sync(step.init(params), rows)
    with fddp.Checkpoints(tmp_path, step) as checkpoints:
        checkpoints.save(state, now=True)
    step = make(2)
    pending = restored(step, tmp_path, step.init(params)).accumulated
    assert pending is not None and state.accumulated is not None
    for leaf, before in zip(pending.sums.grads, state.accumulated.sums.grads):
        assert leaf.dtype == before.dtype and leaf.shape == (2, *before.shape[1:])
        np.testing.assert_allclose(
            np.sum(np.asarray(leaf, complex), 0), np.sum(np.asarray(before, complex), 0)
        )
