"""Each bucket travels in as many bits as fit under what is computed, and what is lost outlives another choice."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fddp
from fddp import hooks
from fddp.analysis.tuning.fitted_bits import fitting_bits

pytestmark = pytest.mark.steps

DRAW = np.random.default_rng(9)
PARAMS = {name: np.zeros(512, np.float32) for name in "ab"}
ROWS = DRAW.normal(size=(4, 2, 512)).astype(np.float32)


def loss_fn(p: Any, x: Any) -> Any:
    return jnp.mean(x @ p["a"]) - 2 * jnp.mean(x @ p["b"])


def made(group: fddp.Group, *bits: int, **options: Any) -> fddp.TrainStep:
    hook = hooks.adaptive(bits)
    return fddp.train_step(loss_fn, optax.sgd(1.0), group=group, bucket_cap_mb=0, hook=hook, **options)


def test_each_bucket_travels_in_its_bits_and_the_last_ones_hold_for_all_that_follow(group: Any):
    for bits, wanted in {
        (32, 16): [2048, 1024],
        (8, 4): [2 * 260, 2 * 132],
        (1,): [2 * 36, 2 * 36],
        (16, 8, 4): [1024, 2 * 260],
    }.items():
        step = made(group(2), *bits)
        _, info = step(step.init(PARAMS), ROWS[0])
        assert info.sent.tolist()[:2] == wanted
        assert step.stats().hook == f"adaptive({', '.join(map(str, bits))})"


@pytest.mark.parametrize("options", [{}, {"shard": "state"}], ids=["whole", "in shards"])
def test_a_step_with_other_bits_goes_on_with_what_was_lost_before(group: Any, options: Any):
    """In the end all is sent in 32 bits, and nothing is missing."""
    state = made(group(2), 1, **options).init(PARAMS)
    for rows, bits in zip(ROWS, ((1, 4), (4, 1), (8, 16), (32,))):
        state, _ = made(group(2), *bits, **options)(state, rows)
    assert not any(np.any(x) for x in jax.tree.leaves(state.hook_state))
    params = fddp.whole(state.params)
    np.testing.assert_allclose(params["a"], -ROWS.mean(1).sum(0), rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(params["b"], 2 * ROWS.mean(1).sum(0), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("bits", [(), (2,), (32, 7)])
def test_other_bits_are_refused(bits: Any):
    with pytest.raises(ValueError, match="bits must be some of 32, 16, 8, 4, 1, got"):
        hooks.adaptive(bits)


### The choice, by hand


def at_a_byte_a_second(nbytes: float) -> float:
    return nbytes


def test_bits_are_whole_where_everything_fits():
    assert fitting_bits([1, 2, 3], 13, [4, 4, 4], at_a_byte_a_second) == (32, 32, 32)


def test_the_bucket_that_costs_the_least_error_for_a_second_is_cut_first():
    # Each in 32 bits takes 8 s: back after 17. Half of any of them saves 4 s; the first one's is as good as the last's.
    assert fitting_bits([1, 1], 13, [8, 8], at_a_byte_a_second) == (16, 32)
    # The first one is back long before the second is ready: less of it saves nothing.
    assert fitting_bits([1, 20], 24, [8, 8], at_a_byte_a_second) == (32, 16)


def test_as_few_bits_as_needed_and_no_fewer():
    ready, nbytes = [10.0], [32.0]
    for until, bits in ((42, 32), (41.9, 16), (26, 16), (25.9, 8), (18, 8), (17.9, 4), (14, 4), (13.9, 1), (11, 1)):
        assert fitting_bits(ready, until, nbytes, at_a_byte_a_second) == (bits,)


def test_where_nothing_fits_all_that_matter_have_the_fewest():
    assert fitting_bits([1, 1], 0, [32, 32], at_a_byte_a_second) == (1, 1)


def test_latency_alone_is_no_reason_for_fewer_bits():
    assert fitting_bits([0, 0], 1, [8, 8], lambda nbytes: 1.0) == (32, 32)


### The measurement


def test_a_link_without_cost_leaves_all_bits_and_is_printed(group: Any):
    step = made(group(1), 8, schedule="staged")
    fitted = fddp.fit_bits(step, step.init(PARAMS), ROWS[0])
    assert fitted.bits == (32, 32) and fitted.nbytes == (2048, 2048)
    assert 0 < fitted.ready_s[0] <= fitted.ready_s[1] <= fitted.until_s
    assert str(fitted).splitlines()[1].split() == ["bucket", "ready", "ms", "bytes", "bits", "ms"]


def test_one_program_has_no_stages_to_measure(group: Any):
    step = made(group(1), 8, schedule="fused")
    with pytest.raises(ValueError, match="make it with schedule='staged'"):
        fddp.fit_bits(step, step.init(PARAMS), ROWS[0])
