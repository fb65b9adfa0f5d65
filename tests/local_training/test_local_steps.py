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
from problems import layer, of_fast_params
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
    local = [jax.tree.map(jnp.asarray, PARAMS) for _ in range(n)]
    moments = [inner.init(p) for p in local]
    velocity = {name: np.zeros_like(x) for name, x in shared.items()}
    # The gradient of the bias is ready first.
    fragment_names = [["b", "w"]] if fragments == 1 else [["b"], ["w"]]
    for step in range(1, steps + 1):
        local_count = step - delay
        due = [
            part
            for k, part in enumerate(fragment_names)
            if local_count > 0 and local_count % every == k * every // fragments
        ]
        before = [dict(p) for p in local]
        for k, rows in enumerate(np.split(ROWS[step - 1], n)):
            updates, moments[k] = inner.update(
                jax.grad(layer)(local[k], rows), moments[k], local[k]
            )
            local[k] = optax.apply_updates(local[k], updates)
        for name in [name for part in due for name in part]:
            snapshot = before if delay else local
            change = shared[name] - np.mean([p[name] for p in snapshot], axis=0)
            velocity[name] = momentum * velocity[name] + change
            shared[name] = shared[name] - rate * (
                change + momentum * velocity[name] if nesterov else velocity[name]
            )
            for p in local:
                p[name] = mix * p[name] + (1 - mix) * shared[name]
    return shared, local


def train(step: fddp.TrainStep, steps: int) -> tuple[fddp.TrainState, list[int]]:
    state = step.init(PARAMS)
    nbytes = []
    for k in range(steps):
        state, info = step(state, ROWS[k])
        nbytes.append(int(info.sent.sum()))
    return state, nbytes


NESTEROV = {"rate": 0.7, "momentum": 0.9, "nesterov": True}


