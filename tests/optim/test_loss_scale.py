"""A step is the same with a scale and without, where float16 has room for both.

PyTorch's GradScaler around DDP. Replicas agree on a step to skip because they look at the same
reduced gradients; ranks of real processes are in `on_ranks/guards.py`.
"""

from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
import trees
from every_schedule import SCHEDULES
from problems import product, rows, two_layers
from trees import same_bits

import fddp

close = partial(trees.close, rtol=1e-5, atol=1e-7)

RNG = np.random.default_rng(9)
PARAMS = {"w": np.float32(RNG.normal(size=(3, 8))), "head": np.float32(RNG.normal(size=8))}
X = RNG.normal(size=(24, 3)).astype(np.float32)


### A scale that changes nothing


# Remembers the gradients that it sees.
MEMORY = optax.GradientTransformation(
    lambda params: params, lambda updates, state, params=None: (updates, updates)
)


@pytest.mark.quick("3-overlap")
@pytest.mark.steps
@SCHEDULES
@pytest.mark.parametrize("replicas", [2, 3])
def test_a_scale_changes_nothing_that_anybody_sees(group, schedule, replicas):
    """Weighted, in micro-batches, over calls: the optimizer sees, and clips, gradients without a
    scale."""

    def loss(p: Any, x: Any) -> Any:
        return fddp.Weighted(two_layers(p, x), len(x) * jnp.abs(x[0, 0])), {"x": jnp.mean(x)}

    optimizer = optax.chain(MEMORY, optax.clip_by_global_norm(0.05), optax.sgd(0.1))
    options: Any = {
        "group": group(replicas),
        "schedule": schedule,
        "accumulation_steps": 2,
        "has_aux": True,
    }
    results = []
    for wrap in (lambda x: x, fddp.dynamic_scale):
        step = fddp.train_step(loss, wrap(optimizer), **options)
        state, call_info = step.no_sync(step.init(PARAMS), X[:12])
        state, info = step(state, X[12:])
        results.append((state, call_info, info))
    (plain, *call_info), (scaled, *scaled_call_info) = results
    assert call_info[1].skipped is None and not scaled_call_info[1].skipped
    scaled_call_info[1] = scaled_call_info[1]._replace(skipped=None)
    close(
        (scaled.params, scaled.opt_state.inner, scaled_call_info),
        (plain.params, plain.opt_state, call_info),
    )
    assert (float(scaled.opt_state.scale), int(scaled.opt_state.good_steps)) == (2.0**15, 1)
    moved = [
        np.float64(a) - b for a, b in zip(jax.tree.leaves(scaled.params), jax.tree.leaves(PARAMS))
    ]
    np.testing.assert_allclose(np.sqrt(sum(np.sum(x**2) for x in moved)), 0.05 * 0.1, rtol=1e-4)


@SCHEDULES
def test_a_scale_saves_gradients_that_float16_would_lose(group, schedule):
    tiny = 2.0**-26  # a quarter of float16's smallest number
    loss = fddp.mixed_precision(lambda w, x: product(w, x).astype(jnp.float32) * tiny, jnp.float16)
    results = []
    for optimizer in (optax.sgd(1.0), fddp.dynamic_scale(optax.sgd(1.0))):
        step = fddp.train_step(loss, optimizer, group=group(2), schedule=schedule)
        state, _ = step(step.init(np.float32(0)), rows(1, 3))
        results.append(float(state.params))
    assert results == [0, -2 * tiny]


def test_a_constant_scale_is_a_weight(group):
    tiny = 2.0**-26
    loss = fddp.mixed_precision(lambda w, x: product(w, x).astype(jnp.float32) * tiny, jnp.float16)
    static = lambda w, x: fddp.Weighted(loss(w, x), 2.0**15)  # noqa: E731
    value, grad = fddp.value_and_grad(static, group=group(2))(jnp.float32(1), rows(1, 3))
    assert (float(value), float(grad)) == (2 * tiny, 2 * tiny)


