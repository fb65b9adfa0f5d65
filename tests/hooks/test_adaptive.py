"""Each bucket travels in as many bits as fit under the computation; a new choice keeps the
residual."""

from typing import Any

import jax
import numpy as np
import pytest
from adaptive_net import PARAMS, ROWS, adaptive_step

import fddp
from fddp import hooks

pytestmark = pytest.mark.steps


def test_each_bucket_travels_in_its_bits_and_the_last_ones_hold_for_all_that_follow(group: Any):
    for bits, expected in {
        (32, 16): [2048, 1024],
        (8, 4): [2 * 260, 2 * 132],
        (1,): [2 * 36, 2 * 36],
        (16, 8, 4): [1024, 2 * 260],
    }.items():
        step = adaptive_step(group(2), *bits)
        _, info = step(step.init(PARAMS), ROWS[0])
        assert info.sent.tolist()[:2] == expected
        assert step.stats().hook == f"adaptive({', '.join(map(str, bits))})"


@pytest.mark.quick("in shards")
@pytest.mark.parametrize("options", [{}, {"shard": "state"}], ids=["whole", "in shards"])
def test_a_step_with_other_bits_goes_on_with_what_was_lost_before(group: Any, options: Any):
    """All is sent in the end, in 32 bits, and nothing is missing."""
    state = adaptive_step(group(2), 1, **options).init(PARAMS)
    for rows, bits in zip(ROWS, ((1, 4), (4, 1), (8, 16), (32,))):
        state, _ = adaptive_step(group(2), *bits, **options)(state, rows)
    assert not any(np.any(x) for x in jax.tree.leaves(state.hook_state))
    params = fddp.whole(state.params)
    np.testing.assert_allclose(params["a"], -ROWS.mean(1).sum(0), rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(params["b"], 2 * ROWS.mean(1).sum(0), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("bits", [(), (2,), (32, 7), (True,)])
def test_other_bits_are_refused(bits: Any):
    with pytest.raises(ValueError, match="bits must be some of 32, 16, 8, 4, 1, got"):
        hooks.adaptive(bits)


def test_bits_may_be_an_iterator_or_an_array():
    for bits in (iter([32, 8]), np.array([32, 8])):
        hook = hooks.adaptive(bits)  # pyright: ignore[reportArgumentType]
        assert (hook.bits, hook.name) == ((32, 8), "adaptive(32, 8)")


def test_a_step_with_some_options_new_keeps_how_its_state_is_held(group: Any):
    step = adaptive_step(group(2), 8)
    changed = step.with_options(bucket_cap_mb=25.0, hook=None)
    assert (changed.options.bucket_cap_mb, changed.options.hook, changed.group) == (
        25.0,
        None,
        step.group,
    )
    with pytest.raises(
        ValueError, match="cannot change the layout of a state, got shard: use train_step"
    ):
        step.with_options(shard="state")
