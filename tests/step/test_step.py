"""A training step keeps some arrays, gives others up, broadcasts buffers and folds keys."""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from problems import square
from trees import on_each_device, same_bits

import fddp
from fddp.jaxpr import refuse_deleted

pytestmark = pytest.mark.steps

X = np.arange(16, dtype=np.float32) / 8


@pytest.fixture
def make(group) -> Callable[..., fddp.TrainStep]:
    """`make(loss, optimizer, **options)`: a step on four replicas."""
    sgd = optax.sgd(0.25)
    return lambda loss=square, optimizer=sgd, **options: fddp.train_step(
        loss, optimizer, group=group(4), **options
    )


### Loss and metrics


@pytest.mark.parametrize(("n", "steps"), [(1, 1), (2, 1), (4, 1), (8, 1), (4, 2)])
def test_loss_and_metrics_are_means_over_all_rows(group, n, steps):
    loss = lambda w, x: (square(w, x), {"mean": jnp.mean(x), "parts": [jnp.mean(x**3), 0.5]})  # noqa: E731
    step = fddp.train_step(
        loss, optax.sgd(0.25), group=group(n), has_aux=True, accumulation_steps=steps
    )
    state, info = step(step.init(np.float32(0)), X)
    np.testing.assert_allclose(info.loss, np.mean(X**2), rtol=1e-6)
    np.testing.assert_allclose(info.aux["mean"], np.mean(X), rtol=1e-6)
    np.testing.assert_allclose(info.aux["parts"], np.array([np.mean(X**3), 0.5]), rtol=1e-6)
    np.testing.assert_allclose(state.params, 0.5 * np.mean(X), rtol=1e-6)
    assert len({x.tobytes() for x in on_each_device(info.loss)}) == 1


def test_losses_of_16_bits_are_averaged_in_32(make):
    step = make(lambda w, x: square(w, x).astype(jnp.bfloat16))
    _, info = step(
        step.init(np.float32(0)), np.sqrt(np.array([256, 0, 256, 0, 16, 16, 16, 16], np.float32))
    )
    # 128, 128, 16 and 16 on the replicas.
    assert info.loss.dtype == jnp.float32 and float(info.loss) == 72


### Buffers


def averaging(w: Any, x: Any, *, model_state: Any) -> Any:
    """A buffer that keeps a running mean of the rows it sees, and enters the loss."""
    mean = 0.5 * model_state["mean"] + jnp.mean(x)
    return square(w, x) + mean, ({"mean": mean, "count": model_state["count"] + 1}, None)


def start() -> dict[str, Any]:
    return {"mean": np.float32(0), "count": np.int32(2**24)}


def test_buffers_are_those_of_replica_0_at_the_next_forward(make):
    step = make(averaging)
    state = step.init(np.float32(0), model_state=start())
    first = np.mean(X[:4])
    local_means = [np.mean(X[k : k + 4]) for k in (0, 4, 8, 12)]
    for mean, count in ((first, 2**24 + 1), (1.5 * first, 2**24 + 2)):
        before = state.model_state["mean"]
        w = state.params
        expected = (
            np.mean((X - np.asarray(w)) ** 2) + 0.5 * np.asarray(before) + np.mean(local_means)
        )
        state, info = step(state, X)
        np.testing.assert_allclose(on_each_device(state.model_state["mean"]), [mean] * 4, rtol=1e-6)
        assert on_each_device(state.model_state["count"]) == [count] * 4
        np.testing.assert_allclose(info.loss, expected, rtol=1e-6)


def test_without_broadcasts_every_replica_keeps_its_own_buffers(make):
    step = make(averaging, broadcast_buffers=False)
    state = step.init(np.float32(0), model_state=start())
    local_means = np.array([np.mean(X[k : k + 4]) for k in (0, 4, 8, 12)])
    for factor in (1, 1.5, 1.75):
        state, _ = step(state, X)
        np.testing.assert_allclose(
            on_each_device(state.model_state["mean"]), factor * local_means, rtol=1e-6
        )


def test_buffers_go_through_micro_batches_and_no_sync_in_order(make):
    step = make(averaging, accumulation_steps=2)
    state, _ = step.no_sync(step.init(np.float32(0), model_state=start()), X)
    same_bits(state.model_state, start())  # each replica's own are pending
    state, _ = step(state, X)
    mean = 0.0
    for part in (X[:2], X[2:4], X[:2], X[2:4]):
        mean = 0.5 * mean + np.mean(part)
    np.testing.assert_allclose(on_each_device(state.model_state["mean"]), [mean] * 4, rtol=1e-6)
    assert int(state.model_state["count"]) == 2**24 + 4


### Random keys


def noting(w: Any, x: Any, *, model_state: Any, rng: Any) -> Any:
    """Records the key of each call."""
    keys = model_state["keys"]
    at = model_state["at"]
    return square(w, x), ({"keys": keys.at[at].set(jax.random.key_data(rng)), "at": at + 1}, None)