### A step that is skipped


def overflowing(w: Any, x: Any) -> jax.Array:
    """The gradient is x in float16: from a scale of 65,504 / x on it is infinite, the loss is
    not."""
    return product(w.astype(jnp.float16), x.astype(jnp.float16)).astype(jnp.float32)


@pytest.mark.steps
@SCHEDULES
@pytest.mark.parametrize("steps", [1, 2])
def test_a_replica_that_overflows_stops_all_and_leaves_every_bit(group, schedule, steps):
    loss = lambda p, x: overflowing(p["used"], x)  # noqa: E731
    decay = fddp.dynamic_scale(optax.adamw(0.5, weight_decay=0.5), initial=2.0**14)
    step = fddp.train_step(
        loss,
        decay,
        group=group(4),
        schedule=schedule,
        accumulation_steps=steps,
        donate=False,
        bucket_cap_mb=0,
    )
    # A zero has a sign, which would be lost by the addition of a zero.
    params = {"used": np.float32(0.25), "other": rows(0.0, -0.0, -1e-30)}
    start, _ = step(step.init(params), np.ones(8, np.float32))
    x = np.ones(8, np.float32)
    x[-1] = 16  # one replica, its last micro-batch
    state, info = step(start, x)
    same_bits((state.params, state.opt_state.inner), (start.params, start.opt_state.inner))
    assert (float(state.opt_state.scale), int(state.opt_state.good_steps)) == (2.0**13, 0)
    assert np.isfinite(info.loss) and int(state.step) == 2
    for _ in range(3):
        state, _ = step(state, x)
    # 2¹³ · 16 and 2¹² · 16 do not fit float16 (its largest is 65,504), micro-batches of two rows
    # halve it.
    assert float(state.params["used"]) < float(start.params["used"])


def normed(w: Any, x: Any, *, model_state: Any) -> Any:
    """Running statistics of the forward pass, in which a row may overflow float16."""
    hidden = w.astype(jnp.float16) * x.astype(jnp.float16)
    mean = jnp.mean(hidden).astype(jnp.float32)
    buffers = {"mean": 0.5 * model_state["mean"] + 0.5 * mean, "calls": model_state["calls"] + 1}
    return jnp.mean(hidden).astype(jnp.float32), (buffers, None)


SKIPPING = {
    "dynamic_scale": fddp.dynamic_scale(optax.sgd(1.0), initial=1.0),
    "apply_if_finite": optax.apply_if_finite(optax.sgd(1.0), 5),
    "MultiSteps": optax.MultiSteps(optax.sgd(1.0), 1, should_skip_update_fn=optax.skip_not_finite),
}


@pytest.mark.steps
@SCHEDULES
@pytest.mark.parametrize("buffers", [True, "mean", False], ids=str)
@pytest.mark.parametrize("name", SKIPPING)
def test_an_overflow_in_the_forward_pass_keeps_the_buffers_and_is_counted(
    group, capfd, name, buffers, schedule
):
    options: Any = {"broadcast_buffers": buffers, "schedule": schedule}
    step = fddp.train_step(normed, SKIPPING[name], group=group(2), **options)
    state = step.init(np.float32(1), model_state={"mean": np.float32(0), "calls": np.int32(0)})
    x = rows(1, 1)
    skipped = []
    for batch in (x, rows(7e4, 7e4), x):  # float16 ends at 65,504
        state, info = step(state, batch)
        skipped.append(bool(info.skipped))
    # The second step is skipped: w is 1, 0, -1, and the mean 0, 1/2, 1/4.
    assert float(state.params) == -1.0
    assert skipped == [False, True, False] and step.skips.count == 1
    for shard in state.model_state["mean"].addressable_shards:
        assert float(np.asarray(shard.data)) == 0.25
    assert int(state.model_state["calls"]) == 2 and int(state.step) == 3
    assert capfd.readouterr().err == ""


