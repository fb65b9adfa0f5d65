"""Both schedules on one process; several processes are in test_train_step and on_ranks/."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tiers import crossed

import fddp
from fddp import hooks
from models import bert, gpt, mlp, resnet

pytestmark = pytest.mark.steps

CAPS: dict[str, Any] = {"bucket_cap_mb": 0.02, "first_bucket_mb": 0.005, "last_bucket_mb": 0.005}


def problem(module, preset="tiny", rows=8):
    model = module.PRESETS[preset]
    batch = module.batch(model, rows)
    params, model_state = module.init(model, jax.random.key(0), batch)
    return module.loss_fn(model), params, model_state, batch


SLOW = [pytest.param(module, marks=pytest.mark.slow) for module in (resnet, bert, gpt)]


@pytest.mark.parametrize("module", [mlp, *SLOW], ids=lambda m: m.__name__)
def test_after_gives_what_overlap_gives(group, module):
    loss_fn, params, model_state, batch = problem(module)
    results = {}
    for schedule in ("overlap", "after"):
        step = fddp.train_step(
            loss_fn,
            optax.sgd(0.05, 0.9),
            group=group(2),
            has_aux=True,
            schedule=schedule,
            accumulation_steps=2,
            **CAPS,
        )
        state = step.init(params, model_state=model_state)
        for _ in range(3):
            state, _ = step(state, batch)
        state, _ = step.no_sync(state, batch)
        state, info = step(state, batch)
        results[schedule] = (state.params, state.model_state, info.loss)
        assert len(step.plan.buckets) > 1
    for got, want in zip(jax.tree.leaves(results["after"]), jax.tree.leaves(results["overlap"])):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5 * float(jnp.abs(want).max()))


### All features at once

# A feature's own file claims its effect, under "overlap".
FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "parts": {"shard": "state"},
    "a hook and averaged buffers": {
        "hook": hooks.quantize(block=4),
        "broadcast_buffers": "mean",
    },
}


def everything(params: Any, batch: Any, *, model_state: Any, rng: Any) -> Any:
    """Draws of its own and in common, a branch, dtypes and an empty leaf, few rows, weights,
    buffers and metrics."""
    x = (
        batch["x"]
        + 0.1 * jax.random.normal(rng["own"], batch["x"].shape)
        + jax.random.uniform(rng["common"])
    )
    hidden = jnp.tanh((x - model_state["mean"]) @ params["first"]) * params["half"].astype(x.dtype)
    hidden += params["table"][batch["row"]]
    wave = jnp.real(jnp.fft.fft(hidden) * params["wave"]) + jnp.sum(params["empty"])
    branches = [
        lambda: jnp.mean(wave * params["left"]),
        lambda: jnp.mean(wave * params["right"]),
        lambda: 0.0,
    ]
    value = jnp.mean(wave**2) + jax.lax.switch(batch["choice"][0], branches)
    new = {
        "mean": 0.9 * model_state["mean"] + 0.1 * jnp.mean(jnp.clip(x, -9, 9)),
        "calls": model_state["calls"] + 1,
    }
    return fddp.Weighted(value, jnp.sum(jnp.abs(batch["x"]))), (new, {"wave": jnp.mean(wave)})


def params_of_everything(rows: int) -> Any:
    rng = np.random.default_rng(2)
    return {
        "first": rng.normal(size=(3, 4)),
        "half": jnp.asarray(rng.normal(size=4), jnp.bfloat16),
        "wave": rng.normal(size=4) + 1j * rng.normal(size=4),
        "left": np.float32(rng.normal(size=4)),
        "right": np.float32(rng.normal(size=4)),
        "empty": np.zeros((0, 2), np.float32),
        "table": rng.normal(size=(rows, 4)),
        "never": np.ones(3, np.float32),
        "count": np.int32(3),
        "ignored": np.ones(2, np.float32),
    }


def batches_of_everything() -> list[fddp.Joined]:
    """The first call is of no_sync; in the third a number overflows, in the last one replica has
    run out of data."""
    rng = np.random.default_rng(3)
    batches = []
    for number, choices in enumerate([(0, 0), (0, 1), (1, 1), (2, 2), (0, 2)]):
        x = rng.normal(size=(8, 3))
        choice = np.repeat(np.array(choices, np.int32), 4)
        if number == 2:
            x[5] = np.inf
        share = np.ones(8) if number < 4 else np.repeat([1.0, 0.0], 4)
        rows = {"x": x, "choice": choice, "row": np.arange(8) * (number + 1)}
        batches.append(fddp.Joined(rows, share, share, np.arange(8) == 0))
    return batches


def trained_with_everything(replicas: fddp.Group, schedule: Any, features: dict[str, Any]) -> Any:
    """The state after each step, as arrays, and the steps' reports."""
    clipped = optax.chain(
        optax.clip_by_global_norm(0.5), optax.add_decayed_weights(0.1), optax.sgd(0.1, momentum=0.9)
    )
    step = fddp.train_step(
        everything,
        fddp.dynamic_scale(clipped, initial=4.0),
        group=replicas,
        has_aux=True,
        schedule=schedule,
        accumulation_steps=2,
        bucket_cap_mb=0,
        find_unused_parameters=True,
        ignore=lambda path: path == "ignored",
        **features,
    )
    # A hook gets whole gradients, and rounds them: of few numbers.
    state = step.init(
        params_of_everything(64 if "hook" in features else 4096),
        model_state={"mean": np.zeros(()), "calls": np.int32(2**24)},
        rng={"own": jax.random.key(0), "common": fddp.Shared(jax.random.key(1))},
    )
    first, *remaining = batches_of_everything()
    state, call_info = step.no_sync(state, first)
    results: list[Any] = [
        call_info._replace(sent=None)
    ]  # leaves that are not exact in 16 bits travel in another bucket
    for batch in remaining:
        state, info = step(state, batch)
        results += [jax.device_get(state._replace(rng=None)), info._replace(sent=None)]
    return results