def test_keys_are_folded_with_step_then_micro_batch_then_replica(make):
    step = make(noting, broadcast_buffers=False, accumulation_steps=2)
    notes = {"keys": np.zeros((6, 2), np.uint32), "at": np.int32(0)}
    rng = jax.random.key(5)
    state = step.init(np.float32(0), model_state=notes, rng=rng)
    state, _ = step(state, X)  # step 0: micro-batches 0, 1
    state, _ = step.no_sync(state, X)  # step 1: 0, 1
    state, _ = step(state, X)  # still step 1: 2, 3
    keys = on_each_device(state.model_state["keys"])
    fold = jax.random.fold_in
    for replica in range(4):
        expected = [
            jax.random.key_data(fold(fold(fold(rng, number), micro), replica))
            for number, micro in ((0, 0), (0, 1), (1, 0), (1, 1), (1, 2), (1, 3))
        ]
        same_bits(keys[replica], np.stack(expected))
    assert len(np.unique(np.concatenate(keys), axis=0)) == 24
    same_bits(jax.random.key_data(state.rng), jax.random.key_data(rng))


@pytest.mark.parametrize("key", [jax.random.key, jax.random.PRNGKey], ids=["typed", "raw"])
def test_the_same_key_gives_the_same_run(make, key):
    step = make(
        lambda w, x, *, rng: square(w, x * jax.random.bernoulli(rng, shape=x.shape)), donate=False
    )
    runs = []
    for seed in (0, 0, 1):
        state = step.init(np.float32(0), rng=key(seed))
        for _ in range(2):
            state, _ = step(state, X)
        runs.append(float(state.params))
    assert runs[0] == runs[1] != runs[2]


### Memory


def test_a_step_gives_up_the_state_but_never_what_the_user_passed_to_init(make):
    loss = lambda w, x, *, model_state, rng: (square(w["a"], x), (model_state, None))  # noqa: E731
    step = make(loss, optax.adam(0.1))
    inputs: Any = ({"a": jnp.float32(1)}, jnp.ones(2), jax.random.key(1))
    state = step.init(inputs[0], model_state=inputs[1], rng=inputs[2])
    after, _ = step(state, X)
    assert all(x.is_deleted() for x in jax.tree.leaves((state.params, state.opt_state)))
    assert not any(x.is_deleted() for x in jax.tree.leaves((inputs, after)))
    assert float(inputs[0]["a"]) == 1


def test_without_donation_a_state_can_be_used_again(make):
    step = make(optimizer=optax.adam(0.1), donate=False)
    state = step.init(np.float32(0))
    same_bits(step(state, X), step(state, X))
    once, _ = step.no_sync(state, X)
    twice, _ = step.no_sync(once, X)
    assert not any(x.is_deleted() for x in jax.tree.leaves((state, once, twice)))
    same_bits(step.no_sync(once, X), (twice, step.no_sync(once, X)[1]))


def test_a_used_up_state_that_numpy_still_looks_at_is_no_other(group):
    """Arrays that NumPy looks at stay, on the first device only."""
    step = fddp.train_step(square, optax.adam(0.1), group=group(4))
    state, _ = step(step.init(np.ones(16, np.float32)), X[:, None])
    views = jax.tree.map(np.asarray, state)
    later, _ = step(state, X[:, None])
    for call in (refuse_deleted, lambda state: step(state, X[:, None])):
        with pytest.raises(ValueError, match=r"this state is used up.*donate=False"):
            call(state)
    step(later, X[:, None])
    assert int(views.step) == 1


@pytest.mark.parametrize("n", [1, 4])
@pytest.mark.parametrize("schedule", ["overlap", "after"])
def test_a_used_up_state_is_an_error_that_names_donate(group, n, schedule):
    step = fddp.train_step(square, optax.adam(0.1), group=group(n), schedule=schedule)
    state = step.init(np.ones(16, np.float32))
    later, _ = step(state, X[:, None])
    for call in (
        step,
        step.no_sync,
        lambda state, x: fddp.measure(step, state, [x]),
    ):
        with pytest.raises(ValueError, match=r"this state is used up.*donate=False"):
            call(state, X[:, None])
    step(later, X[:, None])


@pytest.mark.parametrize("schedule", ["overlap", "after"])
def test_numbers_and_arrays_that_a_user_puts_into_a_state_are_taken(make, schedule):
    optimizer = optax.inject_hyperparams(optax.adam)(learning_rate=0.1)
    step = make(optimizer=optimizer, schedule=schedule, donate=False)
    state, _ = step(step.init(np.ones(16, np.float32)), X[:, None])
    state.opt_state.hyperparams["learning_rate"] = jnp.asarray(0.5)
    expected = step(state, X[:, None])
    device = jax.devices()[2]  # not the first replica's
    same = {
        "a number": state._replace(
            opt_state=state.opt_state._replace(
                hyperparams=state.opt_state.hyperparams | {"learning_rate": 0.5}
            )
        ),
        "NumPy": jax.tree.map(np.asarray, state),
        "one device": jax.tree.map(lambda x: jax.device_put(np.asarray(x), device), state),
        "one array": state._replace(params=np.asarray(state.params)),
    }
    assert same["a number"].opt_state.hyperparams["learning_rate"] == 0.5
    for case_name, same_state in same.items():
        assert jax.tree.structure(same_state) == jax.tree.structure(state), case_name
        same_bits(step(same_state, X[:, None]), expected)
        accumulated, _ = step.no_sync(same_state, X[:, None])
        assert accumulated.accumulated is not None, case_name


