"""bench/fitted_bits.py: the bits of each bucket that fit under the computation."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from adaptive_net import PARAMS, ROWS, adaptive_step, loss_fn

import fddp
from bench.bits_on_paper import SimulatedMessage, fitting_bits
from bench.fitted_bits import fit_bits, refit_bits
from fddp import hooks
from fddp.schedules import Span, Timeline

pytestmark = pytest.mark.steps

### The choice, by hand


def fitting(
    ready: Sequence[float], due: Sequence[float], nbytes: Sequence[int], latency: float = 0.0
) -> Any:
    """The bits where a byte takes a second."""
    messages = [SimulatedMessage(k, *times) for k, times in enumerate(zip(ready, due, nbytes))]
    return fitting_bits(messages, lambda k, bits: latency or nbytes[k] * bits / 32)


def test_bits_are_whole_where_everything_fits():
    assert fitting([1, 2, 3], [13] * 3, [4, 4, 4]) == (32, 32, 32)


def test_the_bucket_that_costs_the_least_error_for_a_second_is_cut_first():
    # Each in 32 bits takes 8 s: back after 17. Half of any of them saves 4 s; the first one's is as
    # good as the last's.
    assert fitting([1, 1], [13, 13], [8, 8]) == (16, 32)
    # The first one is back long before the second is ready: less of it saves nothing.
    assert fitting([1, 20], [24, 24], [8, 8]) == (32, 16)


def test_as_few_bits_as_needed_and_no_fewer():
    for due, bits in (
        (42, 32),
        (41.9, 16),
        (26, 16),
        (25.9, 8),
        (18, 8),
        (17.9, 4),
        (14, 4),
        (13.9, 1),
        (11, 1),
    ):
        assert fitting([10.0], [due], [32]) == (bits,)


def test_each_bucket_is_to_be_back_when_it_is_due_itself():
    # The first one's 8 s are too many though the last one has time; the last one waits for the
    # first, and has its own.
    assert fitting([1, 1], [5, 40], [8, 8]) == (16, 32)
    assert fitting([1, 1], [40, 13], [8, 8]) == (16, 32)


def test_a_bucket_that_travels_twice_has_the_same_bits_both_times():
    messages = [
        SimulatedMessage(0, 1, 9, 8),
        SimulatedMessage(1, 1, 99, 8),
        SimulatedMessage(0, 20, 24, 8),
    ]
    assert fitting_bits(messages, lambda k, bits: bits / 4) == (16, 32)


def test_where_nothing_fits_all_that_matter_have_the_fewest():
    assert fitting([1, 1], [0, 0], [32, 32]) == (1, 1)


def test_latency_alone_is_no_reason_for_fewer_bits():
    assert fitting([0, 0], [1, 1], [8, 8], latency=1.0) == (32, 32)


### The measurement


def test_a_link_without_cost_leaves_all_bits_and_is_printed(group: Any):
    step = adaptive_step(group(1), 8, schedule="staged")
    fitted = fit_bits(step, step.init(PARAMS), ROWS[0])
    assert fitted.bits == (32, 32) and [message.nbytes for message in fitted.messages] == [
        2048,
        2048,
    ]
    first, last = fitted.messages
    assert 0 < first.ready_s <= last.ready_s <= first.due_s == last.due_s
    assert str(fitted).splitlines()[1].split()[:4] == ["bucket", "bytes", "bits", "ready"]


def test_a_bucket_of_an_eager_step_is_due_when_the_next_forward_pass_reads_it(group: Any):
    loss = lambda p, x: jnp.mean(jnp.tanh(jnp.tanh(x @ p["a"]) @ p["b"]) @ p["c"])  # noqa: E731
    params = {name: np.ones((8, 8), np.float32) for name in "abc"}
    options = {"group": group(2), "schedule": "eager", "bucket_cap_mb": 0}
    due = {}
    # A norm of all gradients makes every update wait for every message.
    clipped = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1))
    for name, optimizer in (("each", optax.sgd(0.1)), ("all", clipped)):
        step = fddp.train_step(loss, optimizer, **options)
        fitted = fit_bits(step, step.init(params), ROWS[0][:, :8])
        due[name] = [message.due_s for message in sorted(fitted.messages)]
    # The second layer's gradients have more time than the first one's. The last layer's bring the
    # weights of the rows, by which all are divided.
    last, second, first = due["each"]
    assert last == first < second
    assert len(set(due["all"])) == 1


def test_one_program_has_no_stages_to_measure(group: Any):
    step = adaptive_step(group(1), 8, schedule="fused")
    state, _ = step(step.init(PARAMS), ROWS[0])
    with pytest.raises(ValueError, match="create it with schedule='staged'"):
        fit_bits(step, state, ROWS[0])
    with pytest.raises(ValueError, match="create it with schedule='staged'"):
        refit_bits(step)


### Again


def noted(step: fddp.TrainStep, stages: Sequence[float], sums: Sequence[float]) -> None:
    """Puts a step with these seconds in place of those that the step has noted."""
    spans = [Span("compute", f"stage {k}", 0.0, seconds) for k, seconds in enumerate(stages)]
    spans += [Span("communication", f"bucket {k}", 0.0, seconds) for k, seconds in enumerate(sums)]
    step.lately.clear()
    step.lately.append(Timeline(tuple(spans)))


def test_bits_are_chosen_again_from_what_steps_have_noted(group: Any):
    step = adaptive_step(group(2), 8, schedule="staged")
    state = step.init(PARAMS)
    with pytest.raises(ValueError, match="the first step, which compiles, does not count"):
        state, _ = step(state, ROWS[0])
        refit_bits(step)
    state, _ = step(state, ROWS[1])
    stages = [1.0] * len(step.timeline().compute)
    end = sum(stages)
    # Two messages of 1 s in 8 bits, the first under a stage of 100 s: that one has time for 4 s,
    # and the last for 2.
    noted(step, [1.0, *[100.0] * (len(stages) - 1)], [1.0, 1.0])
    refitted = refit_bits(step, exposed=2.01 / (1 + 100 * (len(stages) - 1)))
    assert refitted.options.hook is not None and refitted.options.hook.bits == (32, 16)
    # The residual of 8 bits travels with the next step.
    state, _ = refitted(state, ROWS[2])
    assert refitted.stats().hook == "adaptive(32, 16)" and refit_bits(step, exposed=0.0) is not step
    # A slow link: all of it is late.
    noted(step, stages, [1000.0, 1000.0])
    few = refit_bits(step).options.hook
    assert few is not None and few.bits == (1, 1)
    # Fewer bits have been tried for the last one, and take longer than all bits do.
    tried = step.with_options(hook=hooks.adaptive((32, 16)))
    for rows in ROWS[:2]:
        state, _ = tried(state, rows)
    noted(tried, stages, [end, 2 * end])
    refitted_hook = refit_bits(tried, exposed=0.1).options.hook
    assert refitted_hook is not None and refitted_hook.bits[1] == 32
    # Just right.
    noted(step, stages, [0.4 * end, 0.6])
    assert refit_bits(step, exposed=1 / end) is step


def test_bits_of_another_hook_are_not_chosen(group: Any):
    step = fddp.train_step(loss_fn, optax.sgd(1.0), group=group(1), hook=hooks.bf16())
    with pytest.raises(ValueError, match=r"this step's hook is Hook\(bf16\(allreduce\)\)"):
        refit_bits(step)
    with pytest.raises(ValueError, match="exposed must be 0 or more, got -1"):
        refit_bits(step, exposed=-1)
