"""A state is a tree of arrays, so that Orbax saves all of it and training goes on the same.

The whole `TrainState` is saved as it is: step, parameters, optimizer, buffers, random key (a typed
one) and gradients that `no_sync` left pending. It is restored into the form of a fresh state, which
says on which replicas it lies.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from problems import square
from trees import same_arrays
from truth import by_plain_jax

import fddp

pytestmark = pytest.mark.steps

RNG = np.random.default_rng(4)
PARAMS = {
    "w": RNG.normal(size=(3, 5)),
    "b": RNG.normal(size=5),
    "count": np.int32(2**24 + 1),
    "none": None,
}
ROWS = RNG.normal(size=(7, 16, 3))


def save(folder: Path, state: Any) -> None:
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder, state)


def restore(folder: Path, like: Any) -> Any:
    with ocp.StandardCheckpointer() as checkpointer:
        return checkpointer.restore(folder, like)


def refused(folder: Path, like: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        restore(folder, like)


def plain(tree: Any) -> Any:
    """A key as its words."""
    is_key = lambda x: jnp.issubdtype(x.dtype, jax.dtypes.prng_key)  # noqa: E731
    return jax.tree.map(lambda x: np.array(jax.random.key_data(x) if is_key(x) else x), tree)


def mean_square(params: Any, x: Any) -> jax.Array:
    return jnp.mean((jnp.tanh(x @ params["w"] + params["b"]) - x[:, :1]) ** 2)


def noisy(params: Any, x: Any, *, model_state: Any, rng: Any) -> Any:
    """Dropout, and buffers that enter the loss."""
    mean = 0.9 * model_state["mean"] + jnp.mean(x, axis=0)
    x = x * jax.random.bernoulli(rng, 0.7, x.shape) - mean
    return mean_square(params, x), (
        {"mean": mean, "calls": model_state["calls"] + 1},
        {"seen": jnp.mean(x)},
    )


def single(tree: Any) -> Any:
    return jax.tree.map(lambda x: np.float32(x) if x.dtype == np.float64 else x, tree)


@pytest.fixture
def make(group) -> Callable[..., fddp.TrainStep]:
    """`make()`: a step on four replicas that uses all of a state."""
    options: Any = {"group": group(4), "accumulation_steps": 2, "bucket_cap_mb": 0}
    return lambda **more: fddp.train_step(noisy, optax.adam(1e-2), **options, **more)


def start(step: fddp.TrainStep, seed: int = 7) -> fddp.TrainState:
    buffers = {"mean": np.zeros(3, np.float32), "calls": np.int32(2**24)}
    return step.init(single(PARAMS), model_state=buffers, rng=jax.random.key(seed))


def fresh(step: fddp.TrainStep) -> fddp.TrainState:
    """A state as a new process makes it: of the same form, but with other values."""
    state = start(step, seed=0)
    return state._replace(params=jax.tree.map(jnp.zeros_like, state.params))


def test_three_and_three_steps_are_six_bit_for_bit(make, tmp_path):
    step = make()
    state = start(step)
    for x in single(ROWS[:3]):
        state, _ = step(state, x)
    save(tmp_path / "state", state)
    second_step = make()
    resumed = restore(tmp_path / "state", fresh(second_step))
    same_arrays(resumed, state)
    for x in single(ROWS[3:6]):
        state, info = step(state, x)
        resumed, resumed_info = second_step(resumed, x)
        same_arrays((resumed, resumed_info), (state, info))
    assert int(resumed.step) == 6


def test_what_a_hook_remembers_is_saved_too(make, tmp_path):
    step, second_step = (make(hook=fddp.hooks.topk(0.25)) for _ in range(2))
    state, _ = step(start(step), single(ROWS[0]))
    assert all(np.any(residual) for residual in jax.tree.leaves(state.hook_state))
    save(tmp_path / "state", state)
    resumed = restore(tmp_path / "state", fresh(second_step))
    same_arrays(resumed, state)
    for x in single(ROWS[1:3]):
        (state, info) = step(state, x)
        (resumed, resumed_info) = second_step(resumed, x)
        same_arrays((resumed, resumed_info), (state, info))


def test_pending_gradients_are_saved_too(make, tmp_path):
    step = make()
    state, _ = step(start(step), single(ROWS[0]))
    for x in single(ROWS[1:3]):
        state, _ = step.no_sync(state, x)
    save(tmp_path / "state", state)
    second_step = make()
    like, _ = second_step.no_sync(
        fresh(second_step), single(ROWS[0])
    )  # a fresh state has no form for pending gradients
    resumed = restore(tmp_path / "state", like)
    same_arrays(resumed, state)
    for call, number in (("no_sync", 3), ("__call__", 4), ("__call__", 5)):
        state, info = getattr(step, call)(state, single(ROWS[number]))
        resumed, resumed_info = getattr(second_step, call)(resumed, single(ROWS[number]))
        same_arrays((resumed, resumed_info), (state, info))


def test_training_may_go_on_while_a_state_is_still_being_written(make, tmp_path):
    step = make()
    state, _ = step(start(step), single(ROWS[0]))
    expected = plain(jax.tree.map(jnp.copy, state))
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", state)
        for x in single(ROWS[1:4]):
            state, _ = step(state, x)
    jax.tree.map(
        np.testing.assert_array_equal, plain(restore(tmp_path / "state", fresh(step))), expected
    )


@pytest.mark.parametrize(
    "key", [lambda: jax.random.key(3), lambda: jax.random.PRNGKey(3)], ids=["typed", "raw"]
)
def test_keys_come_back_as_they_were(group, tmp_path, key):
    def loss(w: Any, x: Any, *, rng: Any) -> jax.Array:
        return jnp.mean((x - w * jax.random.normal(rng)) ** 2)

    step = fddp.train_step(loss, optax.sgd(0.1), group=group(2))
    state = step.init(jnp.zeros(()), rng=key())
    save(tmp_path / "state", state)
    resumed = restore(
        tmp_path / "state", step.init(jnp.ones(()), rng=jax.tree.map(jnp.copy, key()))
    )
    same_arrays(resumed, state)
    assert resumed.rng.dtype == key().dtype


### Another number of replicas


def test_training_goes_on_with_another_number_of_replicas(group, x64, tmp_path):
    optimizer = optax.adamw(1e-2)
    like = {name: PARAMS[name] for name in ("w", "b")}
    saved = None
    for number, (n, x) in enumerate(zip((4, 2, 8), ROWS)):
        step = fddp.train_step(mean_square, optimizer, group=group(n), bucket_cap_mb=0)
        state = step.init(like)
        if saved is not None:
            state = restore(saved, state)
        assert int(state.step) == number
        state, info = step(state, x)
        reference = by_plain_jax(mean_square, optimizer, like, ROWS[: number + 1])
        arrays = jax.tree.leaves((state.params, state.opt_state, info.loss))
        truth = jax.tree.leaves((reference.params, reference.opt_state, reference.losses[-1]))
        for got, expected in zip(arrays, truth):
            assert len(got.sharding.device_set) == n and got.dtype == expected.dtype
            np.testing.assert_allclose(got, expected, rtol=1e-12, atol=1e-13)
        saved = tmp_path / str(n)
        save(saved, state)


### A checkpoint of something else

W = np.zeros((3, 5), np.float32)
B = np.zeros(5, np.float32)
OTHERS = {
    "one parameter more": ({"w": W, "b": B, "more": B}, r"do not match(?s:.*)params\.more"),
    "one parameter less": ({"w": W}, r"do not match(?s:.*)params\.b"),
    "another name": ({"w": W, "bias": B}, r"do not match(?s:.*)params\.bias"),
}


def ready(
    replicas: fddp.Group, params: Any, optimizer: optax.GradientTransformation
) -> fddp.TrainState:
    return fddp.train_step(mean_square, optimizer, group=replicas).init(params)


@pytest.mark.parametrize("name", OTHERS)
def test_a_model_that_does_not_fit_the_checkpoint_is_refused(group, tmp_path, name):
    params, message = OTHERS[name]
    save(tmp_path / "state", ready(group(2), {"w": W, "b": B}, optax.adam(1e-2)))
    refused(tmp_path / "state", ready(group(2), params, optax.adam(1e-2)), message)


def test_an_optimizer_that_does_not_fit_the_checkpoint_is_refused(group, tmp_path):
    save(tmp_path / "state", ready(group(2), {"w": W, "b": B}, optax.adam(1e-2)))
    refused(
        tmp_path / "state",
        ready(group(2), {"w": W, "b": B}, optax.sgd(1e-2)),
        r"do not match(?s:.*)opt_state",
    )


def test_an_array_of_another_shape_is_refused(group, tmp_path):
    # One array on one device: Orbax reads several side by side, and drops with a warning those that
    # it has begun.
    params_of = lambda w: {"w": ready(group(1), {"w": w, "b": B}, optax.sgd(1e-2)).params["w"]}  # noqa: E731
    save(tmp_path / "w", params_of(W))
    refused(
        tmp_path / "w",
        params_of(W[:2]),
        r"shape: \(2, 5\) is not compatible with the stored shape: \(3, 5\)",
    )


@pytest.mark.parametrize("replicas", [1, 2, 8])
def test_pending_gradients_of_another_number_of_replicas_are_refused(group, replicas):
    make = lambda n: fddp.train_step(square, optax.sgd(0.5), group=group(n))  # noqa: E731
    x = np.arange(8, dtype=np.float32)
    saver = make(4)
    state, _ = saver.no_sync(saver.init(np.float32(0)), x)
    saved = jax.tree.map(np.asarray, state)
    with pytest.raises(ValueError, match=f"pending of 4 replicas, this group has {replicas}"):
        make(replicas)(saved, x)
