"""Replicas that train separately for some steps: compared with plain loops over replicas."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import trees
from problems import layer, of_fast_params
from truth import by_plain_jax

import fddp

close = partial(trees.close, atol=1e-13)

pytestmark = pytest.mark.steps

Groups = Callable[[int], fddp.Group]
DRAW = np.random.default_rng(5)
PARAMS = {"b": DRAW.normal(size=5), "w": DRAW.normal(size=(3, 5))}
ROWS = DRAW.normal(size=(40, 12, 3))  # a batch for each step
FLOAT32 = jax.tree.map(np.float32, PARAMS)
ROWS_32 = ROWS.astype(np.float32)


def by_loops(
    n: int,
    steps: int,
    inner: optax.GradientTransformation,
    *,
    rate: float = 1.0,
    momentum: float = 0.0,
    nesterov: bool = False,
    every: int = 1,
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Each replica by itself in plain JAX, the outer step in NumPy: shared parameters, and those of
    each replica."""
    shared = {name: np.array(x) for name, x in PARAMS.items()}
    local = [jax.tree.map(jnp.asarray, PARAMS) for _ in range(n)]
    moments = [inner.init(p) for p in local]
    velocity = {name: np.zeros_like(x) for name, x in shared.items()}
    for step in range(1, steps + 1):
        for k, rows in enumerate(np.split(ROWS[step - 1], n)):
            grads = jax.grad(layer)(local[k], rows)
            updates, moments[k] = inner.update(grads, moments[k], local[k])
            local[k] = optax.apply_updates(local[k], updates)
        if step % every:
            continue
        for name in shared:
            change = shared[name] - np.mean([p[name] for p in local], axis=0)
            velocity[name] = momentum * velocity[name] + change
            ahead = change + momentum * velocity[name]
            shared[name] = shared[name] - rate * (ahead if nesterov else velocity[name])
        local = [dict(shared) if step % every == 0 else p for p in local]
    return shared, local


def train(step: fddp.TrainStep, params: Any, batches: Any) -> tuple[fddp.TrainState, list[int]]:
    state = step.init(params)
    nbytes = []
    for rows in batches:
        state, info = step(state, rows)
        nbytes.append(int(info.sent.sum()))
    return state, nbytes


def stacked(trees: Any) -> Any:
    return jax.tree.map(lambda *x: np.stack(x), *trees)


METHODS: dict[str, dict[str, Any]] = {
    "local SGD": {"every": 3},
    "SlowMo": {"every": 2, "rate": 0.8, "momentum": 0.6},
    "DiLoCo": {"every": 4, "rate": 0.7, "momentum": 0.9, "nesterov": True},
}


@pytest.mark.parametrize("method", METHODS)
def test_replicas_and_their_outer_optimizer_do_what_a_loop_over_them_does(
    group: Groups, x64: None, method: str
):
    chosen = dict(METHODS[method])
    outer = optax.sgd(
        chosen.pop("rate", 1.0), chosen.pop("momentum", None), chosen.pop("nesterov", False)
    )
    inner = optax.adamw(0.05)
    optimizer = fddp.local_steps(inner, outer=outer, **chosen)
    step = fddp.train_step(layer, optimizer, group=group(3), bucket_cap_mb=0)
    state, _ = train(step, PARAMS, ROWS[:9])
    shared, local = by_loops(3, 9, inner, **METHODS[method])
    close(state.params, shared)
    close(fddp.whole(state.opt_state.params, group=group(3)), stacked(local))


def test_with_several_buckets_it_is_the_same(group: Groups, x64: None):
    optimizer = fddp.local_steps(optax.adamw(0.05), every=2)
    step = fddp.train_step(layer, optimizer, group=group(3), bucket_cap_mb=0)
    close(train(step, PARAMS, ROWS[:6])[0].params, by_loops(3, 6, optax.adamw(0.05), every=2)[0])


def test_with_one_step_each_and_plain_descent_it_is_data_parallel_training(group: Groups):
    """Exactly, on dyadic rationals."""

    def loss(w: Any, x: Any) -> Any:
        return jnp.mean(0.5 * (x - w) ** 2)

    rows = [np.arange(16, dtype=np.float32)] * 4
    plain, local = (
        train(fddp.train_step(loss, optimizer, group=group(4)), np.float32(3), rows)[0].params
        for optimizer in (optax.sgd(0.5), fddp.local_steps(optax.sgd(0.5)))
    )
    assert float(plain) == float(local)