def assert_as_near_as_dtypes_are(got: Any, expected: Any) -> None:
    got = np.asarray(got)
    expected = np.asarray(expected)
    assert (got.shape, got.dtype) == (expected.shape, expected.dtype)
    if jnp.issubdtype(got.dtype, jnp.inexact) and got.size:
        wide = np.complex128 if jnp.iscomplexobj(got) else np.float64
        got, expected, eps = (
            got.astype(wide),
            expected.astype(wide),
            float(jnp.finfo(got.dtype).eps),
        )
        # A hook's residual is a difference of numbers of about 1.
        np.testing.assert_allclose(
            got, expected, rtol=16 * eps, atol=16 * eps * max(1, np.max(np.abs(expected)))
        )
    else:
        np.testing.assert_array_equal(got, expected)


@pytest.mark.quick("parts")
@pytest.mark.parametrize("features", FEATURES)
def test_with_all_features_at_once_after_gives_what_overlap_gives(group, x64, features):
    overlapping, waiting = (
        trained_with_everything(group(2), schedule, FEATURES[features])
        for schedule in ("overlap", "after")
    )
    assert [float(state.opt_state.scale) for state in overlapping[1::2]] == [4, 2, 2, 2], (
        "one step overflows"
    )
    used = [
        {name: int(info.used[name]) for name in ("left", "right", "never")}
        for info in overlapping[2::2]
    ]
    assert used[0] == {"left": 2, "right": 1, "never": 0} and used[2] == {
        "left": 0,
        "right": 0,
        "never": 0,
    }
    assert jax.tree.structure(waiting) == jax.tree.structure(overlapping)
    jax.tree.map(assert_as_near_as_dtypes_are, waiting, overlapping)


### Special cases


def test_a_step_uses_the_memory_of_the_state_it_was_given(group):
    loss_fn, params, _, batch = problem(mlp)
    step = fddp.train_step(loss_fn, optax.adamw(0.1), group=group(1), has_aux=True, **CAPS)
    state = step.init(params)
    new, _ = step(state, batch)
    deleted = [x.is_deleted() for x in jax.tree.leaves((state.params, state.opt_state)) if x.ndim]
    assert all(deleted) and not any(x.is_deleted() for x in jax.tree.leaves(new))


def test_a_step_of_one_program_says_that_it_has_no_timeline(group):
    step = fddp.train_step(lambda w, x: jnp.mean((x - w) ** 2), optax.sgd(0.1), group=group(2))
    step(step.init(jnp.zeros(())), jnp.ones(4))
    with pytest.raises(ValueError, match="XLA sends this step's messages"):
        step.timeline()


