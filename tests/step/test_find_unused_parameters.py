"""The program finds the unused parameters of a step, as DDP's `find_unused_parameters` does.

Four replicas in this process use parameters that depend on their rows. `on_ranks/unused.py` has
ranks with branches of their own, test_used.py the dataflow alone.
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
from models import gpt

pytestmark = pytest.mark.steps

NAMES = ("left", "right", "never")
OPTIMIZERS = {
    "adamw": optax.adamw(0.1, weight_decay=0.5),
    "momentum": optax.chain(optax.add_decayed_weights(0.5), optax.sgd(0.1, momentum=0.9)),
    "parts": optax.multi_transform(
        {"a": optax.adamw(0.1), "b": optax.rmsprop(0.1, momentum=0.9)},
        {"left": "a", "right": "b", "never": "a"},
    ),
    "parts by a function of names": optax.multi_transform(
        {"a": optax.adamw(0.1), "b": optax.rmsprop(0.1, momentum=0.9)},
        lambda params: {name: "b" if name == "right" else "a" for name in params},
    ),
}


def branching(params: Any, batch: Any) -> Any:
    """Uses "left" for a first row of 0, "right" for 1; "never" is in a branch that is never
    taken."""
    branches = [lambda p, x, name=name: jnp.mean(p[name] * x) for name in NAMES]
    return jax.lax.switch(batch["choice"][0], branches, params, batch["x"])


def params() -> dict[str, np.ndarray]:
    return {name: np.full(3, k + 1, np.float32) for k, name in enumerate(NAMES)}


def batch(*choices: int) -> dict[str, np.ndarray]:
    return {"choice": np.array(choices, np.int32), "x": np.ones((len(choices), 3), np.float32)}


@pytest.fixture
def make(group) -> Callable[..., fddp.TrainStep]:
    def make(
        loss: Any = branching, optimizer: Any = OPTIMIZERS["adamw"], **options: Any
    ) -> fddp.TrainStep:
        return fddp.train_step(
            loss, optimizer, group=group(4), find_unused_parameters=True, **options
        )

    return make


def counts(info: fddp.StepInfo) -> dict[str, int]:
    return {name: int(count) for name, count in info.used.items()}


def of_leaf(opt_state: Any, name: str) -> list[np.ndarray]:
    """The optimizer's arrays for a leaf."""
    leaves = jax.tree_util.tree_leaves_with_path(opt_state)
    return [np.asarray(x) for path, x in leaves if f"'{name}'" in jax.tree_util.keystr(path)]


@SCHEDULES
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_what_no_replica_used_stays_bit_for_bit_with_its_moments(make, schedule, optimizer):
    step = make(optimizer=OPTIMIZERS[optimizer], schedule=schedule, donate=False)
    state, info = step(step.init(params()), batch(0, 1, 1, 1))
    assert counts(info) == {"left": 1, "right": 3, "never": 0}
    later, info = step(state, batch(0, 0, 0, 0))
    assert counts(info) == {"left": 4, "right": 0, "never": 0}
    for name, moves in (("left", True), ("right", False), ("never", False)):
        before, after = (
            [np.asarray(s.params[name]), *of_leaf(s.opt_state, name)] for s in (state, later)
        )
        assert len(before) > 1
        assert all(np.array_equal(a, b) for a, b in zip(before, after)) != moves, name


def test_a_leaf_that_some_replicas_used_moves_by_the_mean_over_all(make):
    step = make(optimizer=optax.sgd(1.0))
    state, _ = step(step.init(params()), batch(0, 1, 1, 1))
    np.testing.assert_allclose(state.params["left"], 1 - 1 / 12, rtol=1e-6)
    np.testing.assert_allclose(state.params["right"], 2 - 3 / 12, rtol=1e-6)


def test_used_once_in_a_session_of_micro_batches_and_calls_is_used(make):
    step = make(accumulation_steps=2)
    state = step.init(params())
    state, info = step.no_sync(state, batch(0, 0, 0, 0, 0, 0, 0, 0))
    assert info.used is None
    # Two rows a replica, one a micro-batch: replica 3 sees 0 and then 1.
    state, info = step(state, batch(0, 0, 0, 0, 0, 0, 0, 1))
    assert counts(info) == {"left": 4, "right": 1, "never": 0}
    _, info = step(state, batch(1, 1, 1, 1, 1, 1, 1, 1))
    assert counts(info) == {"left": 0, "right": 4, "never": 0}


def test_a_gradient_of_zero_is_not_a_sign_of_disuse(make):
    step = make(lambda p, x: jnp.mean(0.0 * p["a"] + p["b"]) * jnp.mean(x))
    _, info = step(
        step.init({"a": np.ones(2, np.float32), "b": np.ones(2, np.float32)}),
        np.ones(4, np.float32),
    )
    assert counts(info) == {"a": 4, "b": 4}


def test_what_has_no_path_to_the_loss_does_not_travel(make):
    def loss(p: Any, x: Any) -> Any:
        return jnp.mean(p["used"] * x) + jnp.mean(jax.lax.stop_gradient(p["stopped"]))

    step = make(loss)
    names = ("alone", "stopped", "used")
    state, info = step(
        step.init({name: np.ones(2, np.float32) for name in names}), np.ones((4, 2), np.float32)
    )
    assert [bucket.names for bucket in step.plan.buckets] == [("used",)]
    assert counts(info) == {"alone": 0, "stopped": 0, "used": 4}
    np.testing.assert_array_equal(state.params["alone"], 1)