def test_before_it_starts_it_is_data_parallel_training_bit_for_bit(group: Groups):
    inner = optax.chain(optax.clip_by_global_norm(0.1), optax.adam(0.05))
    steps = [
        fddp.train_step(layer, optimizer, group=group(3))
        for optimizer in (inner, fddp.local_steps(inner, every=2, start=3))
    ]
    (plain, plain_bytes), (state, nbytes) = (train(step, FLOAT32, ROWS_32[:3]) for step in steps)
    jax.tree.map(np.testing.assert_array_equal, state.params, plain.params)
    local = fddp.whole(state.opt_state.params, group=group(3))
    jax.tree.map(np.testing.assert_array_equal, local, stacked([plain.params] * 3))
    assert nbytes == plain_bytes
    assert int(steps[1](state, ROWS_32[3])[1].sent.sum()) == 0


def test_one_replica_is_lookahead(group: Groups, x64: None):
    inner = optax.sgd(0.1, momentum=0.9)
    rows = ROWS[:8, :4]
    optimizer = fddp.local_steps(inner, outer=optax.sgd(0.5), every=3)
    state, _ = train(fddp.train_step(layer, optimizer, group=group(1)), PARAMS, rows)
    lookahead = optax.lookahead(inner, sync_period=3, slow_step_size=0.5)
    start = optax.LookaheadParams.init_synced(PARAMS)
    ahead = lambda params, x: layer(params.fast, x)  # noqa: E731
    both = by_plain_jax(ahead, of_fast_params(lookahead), start, rows).params
    close(state.params, both.slow)
    close(fddp.whole(state.opt_state.params, group=group(1)), stacked([both.fast]))


def test_diloco_has_the_losses_that_maxtext_has_written_out(group: Groups, x64: None):
    """A line through two points on each of two replicas; its losses are in MaxText's
    `diloco_test.py`."""
    inputs = np.array([[[0.0, 1], [1, 0]], [[1, 0], [0, 1]]])
    labels = np.array([[[1.0], [2]], [[2], [3]]])

    def line(p: Any, batch: Any) -> Any:
        return jnp.mean((batch["x"] @ p["kernel"] + p["bias"] - batch["y"]) ** 2)

    outer = optax.sgd(1.0, momentum=0.9, nesterov=True)
    step = fddp.train_step(
        line, fddp.local_steps(optax.sgd(0.1), outer=outer, every=3), group=group(2)
    )
    state = step.init({"kernel": np.array([[2.0], [1]]), "bias": np.ones(1)})
    losses = []
    for _ in range(4):
        local = fddp.whole(state.opt_state.params, group=group(2))
        by_replica = jax.vmap(line)(local, {"x": inputs, "y": labels})
        losses.append(np.asarray(by_replica))
        state, _ = step(state, {"x": np.concatenate(inputs), "y": np.concatenate(labels)})
    # MaxText computes the last loss from parameters rounded to four digits.
    first = [1.0, 0.49, 0.2401, 0.207545]
    np.testing.assert_allclose([x[0] for x in losses], first, atol=2e-6)
    mean = [1.0, 0.65, 0.4481, 0.574244]
    np.testing.assert_allclose(np.mean(losses, axis=1), mean, atol=5e-7)


def test_a_step_sends_nothing_until_an_exchange_sends_as_much_as_an_ordinary_step(group: Groups):
    step = fddp.train_step(layer, optax.sgd(0.1), group=group(2))
    _, (ordinary,) = train(step, FLOAT32, ROWS_32[:1])
    step = fddp.train_step(
        layer, fddp.local_steps(optax.sgd(0.1), every=3, start=1), group=group(2)
    )
    _, nbytes = train(step, FLOAT32, ROWS_32[:8])
    assert nbytes == [ordinary, 0, 0, ordinary, 0, 0, ordinary, 0]


def test_an_exchange_reports_the_mean_loss_and_a_local_step_that_of_replica_0(group: Groups):
    def loss(w: Any, x: Any) -> Any:
        return jnp.mean(w * x), {"largest": jnp.max(x)}

    step = fddp.train_step(
        loss, fddp.local_steps(optax.sgd(0.0), every=2), group=group(2), has_aux=True
    )
    state = step.init(np.float32(1))
    state, info = step(state, np.array([1, 3], np.float32))
    assert (float(info.loss), float(info.aux["largest"])) == (1, 1)
    state, info = step(state, np.array([1, 3], np.float32))
    assert (float(info.loss), float(info.aux["largest"])) == (2, 2)


