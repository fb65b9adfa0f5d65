"""Ranks with gradients that are not finite or overflow, and ranks with differing parameters."""

import io
from contextlib import redirect_stderr
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
from on_ranks.claims import claim, error_of, same_on_all_ranks
from problems import product, pull, rows

import fddp


@claim()
def a_rank_whose_gradient_is_not_finite_names_itself_and_all_skip_the_step(group: fddp.Group):
    last = group.rank == group.size - 1
    reason = (
        "its gradient of "
        if last
        else "the mean gradients are not finite"
        if group.rank == 0
        else None
    )
    step = pull(group, skip_nonfinite=True)
    state = step.init(np.float32(0))
    with redirect_stderr(io.StringIO()) as printed:
        for ill in (False, True, False):
            state, _ = step(state, rows(2, np.nan if ill and last else 1))
        assert float(state.params) == -3.0, "two steps of three, by a mean of 1.5"
        step(state, rows(2, 1))  # by then the others are over
    expected = (
        f"fddp: rank {group.rank} of {group.size}: step 2 was skipped: {reason}" if reason else ""
    )
    lines = [
        line for line in printed.getvalue().splitlines() if "pass the same first rows" not in line
    ]
    words = "\n".join(lines)
    assert words.startswith(expected) and bool(words) == bool(reason), printed.getvalue()


@claim(sizes=(3, 4))
def a_rank_that_changes_its_parameters_alone_is_found_and_named_by_all(group: fddp.Group):
    step = pull(group, check_replicas_every=2)
    state, _ = step(step.init(np.float32(0)), rows(2, 1))
    if group.rank == 1:
        (shard,) = state.params.addressable_shards
        changed = jax.device_put(np.asarray(shard.data) + 1, shard.device)
        altered = jax.make_array_from_single_device_arrays(
            state.params.shape, state.params.sharding, [changed]
        )
        state = state._replace(params=altered)
    message = error_of(lambda: step(state, rows(2, 1)), RuntimeError)
    assert "no longer equal after step 2: params of rank 1 differs from the others'" in message, (
        message
    )


@claim(quick=("mpi",))
def a_rank_that_overflows_stops_all_ranks(group: fddp.Group):
    """The gradient in float16 is the scale times x: on the last rank too much for the scale at the
    start."""
    half = fddp.mixed_precision(lambda w, x: product(w, x).astype(jnp.float32), jnp.float16)
    optimizer = fddp.dynamic_scale(optax.adamw(0.5, weight_decay=0.5), initial=2.0**14)
    x = rows(1, 16) if group.rank == group.size - 1 else rows(1, 1)
    options = {"group": group, "accumulation_steps": 2, "donate": False}
    step = fddp.train_step(half, optimizer, **options)
    before = step.init(np.float32(0.25))
    for calls in (1, 2):
        state = before
        for _ in range(calls - 1):
            state, _ = step.no_sync(state, rows(1, 1))
        skipped, info = step(state, x)
        assert np.isfinite(info.loss)
        assert (float(skipped.params), float(skipped.opt_state.scale)) == (0.25, 2.0**13)
        assert int(skipped.opt_state.inner[0].count) == 0
        assert same_on_all_ranks(group, skipped)
        # 2¹² · 16 is still too much, 2¹¹ · 16 is not.
        for _ in range(3):
            skipped, _ = step(skipped, x)
        assert float(skipped.opt_state.scale) == 2.0**11
        assert int(skipped.opt_state.inner[0].count) == 1
        mean = (2 * group.size + 15) / (2 * group.size)
        np.testing.assert_allclose(skipped.opt_state.inner[0].mu, 0.1 * mean, rtol=1e-6)
        assert same_on_all_ranks(group, skipped)


@claim()
def a_rank_that_goes_on_from_an_older_state_is_named_with_its_step(group: fddp.Group):
    step = pull(group, check_replicas_every=2, donate=False)
    states = [step.init(np.float32(0))]
    for _ in range(3):
        states.append(step(states[-1], rows(1))[0])
    last = group.size - 1
    state = states[2 if group.rank == last else 3]
    error = error_of(partial(step, state, rows(1)), RuntimeError)
    assert f"after step 4: rank {last} is at step 3, rank 0 at step 4; params " in error, error