def test_a_step_in_which_nothing_is_used_changes_nothing(make):
    step = make(lambda p, x: jnp.mean(x))
    state, info = step(step.init(params()), np.arange(4.0, dtype=np.float32))
    assert float(info.loss) == 1.5 and counts(info) == dict.fromkeys(NAMES, 0)
    jax.tree.map(np.testing.assert_array_equal, state.params, params())


def test_a_dropped_layer_is_left_alone_and_the_next_step_finds_it_again(make):
    """Stochastic depth: one key for all replicas drops the same layer everywhere."""

    def loss(p: Any, batch: Any) -> Any:
        x = batch["x"]
        for k in range(3):
            layer = lambda x, w: jnp.tanh(x @ w)  # noqa: E731
            x = jax.lax.cond(batch["keep"][0, k], layer, lambda x, w: x, x, p[f"layer_{k}"])
        return jnp.mean(x**2)

    rng = np.random.default_rng(0)
    weights = {f"layer_{k}": rng.standard_normal((4, 4), np.float32) for k in range(3)}
    step = make(loss, donate=False)
    state = step.init(weights)
    for keep in ([1, 0, 1], [0, 1, 1]):
        data = {"x": rng.standard_normal((4, 4), np.float32), "keep": np.array([keep] * 4, bool)}
        before = state
        (state, info) = step(state, data)
        assert list(counts(info).values()) == [4 * k for k in keep]
        same = [np.array_equal(before.params[name], state.params[name]) for name in weights]
        assert same == [not k for k in keep]


@pytest.mark.slow
def test_a_gpt_counts_the_replicas_that_ran_each_layer(make):
    """Each replica leaves out its own layers; plain JAX knows them by their gradients of zero."""
    model = gpt.PRESETS["tiny"].clone(layers=3, layer_drop=0.7)
    data = gpt.batch(model, 4, length=8)
    start = gpt.init(model, jax.random.key(0), data)[0]
    loss = gpt.loss_fn(model)
    step = make(loss, has_aux=True, donate=False)
    state = step.init(start, rng=jax.random.key(2))
    after, info = step(state, data)

    gradient = jax.jit(jax.grad(lambda p, rows, key: loss(p, rows, rng=key)[0]))
    ran_layers = []
    for replica in range(4):
        key = jax.random.key(2)
        for number in (0, 0, replica):  # the step, the micro-batch, the replica
            key = jax.random.fold_in(key, number)
        rows = {"tokens": data["tokens"][replica : replica + 1]}
        ran_layers.append(jax.tree.map(lambda g: int(np.any(g)), gradient(start, rows, key)))
    expected = jax.tree.map(lambda *counts: sum(counts), *ran_layers)
    assert jax.tree.map(int, info.used) == expected
    layers = {expected[f"layer_{i}"]["attention"]["out"]["kernel"] for i in range(3)}
    assert 0 in layers and layers & {1, 2, 3}
    for before, current in ((start, after.params), (state.opt_state[0].mu, after.opt_state[0].mu)):
        same = jax.tree.map(np.array_equal, before, current)
        assert same == jax.tree.map(lambda count: count == 0, expected)


def test_value_and_grad_gives_zeros_for_what_is_unused(group):
    f = fddp.value_and_grad(branching, group=group(4), find_unused_parameters=True)
    loss, grads = f(params(), batch(0, 0, 1, 1))
    np.testing.assert_allclose(loss, 1.5)
    np.testing.assert_allclose(grads["left"], np.full(3, 1 / 6), rtol=1e-6)
    np.testing.assert_array_equal(grads["never"], 0)


def test_finding_sends_nothing_more(make, group):
    plain = fddp.train_step(branching, OPTIMIZERS["adamw"], group=group(4))
    texts = []
    for step in (plain, make()):
        state = step.init(params())
        texts.append(step.lower(state, batch(0, 1, 1, 1)).compile().as_text())
    counts = [text.count(" all-reduce(") for text in texts]
    assert counts[0] == counts[1] > 0


def two_tasks(params: Any, batch: Any) -> Any:
    """A branch in Python: a batch of either task has a separate program."""
    hidden = batch["x"] * params["body"]
    return (
        jnp.mean((hidden * params["a"] - 1) ** 2)
        if "a" in batch
        else jnp.mean((hidden * params["b"] + 1) ** 2)
    )


TASKS = [
    {"x": np.ones((4, 3), np.float32), name: np.zeros(4, np.float32)}
    for name in ("a", "b", "a", "b")
]


@pytest.mark.parametrize("call", ["step", "no_sync"])
def test_a_batch_that_uses_what_the_first_had_no_path_to_is_refused(make, call):
    step = make(two_tasks)
    state, _ = step(
        step.init({name: np.ones(3, np.float32) for name in ("a", "b", "body")}), TASKS[0]
    )
    with pytest.raises(ValueError, match=r"the loss uses b, .*make one step for each kind"):
        (step if call == "step" else step.no_sync)(state, TASKS[1])


@pytest.mark.steps
@pytest.mark.parametrize("counted", [True, False], ids="counted={}".format)
def test_gradients_pending_under_the_other_option_are_refused(group: Any, counted: bool):
    step = fddp.train_step(
        lambda w, x: jnp.mean((w - x) ** 2),
        optax.sgd(0.1),
        group=group(1),
        find_unused_parameters=counted,
    )
    state, _ = step.no_sync(step.init(jnp.zeros(())), jnp.ones(2))
    other = step.with_options(find_unused_parameters=not counted)
    for call in (other, other.no_sync):
        with pytest.raises(ValueError, match=f"find_unused_parameters={counted}, .*synchronize"):
            call(state, jnp.ones(2))
    step(state, jnp.ones(2))