def test_value_and_grad_leaves_its_arguments_alone(group):
    w = jnp.float32(1)
    x = jnp.asarray(X)
    f = fddp.value_and_grad(square, group=group(4))
    same_bits(f(w, x), f(w, x))
    assert not w.is_deleted() and not x.is_deleted()
    with pytest.raises(ValueError, match="does not work with donate=True"):
        fddp.value_and_grad(square, group=group(4), donate=True)


def keeping(average: Callable[[Any, Any], Any]) -> optax.GradientTransformation:
    """An optimizer whose state is made of the parameters themselves."""

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        updates = jax.tree.map(lambda g: -0.25 * g, updates)
        return updates, jax.tree.map(average, state, optax.apply_updates(params, updates))

    return optax.GradientTransformation(lambda params: params, update)


@pytest.mark.parametrize(
    ("average", "expected"),
    [
        (lambda buffer, new: 0.5 * buffer + 0.5 * new, 0.6875),
        (lambda buffer, new: new, 0.875),
        (lambda buffer, new: buffer, 0.0),
    ],
    ids=["average", "new", "first"],
)
def test_an_optimizer_may_keep_the_parameters(make, average, expected):
    step = make(optimizer=keeping(average))
    state = step.init(np.float32(0))
    for _ in range(3):
        state, _ = step(state, np.ones(4, np.float32))
    assert (float(state.params), float(state.opt_state)) == (0.875, expected)


### State


def test_integers_and_flags_among_the_parameters_are_left_untouched(make):
    params = {
        "w": np.float32(0),
        "count": np.int32(2**24 + 1),
        "mask": np.array([True, False]),
        "none": None,
    }
    step = make(lambda p, x: square(p["w"], x * p["mask"][0]), optax.adamw(0.1, weight_decay=0.1))
    state, _ = step(step.init(params), X)
    same_bits(
        {k: state.params[k] for k in ("count", "mask", "none")},
        {k: params[k] for k in ("count", "mask", "none")},
    )
    assert state.params["w"] != 0 and step.plan.buckets[0].names == ("w",)


@pytest.mark.parametrize("hosted", [False, True], ids=["on devices", "as numpy arrays"])
def test_a_state_taken_apart_and_put_together_goes_on_the_same(make, hosted):
    step = make(averaging, optax.adam(0.1), donate=False)
    state, _ = step(step.init(np.float32(0), model_state=start()), X)
    state, _ = step.no_sync(state, X)
    leaves, treedef = jax.tree.flatten(state)
    copy = jax.tree.unflatten(treedef, [np.asarray(x) for x in leaves] if hosted else leaves)
    assert isinstance(copy, fddp.TrainState)
    same_bits(step(copy, X), step(state, X))


def test_a_state_counts_synchronized_steps(make):
    step = make()
    state = step.init(np.float32(0))
    assert step.plan.buckets[0].names == ("",)
    for call, expected in ((step, 1), (step.no_sync, 1), (step, 2)):
        state, _ = call(state, X)
        assert int(state.step) == expected


### Memory of first arguments


@pytest.mark.parametrize("schedule", ["overlap", "after"])
def test_a_step_does_not_hold_the_memory_of_its_first_batch(schedule: Any):
    step = fddp.train_step(
        lambda w, x: jnp.mean((x - w) ** 2),
        optax.sgd(0.1),
        group=fddp.mesh_group(jax.make_mesh((1,), ("replica",), devices=jax.devices()[:1])),
        schedule=schedule,
    )
    state = step.init(jnp.zeros(()))
    batch = np.ones(8, np.float32)
    first = weakref.ref(batch)
    state, _ = step(state, batch)
    del batch
    state, _ = step(state, np.zeros(8, np.float32))
    jax.block_until_ready(state.params)
    gc.collect()
    assert first() is None


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"shard": "state"},
        {"schedule": "after"},
        {"schedule": "after", "shard": "state"},
        {"virtual_replicas": 4},
    ],
    ids=str,
)
def test_nor_that_of_its_first_state(group: Any, options: Any):
    step = fddp.train_step(
        lambda w, x: jnp.mean((x - w) ** 2),
        optax.adam(0.1),
        group=group(4),
        donate=False,
        **options,
    )
    state = step.init(jnp.zeros(8))
    first = list(map(weakref.ref, jax.tree.leaves(state)))
    for _ in range(2):
        state, _ = step(state, np.ones((8, 8), np.float32))
    jax.block_until_ready(jax.tree.leaves(state))
    gc.collect()
    assert [array() for array in first] == [None] * len(first)
