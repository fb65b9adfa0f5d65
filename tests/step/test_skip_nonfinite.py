"""Steps with gradients that are not finite change nothing on any replica, and their origin is
named."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from every_schedule import SCHEDULES

import fddp
from fddp.jax_internals import find_collectives, parse

START = {"bias": np.zeros(3, np.float32), "root": np.ones((), np.float32)}
WELL = np.full((4, 3), 0.5, np.float32)
ILL = np.array([[1, 1, 1]] * 3 + [[0, 1, 1]], np.float32)


def loss_fn(params: Any, x: Any, *, model_state: Any) -> Any:
    """The loss is finite, but the derivative by `root` is infinite for a row that begins with 0;
    BatchNorm's mean moves too."""
    loss = jnp.mean(jnp.sqrt(params["root"] * x[:, 0])) + jnp.mean((params["bias"] - x) ** 2)
    return loss, (0.9 * model_state + jnp.mean(x), None)


def make(group: fddp.Group, **options: Any) -> tuple[fddp.TrainStep, fddp.TrainState]:
    settings: Any = {"skip_nonfinite": True, "bucket_cap_mb": 0} | options
    step = fddp.train_step(loss_fn, optax.adamw(0.1), group=group, **settings)
    return step, step.init(START, model_state=np.float32(0))


def bits(state: fddp.TrainState) -> list[bytes]:
    leaves = jax.tree.leaves(state._replace(step=None))
    return [np.asarray(shard.data).tobytes() for x in leaves for shard in x.addressable_shards]


@pytest.mark.steps
@SCHEDULES
@pytest.mark.parametrize("accumulation_steps", [1, 2])
def test_training_goes_on_as_if_the_batch_had_not_been(
    group: Any, schedule: str, accumulation_steps: int
):
    results = []
    for batches in ([WELL, ILL, 2 * WELL], [WELL, 2 * WELL]):
        step, state = make(group(2), schedule=schedule, accumulation_steps=accumulation_steps)
        skipped = list[bool]()
        for x in batches:
            state, info = step(state, x)
            skipped.append(bool(info.skipped))
        results.append((bits(state), int(state.step), skipped, step.skips.count))
    assert results[0] == (results[1][0], 3, [False, True, False], 1)
    assert results[1][1:] == (2, [False, False], 0)


def test_without_the_option_it_poisons_everything(group: Callable[[int], fddp.Group]):
    step, state = make(group(2), skip_nonfinite=False)
    state, info = step(state, ILL)
    assert not np.isfinite(state.params["root"]) and info.skipped is None


def test_what_is_pending_since_an_earlier_call_is_skipped_with_it(
    group: Callable[[int], fddp.Group],
):
    step, state = make(group(2))
    begin = bits(state)
    state, _ = step.no_sync(state, ILL)
    state, info = step(state, WELL)
    assert info.skipped and bits(state) == begin


def test_the_replica_and_the_leaf_are_named(
    group: Callable[[int], fddp.Group], capfd: pytest.CaptureFixture[str]
):
    step, state = make(group(2))
    for x in (WELL, ILL, WELL):
        state, _ = step(state, x)
    jax.block_until_ready(step(state, WELL))
    assert capfd.readouterr().err == (
        "fddp: rank 0 of 1: step 2 was skipped: its gradient of root was the first that is not "
        "finite on replica 1.\n"
    )


def test_parameters_that_are_one_array_are_named(
    group: Callable[[int], fddp.Group], capfd: pytest.CaptureFixture[str]
):
    step = fddp.train_step(
        lambda w, x: jnp.sum(w * x), optax.sgd(1.0), group=group(1), skip_nonfinite=True
    )
    jax.block_until_ready(step(step.init(jnp.ones(())), np.full(2, np.nan, np.float32)))
    assert "its gradient of the parameter was the first" in capfd.readouterr().err


def test_steps_of_another_first_state_are_counted_from_1(
    group: Callable[[int], fddp.Group], capfd: pytest.CaptureFixture[str]
):
    step, state = make(group(1))
    for _ in range(3):
        state, _ = step(state, WELL)
    state, _ = step(step.init(START, model_state=np.float32(0)), ILL)
    jax.block_until_ready(step(state, WELL))
    assert "step 1 was skipped" in capfd.readouterr().err


def test_of_several_leaves_the_one_that_was_ready_first_is_named(
    group: Callable[[int], fddp.Group], capfd: pytest.CaptureFixture[str]
):
    step, state = make(group(1))
    state, _ = step(state, np.full((4, 3), np.nan, np.float32))
    first = step.plan.buckets[0].names[0]
    assert (
        f"its gradient of {first} was the first that is not finite (2 of 2 are not)"
        in capfd.readouterr().err
    )


def test_a_sum_that_is_not_finite_though_its_parts_are_is_told_by_rank_0(
    group: Callable[[int], fddp.Group], capfd: pytest.CaptureFixture[str]
):
    step = fddp.train_step(
        lambda w, x: jnp.sum(w * x),
        optax.sgd(1.0),
        group=group(2),
        schedule="after",
        skip_nonfinite=True,
    )
    state, info = step(step.init(jnp.zeros(())), np.full(2, 3e38, np.float32))
    assert info.skipped and float(state.params) == 0
    assert (
        "step 1 was skipped: the mean gradients are not finite; its own are."
        in capfd.readouterr().err
    )


def test_a_loss_scale_goes_down_all_the_same(group: Callable[[int], fddp.Group]):
    optimizer = fddp.dynamic_scale(optax.adamw(0.1), initial=8.0)
    step = fddp.train_step(loss_fn, optimizer, group=group(2), skip_nonfinite=True)
    state = step.init(START, model_state=np.float32(0))
    before = bits(state._replace(opt_state=state.opt_state.inner))
    state, _ = step(state, ILL)
    assert float(state.opt_state.scale) == 4.0
    assert bits(state._replace(opt_state=state.opt_state.inner)) == before


def test_it_costs_no_further_collective(group: Callable[[int], fddp.Group]):
    operations = []
    for skip in (False, True):
        step, state = make(group(2), skip_nonfinite=skip)
        operations.append(
            list(
                map(str, find_collectives(parse(step.lower(state, WELL).compile().as_text() or "")))
            )
        )
    assert operations[0] == operations[1] != []


def test_where_there_is_no_step_there_is_none_to_skip():
    with pytest.raises(ValueError, match="it has no step to skip"):
        fddp.value_and_grad(lambda w, x: jnp.mean(w * x), skip_nonfinite=True)
    with pytest.raises(ValueError, match="skip_nonfinite must be True or False, got 1"):
        fddp.train_step(lambda w, x: jnp.mean(w * x), optax.sgd(0.1), skip_nonfinite=1)  # pyright: ignore[reportArgumentType]