def test_where_devices_share_a_processs_cores_a_step_has_ended_when_the_next_begins(group):
    """All threads of XLA:CPU would wait in all-reduces of different steps, with none left for a
    device."""
    step = fddp.train_step(lambda w, x: jnp.mean((x @ w) ** 2), optax.sgd(0.1), group=group(4))
    state = step.init(jnp.ones((512, 512)))
    for _ in range(3):
        state, info = step(state, np.ones((64, 512), np.float32))
        assert all(x.is_ready() for x in jax.tree.leaves((state, info)))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"hook": hooks.bf16()},
        {"find_unused_parameters": True},
    ],
    ids=["plain", "hook", "unused"],
)
def test_a_step_keeps_64_bits(group, x64, options):
    def loss(p, x):
        return jnp.mean((x @ p["a"]) ** 2) + jax.lax.cond(
            x[0, 0] > 9, lambda: jnp.sum(p["b"]), lambda: 0.0
        )

    step = fddp.train_step(loss, optax.sgd(0.1), group=group(2), bucket_cap_mb=0, **options)
    state, info = step(step.init({"a": np.full((3, 1), 1 / 3), "b": np.ones(2)}), np.ones((4, 3)))
    assert info.loss.dtype == np.float64
    # The sum of three thirds is 1, its square's gradient 2, which 16 bits hold.
    np.testing.assert_allclose(state.params["a"], np.full((3, 1), 1 / 3 - 0.2), rtol=1e-14)
    np.testing.assert_array_equal(state.params["b"], np.ones(2))


@crossed(
    options={"plain": {}, "hook": {"hook": hooks.bf16()}},
    schedule=["overlap", "after"],
    n=[1, 2],
)
def test_a_step_makes_no_transfer_that_nobody_asked_for(group, n, schedule, options):
    step = fddp.train_step(
        lambda w, x: jnp.mean((x - w) ** 2),
        optax.sgd(0.5),
        group=group(n),
        schedule=schedule,
        **options,
    )
    state = step.init(np.zeros(()))
    rows = group(n).placement.place(np.full(4, 2.0), group(n).placement.per_replica)
    with jax.transfer_guard("disallow"):
        for _ in range(2):
            state, _ = step(state, rows)
    assert float(state.params) == 2


def test_without_jit_a_step_runs_as_jax_runs_it(group):
    def loss(w, x):
        return jnp.mean((x - w) ** 2)

    for schedule in ("overlap", "after"):
        step = fddp.train_step(loss, optax.sgd(0.5), group=group(1), schedule=schedule)
        state, _ = step(step.init(np.float32(0)), np.full(2, 2.0, np.float32))
        with jax.disable_jit():
            state, _ = step(state, np.full(2, 4.0, np.float32))
        assert float(state.params) == 4
        state, _ = step(state, np.full(2, 8.0, np.float32))
        assert float(state.params) == 8


def test_a_schedule_without_a_name_in_the_list_is_refused():
    with pytest.raises(
        ValueError, match="schedule must be one of auto, overlap, after, eager, got 3"
    ):
        fddp.Options(schedule=3)  # pyright: ignore[reportArgumentType]


def test_an_error_inside_the_backward_pass_reaches_the_caller(group):
    def explode(_):
        raise RuntimeError("inside the backward pass")

    def loss_fn(w, x):
        jax.debug.callback(explode, w[0])
        return jnp.mean((x - w) ** 2)

    step = fddp.train_step(loss_fn, optax.sgd(0.1), group=group(1))
    with pytest.raises(Exception, match="inside the backward pass"):
        state, info = step(step.init(jnp.zeros(3)), jnp.ones((4, 3)))
        jax.block_until_ready((state, info))
        jax.effects_barrier()


@pytest.mark.steps
@pytest.mark.parametrize("schedule", ["overlap", "after"])
def test_a_loss_may_hold_collectives_under_every_schedule(group, schedule):
    def loss_fn(w, x):
        return jnp.mean((x - jax.lax.pmean(jnp.mean(x), "replica") - w) ** 2)

    step = fddp.train_step(loss_fn, optax.sgd(0.1), group=group(2), schedule=schedule)
    _, info = step(step.init(jnp.ones(())), jnp.arange(4.0))
    np.testing.assert_allclose(info.loss, np.mean((np.arange(4.0) - 1.5 - 1) ** 2), rtol=1e-6)
