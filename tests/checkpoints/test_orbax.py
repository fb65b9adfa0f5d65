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
    """With the memory of a hook, and gradients that are pending after the third step."""
    step, second_step = (make(hook=fddp.hooks.topk(0.25)) for _ in range(2))
    state = start(step)
    for x in single(ROWS[:3]):
        state, _ = step(state, x)
    assert all(np.any(residual) for residual in jax.tree.leaves(state.hook_state))
    state, _ = step.no_sync(state, single(ROWS[6]))
    save(tmp_path / "state", state)
    # A fresh state has no form for pending gradients.
    like, _ = second_step.no_sync(fresh(second_step), single(ROWS[0]))
    resumed = restore(tmp_path / "state", like)
    same_arrays(resumed, state)
    for x in single(ROWS[3:6]):
        state, info = step(state, x)
        resumed, resumed_info = second_step(resumed, x)
        same_arrays((resumed, resumed_info), (state, info))
    assert int(resumed.step) == 6


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


@pytest.mark.parametrize("replicas", [1, 2, 8])
def test_pending_gradients_of_another_number_of_replicas_are_refused(group, replicas):
    make = lambda n: fddp.train_step(square, optax.sgd(0.5), group=group(n))  # noqa: E731
    x = np.arange(8, dtype=np.float32)
    saver = make(4)
    state, _ = saver.no_sync(saver.init(np.float32(0)), x)
    saved = jax.tree.map(np.asarray, state)
    with pytest.raises(ValueError, match=f"pending of 4 replicas, this group has {replicas}"):
        make(replicas)(saved, x)