def values_of_replicas(tree: Any) -> Any:
    """The values of each replica, along a first dim."""
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
    shared, local = oracle(3, 9, inner, **METHODS[method])
    close(state.opt_state.shared, shared)
    close(values_of_replicas(state.params), jax.tree.map(lambda *x: np.stack(x), *local))
    close(
        fddp.whole(state.params, group=group(3)),
        jax.tree.map(lambda *x: np.mean(x, axis=0), *local),
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

    rows = np.arange(16, dtype=np.float32)
    results = []
    for optimizer in (optax.sgd(0.5), fddp.local_steps(optax.sgd(0.5))):
        step = fddp.train_step(loss, optimizer, group=group(4))
        state = step.init(np.float32(3))
        for _ in range(4):
            state, _ = step(state, rows)
        results.append(np.asarray(fddp.whole(state.params, group=group(4))))
    assert results[0] == results[1]


def test_before_it_starts_it_is_data_parallel_training_bit_for_bit(group: Groups):
    inner = optax.chain(optax.clip_by_global_norm(0.1), optax.adam(0.05))
    params = jax.tree.map(np.float32, PARAMS)
    results = []
    for optimizer in (inner, fddp.local_steps(inner, every=2, start=3)):
        step = fddp.train_step(layer, optimizer, group=group(3))
        state, info = step(step.init(params), ROWS[0].astype(np.float32))
        for k in (1, 2):
            state, info = step(state, ROWS[k].astype(np.float32))
        results.append((state.params, info.loss, info.sent))
    plain, (params, *reports) = results
    jax.tree.map(np.testing.assert_array_equal, tuple(reports), plain[1:])
    jax.tree.map(
        lambda copies, all: np.testing.assert_array_equal(copies, np.stack([all] * 3)),
        values_of_replicas(params),
        plain[0],
    )
    jax.tree.map(np.testing.assert_array_equal, state.opt_state.shared, plain[0])
    assert int(step(state, ROWS[3].astype(np.float32))[1].sent.sum()) == 0


def test_one_replica_is_lookahead(group: Groups, x64: None):
    inner = optax.sgd(0.1, momentum=0.9)
    rows = ROWS[:, :4]
    step = fddp.train_step(
        layer, fddp.local_steps(inner, outer=optax.sgd(0.5), every=3), group=group(1)
    )
    state = step.init(PARAMS)
    for k in range(9):
        state, _ = step(state, rows[k])
    lookahead = optax.lookahead(inner, sync_period=3, slow_step_size=0.5)
    start = optax.LookaheadParams.init_synced(PARAMS)
    ahead = lambda params, x: layer(params.fast, x)  # noqa: E731
    both = by_plain_jax(ahead, of_fast_params(lookahead), start, rows[:9]).params
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
    state = step.init({"kernel": np.array([[2.0], [1]]), "bias": np.ones(1)})
    losses = []
    for _ in range(4):
        local = [
            jax.tree.map(lambda x, r=r: x[island * r], values_of_replicas(state.params))
            for r in range(2)
        ]
        losses.append([float(line(local[r], {"x": inputs[r], "y": labels[r]})) for r in range(2)])
        state, _ = step(state, {"x": np.concatenate(inputs), "y": np.concatenate(labels)})
    # MaxText computes the last loss from parameters rounded to four digits.
    np.testing.assert_allclose(
        [first for first, _ in losses], [1.0, 0.49, 0.2401, 0.207545], atol=2e-6
    )
    np.testing.assert_allclose(np.mean(losses, axis=1), [1.0, 0.65, 0.4481, 0.574244], atol=5e-7)


def test_nothing_is_sent_between_synchronizations_and_a_fragment_at_most_in_a_step(group: Groups):
    n = 2
    params = jax.tree.map(np.float32, PARAMS)
    tail = 4  # the weight of a fragment
    b = 4 * 5
    w = 4 * 15
    nbytes = {}
    for fragments, every, delay in ((1, 3, 0), (2, 3, 0), (2, 3, 1)):
        optimizer = fddp.local_steps(optax.sgd(0.1), every=every, fragments=fragments, delay=delay)
        step = fddp.train_step(layer, optimizer, group=group(n), bucket_cap_mb=0)
        state = step.init(params)
        step_bytes = []
        for k in range(7):
            state, info = step(state, ROWS[k].astype(np.float32))
            step_bytes.append(int(info.sent.sum()))
        nbytes[fragments, delay] = step_bytes
    # Of two replicas each sends as many bytes as a message has.
    total = b + w + tail
    assert nbytes[1, 0] == [0, 0, total, 0, 0, total, 0]
    assert nbytes[2, 0] == [w + tail, 0, b + tail, w + tail, 0, b + tail, w + tail]
    assert nbytes[2, 1] == [0, *nbytes[2, 0][:-1]]


def test_a_schedule_says_when_to_synchronize(group: Groups):
    optimizer = fddp.local_steps(optax.sgd(0.1), every=lambda count: 1 if count < 4 else 3, start=2)
    step = fddp.train_step(layer, optimizer, group=group(2))
    state = step.init(jax.tree.map(np.float32, PARAMS))
    synchronized = []
    for k in range(11):
        state, info = step(state, ROWS[k].astype(np.float32))
        synchronized.append(bool(info.sent.sum()))
    assert synchronized == [True] * 4 + [False, False, True] * 2 + [False]
    # Ranks compare arguments by their names.
    assert repr(fddp.local_steps(optax.sgd(0.1), every=abs)).startswith(
        "LocalSteps(every=abs, start=0"
    )


def test_a_replica_weighs_as_much_as_it_has_trained_on(group: Groups, x64: None):
    def loss(w: Any, x: Any) -> Any:
        return fddp.Weighted(jnp.mean((x - w) ** 2), jnp.sum(x))

    step = fddp.train_step(loss, fddp.local_steps(optax.sgd(0.25), every=2), group=group(2))
    state = step.init(np.float64(0))
    local = [0.0, 0.0]
    weights = [0.0, 0.0]
    for x in (np.array([1.0, 3.0]), np.array([2.0, 4.0])):
        state, _ = step(state, x)
        local = [w + 0.25 * 2 * (value - w) for w, value in zip(local, x)]
        weights = [weight + value for weight, value in zip(weights, x)]
    np.testing.assert_allclose(
        state.opt_state.shared, np.average(local, weights=weights), rtol=1e-12
    )


def test_buffers_are_each_replicas_own_and_their_mean_when_it_synchronizes(group: Groups):
    def loss(w: Any, x: Any, *, model_state: Any) -> Any:
        return jnp.mean((x - w) ** 2), ({"seen": model_state["seen"] + jnp.sum(x)}, None)

    step = fddp.train_step(loss, fddp.local_steps(optax.sgd(0.1), every=2), group=group(2))
    state = step.init(np.float32(0), model_state={"seen": np.float32(0)})
    state, _ = step(state, np.array([1, 3], np.float32))
    assert values_of_replicas(state.model_state)["seen"].tolist() == [1, 3]
    assert float(fddp.whole(state, group=group(2)).model_state["seen"]) == 2
    state, _ = step(state, np.array([1, 3], np.float32))
    assert values_of_replicas(state.model_state)["seen"].tolist() == [4, 4]


def test_accumulation_and_no_sync_come_before_a_replicas_own_step(group: Groups, x64: None):
    results = []
    for micro_batches in (1, 2):
        optimizer = fddp.local_steps(optax.adam(0.05), every=2)
        step = fddp.train_step(layer, optimizer, group=group(2), accumulation_steps=micro_batches)
        state = step.init(PARAMS)
        for k in range(0, 6, 2):
            first = ROWS[k].reshape(2, 6, 3)
            second = ROWS[k + 1].reshape(2, 6, 3)
            if micro_batches == 2:
                state, _ = step(state, np.concatenate([first, second], axis=1).reshape(24, 3))
            else:
                state, _ = step.no_sync(state, ROWS[k])
                state, _ = step(state, ROWS[k + 1])
        results.append((values_of_replicas(state.params), state.opt_state.shared))
    close(results[0], results[1])


def test_each_replica_lowers_a_scale_of_its_own(group: Groups):
    def loss(w: Any, x: Any) -> Any:
        return jnp.mean(w * x)

    step = fddp.train_step(
        loss, fddp.local_steps(fddp.dynamic_scale(optax.sgd(1.0)), every=2), group=group(2)
    )
    state, _ = step(step.init(np.float32(0)), np.array([1, np.inf], np.float32))
    scale = values_of_replicas(state.opt_state.inner.scale)
    assert scale[1] == scale[0] / 2
    state, _ = step(state, np.array([1, 1], np.float32))
    # -2 after two steps of one replica, -1 after one of the other, which skipped the first.
    np.testing.assert_allclose(state.opt_state.shared, (2 * -2 + 1 * -1) / 3, rtol=1e-6)


def test_a_wire_of_16_bits_carries_changes(group: Groups):
    optimizer = fddp.local_steps(optax.sgd(0.1), every=2)
    params = jax.tree.map(np.float32, PARAMS)
    results = []
    nbytes = list[int]()
    for hook in (None, fddp.hooks.bf16()):
        step = fddp.train_step(layer, optimizer, group=group(2), hook=hook)
        state = step.init(params)
        nbytes = []
        for k in range(4):
            state, info = step(state, ROWS[k].astype(np.float32))
            nbytes.append(int(info.sent.sum()))
        results.append(state.opt_state.shared)
    close(*results, rtol=1e-7, atol=1e-2)
    assert np.any(results[0]["w"] != results[1]["w"])
    assert [bool(n) for n in nbytes] == [False, True] * 2


def test_who_has_no_more_data_stays_as_he_was(group: Groups, x64: None):
    step = fddp.train_step(
        layer, fddp.local_steps(optax.sgd(0.1, momentum=0.9), every=4), group=group(2)
    )
    state = step.init(PARAMS)
    rows = ROWS[0][:4]
    state, _ = step(state, fddp.Joined(rows, np.ones(4), np.ones(4)))
    active = np.array([1.0, 1, 0, 0])
    before = values_of_replicas(state.params)
    for divisor in (
        active,
        np.ones(4),
    ):  # whether the others divide by all replicas, or by those that are left
        after, _ = step(jax.tree.map(jnp.copy, state), fddp.Joined(rows, active, divisor))
        assert values_of_replicas(after.opt_state.weight).tolist() == [[2], [1]]
        after = values_of_replicas(after.params)
        np.testing.assert_array_equal(after["w"][1], before["w"][1])
        assert np.all(after["w"][0] != before["w"][0])


def test_a_checkpoint_between_synchronizations_goes_on_bit_for_bit(group: Groups, tmp_path: Path):
    def make(n: int) -> fddp.TrainStep:
        optimizer = fddp.local_steps(optax.adam(0.05), every=4, fragments=2, delay=1, start=1)
        return fddp.train_step(layer, optimizer, group=group(n), bucket_cap_mb=0)

    params = jax.tree.map(np.float32, PARAMS)
    step = make(2)
    state = step.init(params)
    for k in range(8):
        state, _ = step(state, ROWS[k].astype(np.float32))
        if k == 3:
            with fddp.Checkpoints(tmp_path / "saved", step, every=1) as checkpoints:
                checkpoints.save(state, now=True)
    second_step = make(2)
    with fddp.Checkpoints(tmp_path / "saved", second_step, every=1) as checkpoints:
        restored, _ = checkpoints.restore(second_step.init(params))
    for k in range(4, 8):
        restored, _ = second_step(restored, ROWS[k].astype(np.float32))
    jax.tree.map(np.testing.assert_array_equal, jax.tree.leaves(restored), jax.tree.leaves(state))
    third_step = make(3)
    with (
        fddp.Checkpoints(tmp_path / "saved", third_step, every=1) as checkpoints,
        pytest.raises(
            ValueError,
            match=r"params/w float32\[30\].*params/w float32\[45\].*"
            "the same number of replicas, 2",
        ),
    ):
        checkpoints.restore(third_step.init(params))


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
    larger = fddp.train_step(layer, fddp.local_steps(optax.adam(0.1)), group=group(3))
    with pytest.raises(
        ValueError, match=r"not in shards of 3 replicas, as a step with fddp\.local_steps has it"
    ):
        larger(make().init(params), ROWS[0].astype(np.float32))


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
    local = [by_plain_jax(layer, optax.sgd(0.1), params, rows).params for rows in halves]
    close(state.opt_state.shared, jax.tree.map(lambda *x: np.mean(x, axis=0), *local), rtol=1e-5)


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
