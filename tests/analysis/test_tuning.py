"""The best bucket cap: regroupings by hand, and tunings of small networks."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from trees import close

import fddp
from fddp.analysis.tuning.link import Link
from fddp.analysis.tuning.regrouping import (
    Typical,
    message_bytes,
    stage_seconds,
    total_seconds,
    typical,
)
from fddp.analysis.tuning.tuning import Candidate, Tuning
from fddp.buckets import make_plan, place_scalars, plan_with_table_rows
from fddp.measuring.measurement import MeasuredStep
from fddp.schedules.timeline import Pace, Span, Timeline

ORDER = [2, 0, 1]  # leaf 2 is ready first
FINE = [3.0, 2.0, 1.0]


def plan_of(*groups, dtype=np.float32):
    """Leaves of 1, 2 and 3 floats, and a plan with these groups: by caps that close a bucket
    exactly there."""
    tree = [np.zeros(1 + i, dtype) for i in range(3)]
    return make_plan(
        tree,
        order=[i for group in groups for i in group],
        bucket_cap_mb=0 if len(groups) == 3 else 25,
    )


def test_a_bucket_is_ready_when_the_last_of_its_leaves_is():
    assert stage_seconds(FINE, ORDER, plan_of([2], [0], [1]), total=6) == (3, 2, 1)
    assert stage_seconds(FINE, ORDER, plan_of([2, 0, 1]), total=6) == (6,)


def test_buckets_of_another_order_wait_for_the_later_leaf():
    # Leaf 1 first: it is ready after 6 s, and by then the others are as well.
    assert stage_seconds(FINE, ORDER, plan_of([1], [0], [2]), total=6) == (6, 0, 0)


def test_stages_scale_to_what_a_cut_into_so_many_takes():
    assert stage_seconds(FINE, ORDER, plan_of([2], [0], [1]), total=12) == (6, 4, 2)


def test_a_tail_that_travels_alone_leaves_with_the_end():
    assert stage_seconds([*FINE, 0.5], ORDER, plan_of([2, 0, 1]), total=6.5) == (6, 0.5)


def test_a_tail_that_leads_leaves_before_all_others():
    for groups, seconds in ([[2, 0, 1]], (0.5, 6)), ([[2], [0], [1]], (0.5, 3, 2, 1)):
        plan = place_scalars(plan_of(*groups), exact=False, early=True)
        assert stage_seconds([0.5, *FINE], ORDER, plan, total=6.5) == seconds


def test_the_tail_rides_behind_a_bucket_or_alone():
    early = place_scalars(plan_of([2], [0], [1]), early=True)
    assert message_bytes(plan_of([2], [0], [1]), 100, 2) == (12, 4, 108)
    assert message_bytes(early, 100, 2) == (112, 4, 8)
    assert message_bytes(plan_of([2], [0], [1], dtype=jnp.bfloat16), 100, 2) == (6, 2, 4, 100)
    assert message_bytes(
        place_scalars(plan_of([2], [0], [1]), exact=False, early=True), 100, 2
    ) == (100, 12, 4, 8)


def test_rows_count_as_the_all_reduce_that_takes_as_long_and_the_rest_as_nothing():
    """Each of n replicas sends n - 1 times its rows, but 2 (n - 1)/n times the bytes of a sum."""
    tree = {"bias": np.zeros(8, np.float32), "table": np.zeros((100_000, 4), np.float32)}
    rows = 64 * (4 * 4 + 4) + 4
    for replicas in (2, 8):
        plan = place_scalars(
            plan_with_table_rows(tree, {1: 64}, replicas, order=(1, 0)), early=True
        )
        assert message_bytes(plan, 100, replicas) == (rows * replicas // 2, 32 + 100)


def test_a_tail_that_is_alone_only_here_has_a_stage_of_no_time():
    tables = {name: np.zeros((100_000, 4), np.float32) for name in "ab"}
    plan = place_scalars(plan_with_table_rows(tables, {0: 8, 1: 8}, 2, order=(1, 0)), early=True)
    assert stage_seconds([2.0, 3.0], (1, 0), plan, total=5.0) == (0.0, 2.0, 3.0)


def test_each_further_stage_costs_what_two_cuts_say():
    # 11 stages take 20 s, 3 stages 12 s: one second each.
    fine, coarse = (Typical((total / n,) * n, (), (), 0, 0) for n, total in ((11, 20.0), (3, 12.0)))
    assert [round(total_seconds(fine, coarse, n), 9) for n in (1, 3, 7, 11)] == [10, 12, 16, 20]
    assert total_seconds(coarse, coarse, 3) == pytest.approx(12)


def test_a_typical_step_is_made_of_medians(group):
    def step(stage, seconds, end):
        spans = (
            Span("compute", "stage 0", 1, 1 + stage),
            Span("communication", "bucket 0", 5, 5 + seconds, 8),
        )
        return MeasuredStep(0, end, Timeline((*spans, Span("update", "update 0", 9, 10))))

    steps = [step(1, 1, 10), step(2, 1, 11), step(4, 1, 30)]
    # Idle: 10 - 1 - 1 - 1, 11 - 2 - 1 - 1, 30 - 4 - 1 - 1.
    assert typical(group(1), steps) == Typical((2,), (8,), (1,), 7, 11)


def two_layers(params, batch):
    return jnp.mean((jnp.tanh(batch @ params["a"]) @ params["b"]) ** 2)


PARAMS = {"a": np.ones((4, 8), np.float32), "b": np.ones((8, 1), np.float32)}
ROWS = np.ones((2, 4), np.float32)


Make = Callable[..., tuple[fddp.TrainStep, fddp.TrainState]]


@pytest.fixture
def step_and_state(group) -> Make:
    """Makes a step of one replica with some options, and its first state."""

    def make(**options: Any) -> tuple[fddp.TrainStep, fddp.TrainState]:
        step = fddp.train_step(two_layers, optax.sgd(0.1), group=group(1), **options)
        return step, step.init(PARAMS)

    return make


@pytest.mark.steps
def test_a_tuning_simulates_each_different_plan_and_takes_the_shortest(step_and_state: Make):
    tuning = fddp.tune(*step_and_state(), ROWS, steps=2)
    # 160 bytes are one bucket under any cap but 0: of all these caps the smallest is named.
    assert [(x.bucket_cap_mb, len(x.nbytes)) for x in tuning.candidates] == [(0, 2), (0.25, 1)]
    assert [len(x.plan.buckets) for x in tuning.candidates] == [2, 1]
    assert tuning.best.seconds == min(candidate.seconds for candidate in tuning.candidates)
    assert tuning.measured_s is not None and tuning.measured_s > 0
    assert str(tuning).count("best\n") == 1


@pytest.mark.steps
def test_the_tuned_step_has_the_result_and_goes_on_from_the_state(step_and_state: Make):
    step, state = step_and_state(donate=False, shard="state")
    state, _ = step(state, ROWS)
    tuning = fddp.tune(step, state, ROWS, caps_mb=[(0,)], steps=1)
    options = tuning.step.options
    assert (options.schedule, options.bucket_cap_mb) == (tuning.schedule, tuning.bucket_cap_mb)
    assert (tuning.schedule, tuning.bucket_cap_mb, options.shard) == ("staged", (0,), "state")
    results = [fddp.whole(trainer(state, ROWS)[0].params) for trainer in (step, tuning.step)]
    close(*results, rtol=1e-6, atol=1e-7)


@pytest.mark.steps
def test_eager_is_run_where_no_schedule_is_asked_for_and_nothing_rules_it_out(step_and_state: Make):
    def tuned(**options: Any) -> fddp.Tuning:
        return fddp.tune(*step_and_state(**options), ROWS, caps_mb=[0], steps=1)

    tuning = tuned()
    assert tuning.eager_s is not None and tuning.measured_s is not None
    assert tuning.schedule == ("eager" if tuning.eager_s < 0.98 * tuning.measured_s else "staged")
    assert tuned(schedule="staged").eager_s is None
    assert tuned(hook=fddp.hooks.quantize()).eager_s is not None
    assert tuned(shard="optimizer").eager_s is None


@pytest.mark.steps
def test_an_error_of_the_eager_step_is_not_taken_for_a_refusal(step_and_state: Make, monkeypatch):
    step, state = step_and_state()
    measure = fddp.TrainStep.measure

    def fails(step: fddp.TrainStep, *args: Any) -> fddp.Measurement:
        if step.options.schedule == "eager":
            raise ValueError("the eager step fails")
        return measure(step, *args)

    monkeypatch.setattr(fddp.TrainStep, "measure", fails)
    with pytest.raises(ValueError, match="the eager step fails"):
        fddp.tune(step, state, ROWS, caps_mb=[0], steps=1)


def test_what_only_a_fused_step_can_run_is_refused(group, step_and_state: Make):
    step = fddp.train_step(two_layers, optax.sgd(0.1), group=group(2))
    with pytest.raises(ValueError, match="2 replicas in 1 processes"):
        fddp.tune(step, step.init(PARAMS), ROWS)
    with pytest.raises(ValueError, match="schedule='fused'"):
        fddp.tune(*step_and_state(schedule="fused"), ROWS)
    with pytest.raises(ValueError, match="caps_mb must hold at least one cap"):
        fddp.tune(*step_and_state(), ROWS, caps_mb=[])


@pytest.mark.steps
def test_the_form_with_a_loss_works_and_is_deprecated(group):
    options: Any = {"group": group(1), "caps_mb": [0], "steps": 1, "schedule": "staged"}
    untyped: Any = fddp.tune
    with pytest.warns(
        DeprecationWarning, match="call fddp.tune.step, state, batch. with"
    ) as warned:
        tuning = untyped(two_layers, optax.sgd(0.1), PARAMS, ROWS, **options)
    assert warned[0].filename == __file__
    assert (tuning.bucket_cap_mb, tuning.schedule, tuning.replicas) == (0, "staged", 1)
    with pytest.warns(DeprecationWarning, match="call fddp.tune"):
        untyped(loss_fn=two_layers, optimizer=optax.sgd(0.1), params=PARAMS, batch=ROWS, **options)
    with pytest.warns(DeprecationWarning, match=r"fddp.Choice is deprecated: use fddp.Tuning"):
        assert fddp.Choice is fddp.Tuning


### Other numbers of replicas

PLAN = make_plan(np.zeros(1))
BEST = Candidate("staged", 1.0, PLAN, 5.0, 1.0, (2.0, 1.0), (0.25, 0.25), (10, 10))
STEP = fddp.train_step(two_layers, optax.sgd(0.1))
MEASURED = {"link": Link(0.0, 10.0), "pace": Pace(), "idle_s": 0.75, "measured_s": 4.0}
ESTIMATED = Tuning("h100:2", 2, (BEST,), BEST, "staged", STEP)
BY_HAND = replace(ESTIMATED, **MEASURED)


def test_a_tuning_knows_how_far_it_was_off():
    assert BY_HAND.deviation == 0.25
    assert "the best staged step takes 4000.0 ms, predicted +25.0%\n" in str(BY_HAND)
    eager = replace(BY_HAND, eager_s=3.9, schedule="eager")
    end = "the eager step takes 3900.0 ms\nschedule='eager', bucket_cap_mb=1"
    assert str(eager).endswith(end)


def test_a_tuning_at_scale_predicts_what_was_measured_where_it_was_measured():
    # Two replicas: sent 2–3 and 3–4 s, the first update meanwhile, then another and idling of 1 s.
    # Many: all-reduces of nearly 2 s each.
    two, many = BY_HAND.at_scale([2, 10**6])
    assert (two.step_s, two.efficiency) == (5, 4.25 / 5)
    assert many.step_s == pytest.approx(7, abs=1e-4)


def test_an_estimate_for_a_target_has_no_measurements():
    assert ESTIMATED.deviation is None and "takes" not in str(ESTIMATED)
    with pytest.raises(ValueError, match=r"call fddp.tune without a target"):
        ESTIMATED.at_scale()
