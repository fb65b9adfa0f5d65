"""Replicas that train alone for some steps: held against plain loops over replicas, written out."""

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
from every_schedule import SCHEDULES
from problems import layer, of_fast
from truth import by_plain_jax

import fddp

close = partial(trees.close, atol=1e-13)

pytestmark = pytest.mark.steps

Groups = Callable[[int], fddp.Group]
DRAW = np.random.default_rng(5)
PARAMS = {"b": DRAW.normal(size=5), "w": DRAW.normal(size=(3, 5))}
ROWS = DRAW.normal(size=(40, 12, 3))  # a batch for each step


def oracle(
    n: int,
    steps: int,
    inner: optax.GradientTransformation,
    *,
    rate: float = 1.0,
    momentum: float = 0.0,
    nesterov: bool = False,
    every: int = 1,
    fragments: int = 1,
    delay: int = 0,
    mix: float = 0.0,
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Each replica by itself in plain JAX, the outer step in NumPy: shared parameters, and those of
    each replica."""
    shared = {name: np.array(x) for name, x in PARAMS.items()}
    own = [jax.tree.map(jnp.asarray, PARAMS) for _ in range(n)]
    moments, velocity = (
        [inner.init(p) for p in own],
        {name: np.zeros_like(x) for name, x in shared.items()},
    )
    # The gradient of the bias is ready first.
    parts = [["b", "w"]] if fragments == 1 else [["b"], ["w"]]
    for step in range(1, steps + 1):
        alone = step - delay
        due = [
            part
            for k, part in enumerate(parts)
            if alone > 0 and alone % every == k * every // fragments
        ]
        before = [dict(p) for p in own]
        for k, rows in enumerate(np.split(ROWS[step - 1], n)):
            updates, moments[k] = inner.update(jax.grad(layer)(own[k], rows), moments[k], own[k])
            own[k] = optax.apply_updates(own[k], updates)
        for name in [name for part in due for name in part]:
            sent = before if delay else own
            change = shared[name] - np.mean([p[name] for p in sent], axis=0)
            velocity[name] = momentum * velocity[name] + change
            shared[name] = shared[name] - rate * (
                change + momentum * velocity[name] if nesterov else velocity[name]
            )
            for p in own:
                p[name] = mix * p[name] + (1 - mix) * shared[name]
    return shared, own


def train(step: fddp.TrainStep, steps: int) -> tuple[fddp.TrainState, list[int]]:
    state, sent = step.init(PARAMS), []
    for k in range(steps):
        state, info = step(state, ROWS[k])
        sent.append(int(info.sent.sum()))
    return state, sent


NESTEROV = {"rate": 0.7, "momentum": 0.9, "nesterov": True}


def each(tree: Any) -> Any:
    """What each replica has, along a first dim."""
    return jax.tree.map(
        lambda x: x.parts.reshape(-1, *x.shape), tree, is_leaf=lambda x: hasattr(x, "copies")
    )


METHODS: dict[str, dict[str, Any]] = {
    "local SGD": {"every": 3},
    "SlowMo": {"every": 2, "rate": 0.8, "momentum": 0.6},
    "DiLoCo": NESTEROV | {"every": 4},
    **{
        f"streaming, delay {delay}, mix {mix}": NESTEROV
        | {"every": 3, "fragments": 2, "delay": delay, "mix": mix}
        for delay in (0, 1)
        for mix in (0.0, 0.5, 1.0)
    },
}


@pytest.mark.quick("streaming, delay 1, mix 0.5", "SlowMo", "DiLoCo", "streaming, delay 0, mix 1.0")
@pytest.mark.parametrize("method", METHODS)
def test_what_replicas_and_their_outer_optimizer_do_is_what_a_loop_over_them_does(
    group: Groups, x64: None, method: str
):
    chosen = dict(METHODS[method])
    outer = optax.sgd(
        chosen.pop("rate", 1.0), chosen.pop("momentum", None), chosen.pop("nesterov", False)
    )
    inner = optax.adamw(0.05)
    step = fddp.train_step(
        layer, fddp.local_steps(inner, outer=outer, **chosen), group=group(3), bucket_cap_mb=0
    )
    state, _ = train(step, 9)
    shared, own = oracle(3, 9, inner, **METHODS[method])
    close(state.opt_state.shared, shared)
    close(each(state.params), jax.tree.map(lambda *x: np.stack(x), *own))
    close(
        fddp.whole(state.params, group=group(3)), jax.tree.map(lambda *x: np.mean(x, axis=0), *own)
    )


@SCHEDULES
def test_under_every_schedule_it_is_the_same(group: Groups, x64: None, schedule: Any):
    chosen: Any = {"every": 2, "fragments": 2, "delay": 1, "mix": 0.5}
    step = fddp.train_step(
        layer,
        fddp.local_steps(optax.adamw(0.05), **chosen),
        group=group(3),
        bucket_cap_mb=0,
        schedule=schedule,
    )
    close(train(step, 6)[0].opt_state.shared, oracle(3, 6, optax.adamw(0.05), **chosen)[0])


def test_with_one_step_each_and_plain_descent_it_is_data_parallel_training(group: Groups):
    """Exactly, on dyadic rationals."""

    def loss(w: Any, x: Any) -> Any:
        return jnp.mean(0.5 * (x - w) ** 2)

    rows, ends = np.arange(16, dtype=np.float32), []
    for optimizer in (optax.sgd(0.5), fddp.local_steps(optax.sgd(0.5))):
        step = fddp.train_step(loss, optimizer, group=group(4))
        state = step.init(np.float32(3))
        for _ in range(4):
            state, _ = step(state, rows)
        ends.append(np.asarray(fddp.whole(state.params, group=group(4))))
    assert ends[0] == ends[1]


def test_before_it_starts_it_is_data_parallel_training_bit_for_bit(group: Groups):
    inner = optax.chain(optax.clip_by_global_norm(0.1), optax.adam(0.05))
    params, ends = jax.tree.map(np.float32, PARAMS), []
    for optimizer in (inner, fddp.local_steps(inner, every=2, start=3)):
        step = fddp.train_step(layer, optimizer, group=group(3))
        state, info = step(step.init(params), ROWS[0].astype(np.float32))
        for k in (1, 2):
            state, info = step(state, ROWS[k].astype(np.float32))
        ends.append((state.params, info.loss, info.sent))
    plain, (params, *told) = ends
    jax.tree.map(np.testing.assert_array_equal, tuple(told), plain[1:])
    jax.tree.map(
        lambda mine, all: np.testing.assert_array_equal(mine, np.stack([all] * 3)),
        each(params),
        plain[0],
    )
    jax.tree.map(np.testing.assert_array_equal, state.opt_state.shared, plain[0])
    assert int(step(state, ROWS[3].astype(np.float32))[1].sent.sum()) == 0


def test_one_replica_is_lookahead(group: Groups, x64: None):
    inner, rows = optax.sgd(0.1, momentum=0.9), ROWS[:, :4]
    step = fddp.train_step(
        layer, fddp.local_steps(inner, outer=optax.sgd(0.5), every=3), group=group(1)
    )
    state = step.init(PARAMS)
    for k in range(9):
        state, _ = step(state, rows[k])
    lookahead = optax.lookahead(inner, sync_period=3, slow_step_size=0.5)
    start = optax.LookaheadParams.init_synced(PARAMS)
    ahead = lambda params, x: layer(params.fast, x)  # noqa: E731
    both = by_plain_jax(ahead, of_fast(lookahead), start, rows[:9]).params
    close(state.opt_state.shared, both.slow)
    close(fddp.whole(state.params, group=group(1)), both.fast)


@pytest.mark.parametrize("island", [1, 2])
def test_diloco_takes_the_way_that_maxtext_has_written_out_by_hand(
    group: Groups, x64: None, island: int
):
    """A line through two points on each of two islands; its losses are in MaxText's
    `diloco_test.py`."""
    inputs = np.array([[[0.0, 1], [1, 0]], [[1, 0], [0, 1]]])
    labels = np.array([[[1.0], [2]], [[2], [3]]])

    def line(p: Any, batch: Any) -> Any:
        return jnp.mean((batch["x"] @ p["kernel"] + p["bias"] - batch["y"]) ** 2)

    outer = optax.sgd(1.0, momentum=0.9, nesterov=True)
    optimizer = fddp.local_steps(optax.sgd(0.1), outer=outer, every=3, island=island)
    step = fddp.train_step(line, optimizer, group=group(2 * island))
    state, losses = step.init({"kernel": np.array([[2.0], [1]]), "bias": np.ones(1)}), []
    for _ in range(4):
        mine = [jax.tree.map(lambda x, r=r: x[island * r], each(state.params)) for r in range(2)]
        losses.append([float(line(mine[r], {"x": inputs[r], "y": labels[r]})) for r in range(2)])
        state, _ = step(state, {"x": np.concatenate(inputs), "y": np.concatenate(labels)})
    # The last one is made there of parameters that were rounded to four digits.
    np.testing.assert_allclose(
        [first for first, _ in losses], [1.0, 0.49, 0.2401, 0.207545], atol=2e-6
    )
    np.testing.assert_allclose(np.mean(losses, axis=1), [1.0, 0.65, 0.4481, 0.574244], atol=5e-7)


def test_nothing_is_sent_between_synchronizations_and_a_fragment_at_most_in_a_step(group: Groups):
    n, params = 2, jax.tree.map(np.float32, PARAMS)
    tail, b, w = 4, 4 * 5, 4 * 15  # a weight goes with each fragment
    sent = {}
    for fragments, every, delay in ((1, 3, 0), (2, 3, 0), (2, 3, 1)):
        optimizer = fddp.local_steps(optax.sgd(0.1), every=every, fragments=fragments, delay=delay)
        step = fddp.train_step(layer, optimizer, group=group(n), bucket_cap_mb=0)
        state, told = step.init(params), []
        for k in range(7):
            state, info = step(state, ROWS[k].astype(np.float32))
            told.append(int(info.sent.sum()))
        sent[fragments, delay] = told
    # Of two replicas each sends as many bytes as a message has.
    whole = b + w + tail
    assert sent[1, 0] == [0, 0, whole, 0, 0, whole, 0]
    assert sent[2, 0] == [w + tail, 0, b + tail, w + tail, 0, b + tail, w + tail]
    assert sent[2, 1] == [0, *sent[2, 0][:-1]]


def test_a_schedule_says_when_to_synchronize(group: Groups):
    optimizer = fddp.local_steps(optax.sgd(0.1), every=lambda done: 1 if done < 4 else 3, start=2)
    step = fddp.train_step(layer, optimizer, group=group(2))
    state, sent = step.init(jax.tree.map(np.float32, PARAMS)), []
    for k in range(11):
        state, info = step(state, ROWS[k].astype(np.float32))
        sent.append(bool(info.sent.sum()))
    assert sent == [True] * 4 + [False, False, True] * 2 + [False]
    # Ranks compare what they were given by its name.
    assert repr(fddp.local_steps(optax.sgd(0.1), every=abs)).startswith(
        "LocalSteps(every=abs, start=0"
    )


def test_a_replica_weighs_as_much_as_it_has_trained_on(group: Groups, x64: None):
    def loss(w: Any, x: Any) -> Any:
        return fddp.Weighted(jnp.mean((x - w) ** 2), jnp.sum(x))

    step = fddp.train_step(loss, fddp.local_steps(optax.sgd(0.25), every=2), group=group(2))
    state, own = step.init(np.float64(0)), [0.0, 0.0]
    weights = [0.0, 0.0]
    for x in (np.array([1.0, 3.0]), np.array([2.0, 4.0])):
        state, _ = step(state, x)
        own = [w + 0.25 * 2 * (mine - w) for w, mine in zip(own, x)]
        weights = [weight + mine for weight, mine in zip(weights, x)]
    np.testing.assert_allclose(state.opt_state.shared, np.average(own, weights=weights), rtol=1e-12)


def test_buffers_are_each_replicas_own_and_their_mean_when_it_synchronizes(group: Groups):
    def loss(w: Any, x: Any, *, model_state: Any) -> Any:
        return jnp.mean((x - w) ** 2), ({"seen": model_state["seen"] + jnp.sum(x)}, None)

    step = fddp.train_step(loss, fddp.local_steps(optax.sgd(0.1), every=2), group=group(2))
    state = step.init(np.float32(0), model_state={"seen": np.float32(0)})
    state, _ = step(state, np.array([1, 3], np.float32))
    assert each(state.model_state)["seen"].tolist() == [1, 3]
    assert float(fddp.whole(state, group=group(2)).model_state["seen"]) == 2
    state, _ = step(state, np.array([1, 3], np.float32))
    assert each(state.model_state)["seen"].tolist() == [4, 4]


def test_accumulation_and_no_sync_come_before_a_replicas_own_step(group: Groups, x64: None):
    ends = []
    for micro_batches in (1, 2):
        optimizer = fddp.local_steps(optax.adam(0.05), every=2)
        step = fddp.train_step(layer, optimizer, group=group(2), accumulation_steps=micro_batches)
        state = step.init(PARAMS)
        for k in range(0, 6, 2):
            first, second = ROWS[k].reshape(2, 6, 3), ROWS[k + 1].reshape(2, 6, 3)
            if micro_batches == 2:
                state, _ = step(state, np.concatenate([first, second], axis=1).reshape(24, 3))
            else:
                state, _ = step.no_sync(state, ROWS[k])
                state, _ = step(state, ROWS[k + 1])
        ends.append((each(state.params), state.opt_state.shared))
    close(ends[0], ends[1])


def test_each_replica_lowers_a_scale_of_its_own(group: Groups):
    def loss(w: Any, x: Any) -> Any:
        return jnp.mean(w * x)

    step = fddp.train_step(
        loss, fddp.local_steps(fddp.dynamic_scale(optax.sgd(1.0)), every=2), group=group(2)
    )
    state, _ = step(step.init(np.float32(0)), np.array([1, np.inf], np.float32))
    scale = each(state.opt_state.inner.scale)
    assert scale[1] == scale[0] / 2
    state, _ = step(state, np.array([1, 1], np.float32))
    # -2 after two steps of one replica, -1 after one of the other, which skipped the first.
    np.testing.assert_allclose(state.opt_state.shared, (2 * -2 + 1 * -1) / 3, rtol=1e-6)


def test_a_wire_of_16_bits_carries_changes(group: Groups):
    optimizer = fddp.local_steps(optax.sgd(0.1), every=2)
    params, ends, sent = jax.tree.map(np.float32, PARAMS), [], list[int]()
    for hook in (None, fddp.hooks.bf16()):
        step = fddp.train_step(layer, optimizer, group=group(2), hook=hook)
        state, sent = step.init(params), []
        for k in range(4):
            state, info = step(state, ROWS[k].astype(np.float32))
            sent.append(int(info.sent.sum()))
        ends.append(state.opt_state.shared)
    close(*ends, rtol=1e-7, atol=1e-2)
    assert np.any(ends[0]["w"] != ends[1]["w"])
    assert [bool(n) for n in sent] == [False, True] * 2


def test_who_has_no_more_data_stays_as_he_was(group: Groups, x64: None):
    step = fddp.train_step(
        layer, fddp.local_steps(optax.sgd(0.1, momentum=0.9), every=4), group=group(2)
    )
    state, rows = step.init(PARAMS), ROWS[0][:4]
    state, _ = step(state, fddp.Joined(rows, np.ones(4), np.ones(4)))
    gone = np.array([1.0, 1, 0, 0])
    before = each(state.params)
    for divisor in (
        gone,
        np.ones(4),
    ):  # whether the others divide by all replicas, or by those that are left
        after, _ = step(jax.tree.map(jnp.copy, state), fddp.Joined(rows, gone, divisor))
        assert each(after.opt_state.weight).tolist() == [[2], [1]]
        after = each(after.params)
        np.testing.assert_array_equal(after["w"][1], before["w"][1])
        assert np.all(after["w"][0] != before["w"][0])


def test_a_checkpoint_between_synchronizations_goes_on_bit_for_bit(group: Groups, tmp_path: Path):
    def make(n: int) -> fddp.TrainStep:
        optimizer = fddp.local_steps(optax.adam(0.05), every=4, fragments=2, delay=1, start=1)
        return fddp.train_step(layer, optimizer, group=group(n), bucket_cap_mb=0)

    params, step = jax.tree.map(np.float32, PARAMS), make(2)
    state = step.init(params)
    for k in range(8):
        state, _ = step(state, ROWS[k].astype(np.float32))
        if k == 3:
            with fddp.Checkpoints(tmp_path / "saved", step, every=1) as checkpoints:
                checkpoints.save(state, now=True)
    again = make(2)
    with fddp.Checkpoints(tmp_path / "saved", again, every=1) as checkpoints:
        restored, _ = checkpoints.restore(again.init(params))
    for k in range(4, 8):
        restored, _ = again(restored, ROWS[k].astype(np.float32))
    jax.tree.map(np.testing.assert_array_equal, jax.tree.leaves(restored), jax.tree.leaves(state))
    other = make(3)
    with (
        fddp.Checkpoints(tmp_path / "saved", other, every=1) as checkpoints,
        pytest.raises(
            ValueError,
            match=r"params/w float32\[2, 3, 5\].*params/w float32\[3, 3, 5\].*as many, 2",
        ),
    ):
        checkpoints.restore(other.init(params))


def test_what_does_not_go_with_it_is_refused(group: Groups):
    def make(**options: Any) -> Any:
        optimizer = fddp.local_steps(optax.adam(0.1), **options.pop("local", {}))
        return fddp.train_step(layer, optimizer, group=group(2), **options)

    params = jax.tree.map(np.float32, PARAMS)
    with pytest.raises(ValueError, match="with a whole state"):
        make(shard="state")
    with pytest.raises(ValueError, match="cannot make 3 fragments of 2 buckets"):
        step = make(local={"every": 3, "fragments": 3}, bucket_cap_mb=0)
        step(step.init(params), ROWS[0].astype(np.float32))
    for wrong, message in (
        ({"every": 0}, "every must be a whole number of 1 or more, got 0"),
        ({"start": -1}, "start must be a whole number of 0 or more, got -1"),
        ({"delay": 2}, "delay must be 0 or 1, got 2"),
        ({"mix": 1.5}, "mix must be a number from 0 to 1, got 1.5"),
        ({"every": 2, "fragments": 3}, "no more than every"),
        (
            {"delay": 1},
            "delay=1 needs more than one step between two synchronizations, got every=1",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            fddp.local_steps(optax.sgd(0.1), **wrong)  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match="outer must be one of optax's optimizers, got float"):
        fddp.local_steps(optax.sgd(0.1), outer=0.7)  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match="cannot be a part of another optimizer"):
        nested: Any = fddp.local_steps(optax.sgd(0.1))
        step = fddp.train_step(layer, fddp.dynamic_scale(nested), group=group(2))
        step(step.init(params), ROWS[0].astype(np.float32))
    with pytest.raises(TypeError, match="divided among the replicas"):
        step = make()
        step.init(step.init(params).params)
    with pytest.raises(TypeError, match="asks for value_fn"):
        make(local={"outer": optax.lbfgs(0.1)})
    with pytest.raises(TypeError, match="a local_steps optimizer already"):
        fddp.local_steps(fddp.local_steps(optax.sgd(0.1)))  # pyright: ignore[reportArgumentType]
    plain = fddp.train_step(layer, optax.adam(0.1), group=group(2))
    with pytest.raises(ValueError, match=r"made without fddp\.local_steps"):
        plain(make().init(params), ROWS[0].astype(np.float32))
    with pytest.raises(ValueError, match=r"made with fddp\.local_steps"):
        make()(plain.init(params), ROWS[0].astype(np.float32))
    other = fddp.train_step(layer, fddp.local_steps(optax.adam(0.1)), group=group(3))
    with pytest.raises(
        ValueError, match=r"not in shards of 3 replicas, as a step with fddp\.local_steps has it"
    ):
        other(make().init(params), ROWS[0].astype(np.float32))


def test_changes_of_16_bits_bear_large_weights(group: Groups):
    def loss(w: Any, x: Any) -> Any:
        return fddp.Weighted(jnp.mean((x - w.astype(jnp.float32)) ** 2), 3000.0)

    step = fddp.train_step(loss, fddp.local_steps(optax.sgd(0.1), every=4), group=group(2))
    state = step.init(jnp.zeros((), jnp.float16))
    for _ in range(4):
        state, _ = step(state, np.ones(2, np.float32))
    np.testing.assert_allclose(np.float32(state.opt_state.shared), 1 - 0.8**4, rtol=1e-2)


def test_weighted_changes_of_many_steps_do_not_outgrow_float16(group: Groups):
    """1,000 tokens a step over 32 steps, times a change of about 1.5; in float32 it is the same
    mean."""
    rows = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float16)

    def trained(dtype: Any) -> np.ndarray:
        loss = lambda w, x: fddp.Weighted(jnp.mean((x @ w - 1.0) ** 2), 1_000.0)  # noqa: E731
        step = fddp.train_step(loss, fddp.local_steps(optax.sgd(0.1), every=32), group=group(2))
        state = step.init(jnp.ones(4, dtype))
        for _ in range(32):
            state, _ = step(state, rows)
        return np.asarray(state.opt_state.shared, np.float32)

    np.testing.assert_allclose(trained(jnp.float16), trained(jnp.float32), atol=2e-3)


def test_parameters_of_32_bits_synchronize_while_jax_goes_on_in_64(group: Groups, x64: None):
    params = jax.tree.map(np.float32, PARAMS)
    step = fddp.train_step(
        layer, fddp.local_steps(optax.sgd(0.1), every=3), group=group(2), bucket_cap_mb=0
    )
    state = step.init(params)
    for k in range(3):
        state, _ = step(state, ROWS[k].astype(np.float32))
    halves = np.split(ROWS[:3].astype(np.float32), 2, axis=1)
    own = [by_plain_jax(layer, optax.sgd(0.1), params, rows).params for rows in halves]
    close(state.opt_state.shared, jax.tree.map(lambda *x: np.mean(x, axis=0), *own), rtol=1e-5)


def test_what_a_later_step_cannot_do_fails_before_the_first_one(group: Groups):
    """A hook that first runs after 100 steps; the state is still there."""

    def apply(comm: Any, bucket: Any, memory: Any) -> Any:
        raise ArithmeticError("a hook that cannot be traced")

    hook = fddp.Hook(lambda leaf: (), apply)
    step = fddp.train_step(
        layer, fddp.local_steps(optax.sgd(0.1), every=100), group=group(2), hook=hook
    )
    state = step.init(PARAMS)
    with pytest.raises(ArithmeticError, match="cannot be traced"):
        step(state, ROWS[0])
    assert not any(x.is_deleted() for x in jax.tree.leaves(state))


SKIPPING: dict[str, tuple[Any, dict[str, Any]]] = {
    "skip_nonfinite": (optax.sgd(0.5), {"skip_nonfinite": True}),
    "dynamic_scale": (fddp.dynamic_scale(optax.sgd(0.5)), {}),
    "apply_if_finite": (optax.apply_if_finite(optax.sgd(0.5), 5), {}),
    "MultiSteps": (
        optax.MultiSteps(optax.sgd(0.5), 1, should_skip_update_fn=optax.skip_not_finite),
        {},
    ),
    "within": (
        optax.chain(optax.identity(), fddp.dynamic_scale(optax.apply_if_finite(optax.sgd(0.5), 5))),
        {},
    ),
}


@pytest.mark.parametrize("name", SKIPPING)
def test_who_skips_a_step_does_not_weigh_in_with_it(group: Groups, name: str):
    inner, options = SKIPPING[name]
    optimizer = fddp.local_steps(inner, every=2)
    step = fddp.train_step(lambda w, x: jnp.mean(w * x), optimizer, group=group(2), **options)
    state, _ = step(step.init(np.float32(0)), np.array([1, np.inf], np.float32))
    state, _ = step(state, np.array([1, 1], np.float32))
    # -1 after two steps, -0.5 after one.
    np.testing.assert_allclose(state.opt_state.shared, (2 * -1 + 1 * -0.5) / 3, rtol=1e-6)


def test_leaves_without_elements_are_put_together_too(group: Groups):
    step = fddp.train_step(
        lambda p, x: jnp.mean((x - p["w"]) ** 2), fddp.local_steps(optax.adam(0.1)), group=group(2)
    )
    state, _ = step(
        step.init({"w": np.float32(0), "none": np.zeros((0, 3), np.float32)}),
        np.ones(2, np.float32),
    )
    assert fddp.whole(state, group=group(2)).params["none"].shape == (0, 3)