@pytest.mark.parametrize(("rule", "seen"), [(True, 2), ("mean", 4), (False, 2)])
def test_buffers_are_each_replicas_own_until_an_exchange_treats_them_by_the_rule(
    group: Groups, rule: Any, seen: float
):
    def loss(w: Any, x: Any, *, model_state: Any) -> Any:
        return jnp.mean((x - w) ** 2), ({"seen": model_state["seen"] + jnp.sum(x)}, None)

    optimizer = fddp.local_steps(optax.sgd(0.1), every=2)
    step = fddp.train_step(loss, optimizer, group=group(2), broadcast_buffers=rule)
    state = step.init(np.float32(0), model_state={"seen": np.float32(0)})
    on_each = lambda x: [float(shard.data) for shard in x.addressable_shards]  # noqa: E731
    state, _ = step(state, np.array([1, 3], np.float32))
    assert on_each(state.model_state["seen"]) == [1, 3]
    state, _ = step(state, np.array([1, 3], np.float32))
    assert on_each(state.model_state["seen"]) == [seen, 6 if rule is False else seen]


def test_accumulation_comes_before_a_replicas_own_step(group: Groups, x64: None):
    optimizer = fddp.local_steps(optax.adam(0.05), every=2)
    once, twice = (
        fddp.train_step(layer, optimizer, group=group(2), accumulation_steps=count)
        for count in (1, 2)
    )
    states = [train(step, PARAMS, ROWS[:4])[0] for step in (once, twice)]
    close(*(fddp.whole(state, group=group(2)).opt_state.params for state in states))


SKIPPING: dict[str, tuple[Any, dict[str, Any]]] = {
    "skip_nonfinite": (optax.sgd(0.5), {"skip_nonfinite": True}),
    "dynamic_scale": (fddp.dynamic_scale(optax.sgd(0.5)), {}),
    "apply_if_finite": (optax.apply_if_finite(optax.sgd(0.5), 5), {}),
}


@pytest.mark.parametrize("name", SKIPPING)
def test_a_replica_skips_a_step_by_itself(group: Groups, name: str):
    inner, options = SKIPPING[name]
    optimizer = fddp.local_steps(inner, every=2)
    step = fddp.train_step(lambda w, x: jnp.mean(w * x), optimizer, group=group(2), **options)
    rows = np.array([[1, np.inf], [1, 1]], np.float32)
    state, _ = train(step, np.float32(0), rows)
    # -1 after two steps, -0.5 after one.
    np.testing.assert_allclose(state.params, (-1 + -0.5) / 2, rtol=1e-6)
    if name == "dynamic_scale":
        scale = fddp.whole(state.opt_state.inner.scale, group=group(2))
        assert scale[1] == scale[0] / 2


def test_a_wire_of_16_bits_carries_changes(group: Groups):
    optimizer = fddp.local_steps(optax.sgd(0.1), every=2)
    plain, rounded = (
        train(fddp.train_step(layer, optimizer, group=group(2), hook=hook), FLOAT32, ROWS_32[:4])[
            0
        ].params
        for hook in (None, fddp.hooks.bf16())
    )
    close(plain, rounded, rtol=1e-7, atol=1e-2)
    assert np.any(plain["w"] != rounded["w"])


def test_each_replica_draws_keys_of_its_own(group: Groups):
    loss = lambda w, x, *, rng: jnp.mean(w * x) * jax.random.uniform(rng)  # noqa: E731
    step = fddp.train_step(loss, fddp.local_steps(optax.sgd(1.0), every=9), group=group(3))
    state = step.init(np.float32(0), rng=jax.random.key(0))
    state, _ = step(state, np.ones(3, np.float32))
    assert len(set(fddp.whole(state.opt_state.params, group=group(3)).tolist())) == 3