def test_info_skipped_is_none_where_no_step_can_be_skipped(group):
    optimizer = optax.MultiSteps(optax.sgd(1.0), 2).gradient_transformation()
    step = fddp.train_step(product, optimizer, group=group(2))
    assert step(step.init(np.float32(1)), rows(1, 1))[1].skipped is None


@SCHEDULES
def test_one_call_that_overflows_costs_all_since_the_last_synchronization(group, schedule):
    optimizer = fddp.dynamic_scale(optax.sgd(1.0), initial=2.0**14)
    step = fddp.train_step(overflowing, optimizer, group=group(2), schedule=schedule)
    state = step.init(np.float32(0))
    state, _ = step.no_sync(state, rows(1, 16))
    state, _ = step(state, rows(1, 1))
    assert (float(state.params), float(state.opt_state.scale)) == (0, 2.0**13)
    state, _ = step.no_sync(state, rows(1, 2))
    state, _ = step(state, rows(3, 4))
    assert float(state.params) == -2.5


def test_a_loss_that_is_no_number_stays_visible(group):
    step = fddp.train_step(
        lambda w, x: jnp.mean(jnp.sqrt(w * x)), fddp.dynamic_scale(optax.sgd(1.0)), group=group(2)
    )
    state, info = step(step.init(np.float32(1)), rows(1, -1))
    assert np.isnan(info.loss)
    assert float(state.params) == 1


def test_a_parameter_that_is_unused_stays_and_the_count_is_of_replicas(group):
    decay = fddp.dynamic_scale(optax.adamw(0.5, weight_decay=0.5))

    def loss(p: Any, x: Any) -> jax.Array:
        return jax.lax.cond(
            x[0] > 0, lambda: overflowing(p["a"], x), lambda: overflowing(p["b"], x)
        )

    step = fddp.train_step(loss, decay, group=group(2), find_unused_parameters=True, donate=False)
    start = step.init({name: np.float32(1) for name in "ab"})
    state, info = step(start, rows(1, 1))
    assert {name: int(n) for name, n in info.used.items()} == {"a": 2, "b": 0}
    moments = [state.opt_state.inner[0].mu, state.opt_state.inner[0].nu]
    assert [float(m["b"]) for m in moments] == [0, 0] and all(float(m["a"]) > 0 for m in moments)
    assert float(state.params["b"]) == 1 and float(state.params["a"]) < 1
    after, info = step(state, rows(16, -1))  # too much for a, which one replica uses
    assert {name: int(n) for name, n in info.used.items()} == {"a": 1, "b": 1}
    same_bits((after.params, after.opt_state.inner), (state.params, state.opt_state.inner))


### How it grows and shrinks


def test_a_scale_follows_the_rule_of_grad_scaler():
    """An oracle in Python, on a random sequence of good and bad steps."""
    optimizer = fddp.dynamic_scale(
        optax.sgd(1.0), initial=8.0, growth_interval=3, minimum=2.0, maximum=32.0
    )
    update = jax.jit(optimizer.update)
    state = optimizer.init(0.0)
    scale = 8.0
    good = 0
    scales = set()
    for finite in np.repeat(RNG.random(100) < 0.7, RNG.integers(1, 8, 100)):
        updates, state = update(jnp.float32(1.0 if finite else np.inf), state)
        good = good + 1 if finite else 0
        scale = scale if finite else max(scale / 2, 2.0)
        if good == 3:
            scale = min(scale * 2, 32.0)
            good = 0
        assert (float(state.scale), int(state.good_steps)) == (scale, good)
        assert float(updates) == (-1 if finite else 0)
        scales.add(scale)
    assert scales == {2.0, 4.0, 8.0, 16.0, 32.0}


