"""The best bucket cap: regroupings by hand, and tunings of small networks."""

from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fddp
from fddp.analysis.tuning.link import Link
from fddp.analysis.tuning.regrouping import (
    Typical,
    message_bytes,
    stage_seconds,
    total_seconds,
    typical,
)
from fddp.analysis.tuning.search import Candidate, Tuning
from fddp.analysis.tuning.tune import tune_model
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


@pytest.mark.steps
def test_a_tuning_simulates_each_different_plan_and_takes_the_shortest(group):
    params = {"a": np.ones((4, 8), np.float32), "b": np.ones((8, 1), np.float32)}
    tuning = fddp.tune(
        two_layers, optax.sgd(0.1), params, np.ones((2, 4), np.float32), group=group(1), steps=2
    )
    # 160 bytes are one bucket under any cap but 0: of all these caps the smallest is named.
    assert [
        (candidate.bucket_cap_mb, len(candidate.nbytes)) for candidate in tuning.candidates
    ] == [
        (0, 2),
        (0.25, 1),
    ]
    assert tuning.best.predicted_s == min(candidate.predicted_s for candidate in tuning.candidates)
    assert tuning.measured_s > 0
    assert "best" in str(tuning)


@pytest.mark.steps
def test_eager_is_run_where_no_schedule_is_asked_for_and_nothing_rules_it_out(group):
    params = {"a": np.ones((4, 8), np.float32), "b": np.ones((8, 1), np.float32)}
    args = two_layers, optax.sgd(0.1), params, np.ones((2, 4), np.float32)
    options = {"group": group(1), "steps": 1, "caps_mb": [0]}
    tuning = fddp.tune(*args, **options)
    assert tuning.eager_s is not None and tuning.eager_s > 0
    assert tuning.schedule == ("eager" if tuning.eager_s < 0.98 * tuning.measured_s else "staged")
    assert fddp.tune(*args, **options, schedule="staged").eager_s is None
    assert fddp.tune(*args, **options, hook=fddp.hooks.quantize()).eager_s is not None
    assert fddp.tune(*args, **options, shard="optimizer").eager_s is None


@pytest.mark.steps
def test_a_tuning_keeps_the_groups_that_it_is_given(group):
    params = {"a": np.ones((4, 8), np.float32), "b": np.ones((8, 1), np.float32)}
    options = {"group": group(1), "steps": 1, "groups": lambda path: "both"}
    tuning = fddp.tune(two_layers, optax.sgd(0.1), params, np.ones((2, 4), np.float32), **options)
    assert [
        (candidate.bucket_cap_mb, len(candidate.nbytes)) for candidate in tuning.candidates
    ] == [(0, 1)]


@pytest.mark.steps
def test_a_tuning_takes_a_function_that_makes_the_parameters(group):
    def make() -> dict[str, Any]:
        return {"a": jnp.ones((4, 8)), "b": jnp.ones((8, 1))}

    options = {"group": group(1), "steps": 1, "caps_mb": [0.25], "schedule": "staged"}
    tuning = fddp.tune(two_layers, optax.sgd(0.1), make, np.ones((2, 4), np.float32), **options)
    assert [len(candidate.nbytes) for candidate in tuning.candidates] == [1]


def test_what_only_a_fused_step_can_run_is_refused(group):
    with pytest.raises(ValueError, match="2 replicas in 1 processes"):
        fddp.tune(two_layers, optax.sgd(0.1), {}, None, group=group(2))
    with pytest.raises(ValueError, match="schedule='fused'"):
        fddp.tune(two_layers, optax.sgd(0.1), {}, None, group=group(1), schedule="fused")


@pytest.mark.steps
def test_a_model_is_tuned_by_its_name(group):
    tuning = tune_model("models.mlp:tiny", rows=4, group=group(1), caps_mb=[0, 1], steps=1)
    assert [len(candidate.nbytes) for candidate in tuning.candidates] == [6, 1]
    with pytest.raises(ValueError, match="presets tiny, 1024, none is 'huge'"):
        tune_model("models.mlp:huge", group=group(1))


### Other numbers of replicas

BEST = Candidate(1.0, (2.0, 1.0), (0.25, 0.25), (10, 10), predicted_s=5.0)
BY_HAND = Tuning(2, Link(0.0, 10.0), Pace(), 0.75, (BEST,), BEST, measured_s=4.0)


def test_a_tuning_knows_how_far_it_was_off():
    assert BY_HAND.deviation == 0.25
    assert "bucket_cap_mb=1: measured 4000.0 ms, predicted +25.0%" in str(BY_HAND)


@pytest.mark.parametrize(
    ("eager_s", "faster"), [(None, "staged"), (3.93, "staged"), (3.91, "eager"), (4.5, "staged")]
)
def test_eager_is_the_schedule_where_it_saves_more_than_2_percent(eager_s, faster):
    tuning = replace(BY_HAND, eager_s=eager_s)
    assert tuning.schedule == faster
    assert (f"schedule={faster!r}: eager takes" in str(tuning)) == (eager_s is not None)


def test_a_tuning_at_scale_predicts_what_was_measured_where_it_was_measured():
    # Two replicas: sent 2–3 and 3–4 s, the first update meanwhile, then another and idling of 1 s.
    # Many: all-reduces of nearly 2 s each.
    two, many = BY_HAND.at_scale([2, 10**6])
    assert (two.step_s, two.efficiency) == (5, 4.25 / 5)
    assert many.step_s == pytest.approx(7, abs=1e-4)