def test_frozen_and_empty_leaves_stay_as_they_are(group: Groups):
    def loss(p: Any, x: Any) -> Any:
        return jnp.mean((x - p["w"] - p["frozen"]) ** 2)

    params = {"w": np.float32(0), "frozen": np.float32(1), "none": np.zeros((0, 3), np.float32)}
    step = fddp.train_step(
        loss,
        fddp.local_steps(optax.adam(0.1)),
        group=group(2),
        ignore=lambda name: name == "frozen",
    )
    state, _ = train(step, params, [np.ones(2, np.float32)] * 2)
    assert float(state.params["frozen"]) == 1 and state.opt_state.params["frozen"] is None
    assert fddp.whole(state.opt_state, group=group(2)).params["none"].shape == (2, 0, 3)


def test_another_period_continues_from_the_same_state(group: Groups, x64: None):
    first, second = (
        fddp.train_step(layer, fddp.local_steps(optax.sgd(0.1), every=every), group=group(2))
        for every in (2, 3)
    )
    state, _ = train(first, PARAMS, ROWS[:2])
    for rows in ROWS[2:5]:
        state, _ = second(state, rows)
    _, info = second(state, ROWS[5])
    assert int(info.sent.sum()) > 0  # step 6


def test_a_checkpoint_between_exchanges_continues_bit_for_bit(group: Groups, tmp_path: Path):
    def make(n: int) -> fddp.TrainStep:
        optimizer = fddp.local_steps(optax.adam(0.05), every=4, start=1)
        return fddp.train_step(layer, optimizer, group=group(n))

    step = make(2)
    state, _ = train(step, FLOAT32, ROWS_32[:4])
    with fddp.Checkpoints(tmp_path / "saved", step, every=1) as checkpoints:
        checkpoints.save(state, now=True)
    second = make(2)
    with fddp.Checkpoints(tmp_path / "saved", second, every=1) as checkpoints:
        restored, _ = checkpoints.restore(second.shapes(FLOAT32))
    for rows in ROWS_32[4:8]:
        state, _ = step(state, rows)
        restored, _ = second(restored, rows)
    jax.tree.map(np.testing.assert_array_equal, jax.tree.leaves(restored), jax.tree.leaves(state))
    third = make(3)
    other = r"opt_state/params/w float32\[2, 3, 5\].*opt_state/params/w float32\[3, 3, 5\]"
    with (
        fddp.Checkpoints(tmp_path / "saved", third, every=1) as checkpoints,
        pytest.raises(ValueError, match=other),
    ):
        checkpoints.restore(third.init(FLOAT32))


def test_an_argument_out_of_its_range_is_refused_in_words():
    for wrong, message in (
        ({"every": 0}, "every must be a whole number of 1 or more, got 0"),
        ({"every": 1.5}, "every must be a whole number of 1 or more, got 1.5"),
        ({"start": -1}, "start must be a whole number of 0 or more, got -1"),
    ):
        with pytest.raises(ValueError, match=message):
            fddp.local_steps(optax.sgd(0.1), **wrong)  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match="outer must be one of optax's optimizers, got float"):
        fddp.local_steps(optax.sgd(0.1), outer=0.7)  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match="a local_steps optimizer already"):
        fddp.local_steps(fddp.local_steps(optax.sgd(0.1)))  # pyright: ignore[reportArgumentType]


def test_an_optimizer_or_a_state_that_does_not_fit_is_refused_in_words(group: Groups):
    def make(n: int = 2, **local: Any) -> fddp.TrainStep:
        return fddp.train_step(layer, fddp.local_steps(optax.adam(0.1), **local), group=group(n))

    with pytest.raises(TypeError, match="cannot be a part of another optimizer"):
        nested: Any = fddp.local_steps(optax.sgd(0.1))
        step = fddp.train_step(layer, fddp.dynamic_scale(nested), group=group(2))
        step(step.init(FLOAT32), ROWS_32[0])
    with pytest.raises(TypeError, match="needs value_fn"):
        make(outer=optax.lbfgs(0.1))
    plain = fddp.train_step(layer, optax.adam(0.1), group=group(2))
    with pytest.raises(ValueError, match="belongs to another optimizer"):
        plain(make().init(FLOAT32), ROWS_32[0])
    with pytest.raises(ValueError, match="belongs to another optimizer"):
        make()(plain.init(FLOAT32), ROWS_32[0])
    with pytest.raises(ValueError, match=r"params/b float32\[2, 5\].*params/b float32\[3, 5\]"):
        make(3)(make().init(FLOAT32), ROWS_32[0])