@pytest.mark.steps
def test_float16_finds_its_scale_and_trains_as_float32_does(group):
    """The scale at the start is far too large."""
    plain = fddp.train_step(two_layers, optax.adam(0.02), group=group(2))
    optimizer = fddp.dynamic_scale(optax.adam(0.02), initial=2.0**24, growth_interval=10)
    half = fddp.train_step(fddp.mixed_precision(two_layers, jnp.float16), optimizer, group=group(2))
    states = [plain.init(PARAMS), half.init(PARAMS)]
    losses = []
    scales = []
    for _ in range(60):
        (states[0], exact) = plain(states[0], X)
        (states[1], info) = half(states[1], X)
        losses.append((float(exact.loss), float(info.loss)))
        scales.append(float(states[1].opt_state.scale))
    first = np.array(losses[0])
    last = np.array(losses[-1])
    skipped = 60 - int(states[1].opt_state.inner[0].count)
    assert skipped == np.sum(np.diff([2.0**24, *scales]) < 0) >= 8
    np.testing.assert_allclose(first[1], first[0], rtol=1e-2)
    assert last[0] < 0.2 * first[0] and last[1] < 0.3 * first[0]


### Where it stands


@pytest.mark.parametrize("place", ["chain", "partition"])
def test_a_scale_is_found_wherever_it_stands_in_the_optimizer(group, place):
    part = fddp.dynamic_scale(optax.sgd(1.0), initial=2.0**14)
    # Not behind `optax.clip`, which would make infinite values finite.
    optimizer: Any = {
        "chain": lambda: optax.chain(part, optax.scale(0.5), optax.scale(2.0)),
        "partition": lambda: optax.partition(
            {"half": part, "rest": optax.sgd(1.0)}, {"a": "half", "b": "rest"}
        ),
    }[place]()
    loss = lambda p, x: overflowing(p["a"], x) + jnp.mean(p["b"] * x)  # noqa: E731
    step = fddp.train_step(loss, optimizer, group=group(2))
    state = step.init({"a": np.float32(0), "b": np.float32(0)})
    state, _ = step(state, rows(1, 3))
    assert {name: float(x) for name, x in state.params.items()} == {"a": -2, "b": -2}
    state, _ = step(state, rows(2, 16))
    assert float(state.params["a"]) == -2


def test_checkpoints_hold_the_scale(group, tmp_path: Path):
    optimizer = fddp.dynamic_scale(optax.adam(0.1), initial=2.0**14, growth_interval=5)
    step = fddp.train_step(overflowing, optimizer, group=group(2), donate=False)
    fresh = step.init(np.float32(1))
    state, _ = step(fresh, rows(1, 16))
    state, _ = step(state, rows(1, 2))
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", state)
    with ocp.StandardCheckpointer() as checkpointer:
        restored = checkpointer.restore(tmp_path / "state", fresh)
    same_bits(restored, state)
    assert (float(restored.opt_state.scale), int(restored.opt_state.good_steps)) == (2.0**13, 1)
    same_bits(step(restored, rows(1, 2)), step(state, rows(1, 2)))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"initial": 0.0}, "0 < minimum ≤ initial ≤ maximum"),
        ({"initial": 2.0**25}, "initial=33554432.0"),
        ({"maximum": np.inf}, "all finite"),
        ({"minimum": np.nan}, "minimum=nan"),
        ({"factor": 1.0}, "above 1, got 1.0"),
        ({"growth_interval": 0}, "1 or more, got 0"),
        ({"growth_interval": True}, "1 or more, got True"),
    ],
)
def test_numbers_out_of_range_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        fddp.dynamic_scale(optax.sgd(1.0), **options)


def test_parameters_in_float16_are_refused_for_want_of_room(group):
    """GradScaler refuses them too: float16 cannot hold the quotient of such a gradient by its
    scale."""
    step = fddp.train_step(product, fddp.dynamic_scale(optax.sgd(1.0)), group=group(2))
    with pytest.raises(
        TypeError,
        match=r"'w' is float16; keep it in float32 and compute with fddp\.mixed_precision",
    ):
        step.init({"w": np.float16(1)})
