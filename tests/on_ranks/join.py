"""What a step makes of ranks that use different parameters, count different numbers of tokens, run out of data, or
overflow.

Most train w under the mean of w·x, whose gradient is the mean of the x, by SGD with rate 1.
"""

import io
from collections.abc import Iterator
from contextlib import redirect_stderr
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from on_ranks.claims import claim, error_of
from on_ranks.train_step import rows, same_on_all_ranks

import fddp

SCHEDULES = ("fused", "staged", "after")


def product(w: Any, x: Any) -> Any:
    return jnp.mean(w * x)


def pull(group: fddp.Group, loss: Any = product, **options: Any) -> fddp.TrainStep:
    return fddp.train_step(loss, optax.sgd(1.0), group=group, **options)


def start() -> Any:
    return np.float32(0)


### Parameters that a step does not use


@claim()
def a_leaf_is_left_alone_where_no_rank_uses_it_and_reduced_where_one_does(group: fddp.Group):
    names = ("a", "b") if group.rank == 0 else ("b",)
    loss = lambda p, x: sum(jnp.mean(p[name] * x) for name in names)  # noqa: E731
    params = {name: np.ones(2, np.float32) for name in "abc"}
    for schedule in SCHEDULES:
        # With weight decay a zero gradient would move c.
        decay = optax.chain(optax.add_decayed_weights(0.5), optax.sgd(1.0, momentum=0.9))
        options = {"group": group, "find_unused_parameters": True, "schedule": schedule}
        step = fddp.train_step(loss, decay, **options)
        state, info = step(step.init(params), rows(4, 4))
        assert {name: int(n) for name, n in info.used.items()} == {"a": 1, "b": group.size, "c": 0}
        assert sorted(name for bucket in step.plan.buckets for name in bucket.names) == ["a", "b"]
        np.testing.assert_array_equal(state.params["c"], 1)
        np.testing.assert_allclose(state.params["a"], 1 - (2 / group.size + 0.5), rtol=1e-6)
        np.testing.assert_allclose(state.params["b"], 1 - (2 + 0.5), rtol=1e-6)
        trace = state.opt_state[1][0].trace
        np.testing.assert_array_equal(trace["c"], 0)
        assert same_on_all_ranks(group, state)


@claim()
def without_the_option_a_leaf_that_some_ranks_do_not_use_gets_zeros_from_them(group: fddp.Group):
    loss = lambda p, x: jnp.mean(p["a" if group.rank == 0 else "b"] * x)  # noqa: E731
    step = pull(group, loss)
    state, info = step(step.init({name: start() for name in "ab"}), rows(4))
    assert info.used is None
    np.testing.assert_allclose(state.params["a"], -4 / group.size, rtol=1e-6)
    np.testing.assert_allclose(state.params["b"], -4 * (group.size - 1) / group.size, rtol=1e-6)


### Weights


@claim()
def a_weighted_loss_is_the_mean_over_all_tokens(group: fddp.Group):
    tokens = np.arange(group.size) + 1.0
    values = 10.0 ** np.arange(group.size)
    loss = lambda w, x: fddp.Weighted(jnp.mean(w * x[:, 0]), x[0, 1])  # noqa: E731
    for schedule in SCHEDULES:
        step = pull(group, loss, schedule=schedule)
        batch = np.array([[values[group.rank], tokens[group.rank]]], np.float32)
        state, _ = step(step.init(start()), batch)
        np.testing.assert_allclose(state.params, -np.average(values, weights=tokens), rtol=1e-6)


### Ranks whose gradients are not finite


@claim()
def a_rank_whose_gradient_is_not_finite_names_itself_and_all_skip_the_step(group: fddp.Group):
    last = group.rank == group.size - 1
    says = "its gradient of " if last else "the mean gradients are not finite" if group.rank == 0 else None
    for schedule in SCHEDULES:
        step = pull(group, schedule=schedule, skip_nonfinite=True)
        state = step.init(start())
        with redirect_stderr(io.StringIO()) as told:
            for ill in (False, True, False):
                state, _ = step(state, rows(2, np.nan if ill and last else 1))
            assert float(state.params) == -3.0, "two steps of three, by a mean of 1.5"
            step(state, rows(2, 1))  # by then the others are over
        wanted = f"fddp: rank {group.rank} of {group.size}: step 2 was skipped: {says}" if says else ""
        lines = [line for line in told.getvalue().splitlines() if "bring the same first rows" not in line]
        words = "\n".join(lines)
        assert words.startswith(wanted) and bool(words) == bool(says), told.getvalue()


@claim(sizes=(3, 4))
def a_rank_that_changes_its_parameters_alone_is_found_and_named_by_all(group: fddp.Group):
    step = pull(group, check_replicas_every=2)
    state, _ = step(step.init(start()), rows(2, 1))
    if group.rank == 1:
        (shard,) = state.params.addressable_shards
        changed = jax.device_put(np.asarray(shard.data) + 1, shard.device)
        whole = jax.make_array_from_single_device_arrays(state.params.shape, state.params.sharding, [changed])
        state = state._replace(params=whole)
    message = error_of(lambda: step(state, rows(2, 1)), RuntimeError)
    assert "no longer equal after step 2: params of rank 1 differs from the others'" in message, message


### Ranks whose gradients overflow


@claim(quick=("mpi",))
def a_rank_that_overflows_stops_all_ranks(group: fddp.Group):
    """In float16 the gradient is the scale times x: on the last rank too much for the scale to begin with."""
    half = fddp.mixed_precision(lambda w, x: product(w, x).astype(jnp.float32), jnp.float16)
    optimizer = fddp.dynamic_scale(optax.adamw(0.5, weight_decay=0.5), initial=2.0**14)
    x = rows(1, 16) if group.rank == group.size - 1 else rows(1, 1)
    for schedule in SCHEDULES:
        options = {"group": group, "schedule": schedule, "accumulation_steps": 2, "donate": False}
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


### Ranks that run out of data


def uneven(group: fddp.Group) -> list[np.ndarray]:
    """Rank r has r + 1 batches, each of ones."""
    return [rows(1)] * (group.rank + 1)


@claim()
def a_rank_without_data_counts_for_nothing_until_all_are_done(group: fddp.Group):
    for schedule in SCHEDULES:
        by_all, by_active = ([], [])
        for taken, option in ((by_all, True), (by_active, False)):
            step = pull(group, schedule=schedule)
            state = step.init(start())
            for batch in fddp.join(uneven(group), group, divide_by_initial_world_size=option):
                state, _ = step(state, batch)
                taken.append(float(state.params))
        # In step k all but the first k ranks have a batch.
        np.testing.assert_allclose(by_active, -np.arange(1.0, group.size + 1), rtol=1e-6)
        np.testing.assert_allclose(by_all, -np.cumsum(np.arange(group.size, 0, -1) / group.size), rtol=1e-6)


@claim()
def join_ends_on_every_rank_at_once_if_asked(group: fddp.Group):
    seen: list[Any] = []
    batches = fddp.join(uneven(group), group, throw_on_early_termination=True)
    assert "rank 0 has run out" in error_of(lambda: seen.extend(batches), RuntimeError)
    assert len(seen) == 1


@claim()
def a_rank_without_any_batch_is_an_error_on_every_rank(group: fddp.Group):
    def batches() -> Iterator[np.ndarray]:
        if group.rank > 0:
            yield rows(1)

    assert "no batch at all on rank 0" in error_of(lambda: list(fddp.join(batches(), group)))


@claim()
def a_rank_without_data_uses_no_parameter(group: fddp.Group):
    step = pull(group, find_unused_parameters=True)
    state = step.init(start())
    counts = []
    for batch in fddp.join(uneven(group), group):
        state, info = step(state, batch)
        counts.append(int(info.used))
    assert counts == list(range(group.size, 0, -1))


@claim()
def a_rank_that_ends_with_a_small_batch_counts_with_all_its_rows_afterwards(group: fddp.Group):
    counts = (4, 4, 4) if group.rank == 0 else (4, 1)
    batches = [np.full(count, 1.0 + number, np.float32) for number, count in enumerate(counts)]
    step = fddp.train_step(lambda w, x: jnp.mean(w * x), optax.sgd(1.0), group=group)
    state, seen = step.init(jnp.zeros(())), [0.0]
    for batch in fddp.join(batches, group):
        state, _ = step(state, batch)
        seen.append(float(state.params))
    # All rows of the first and the second step; of the third rank 0's four, divided by four rows of each rank.
    np.testing.assert_allclose(-np.diff(seen), [1, 2, 3 / group.size], rtol=1e-6)


### Optimizers that ask for the loss


@claim()
def an_optimizer_gets_the_mean_loss_of_all_ranks(group: fddp.Group):
    extra_args: Any = optax.GradientTransformationExtraArgs
    seen = extra_args(lambda params: jnp.zeros(()), lambda updates, state, params=None, *, value, **_: (updates, value))
    for schedule in SCHEDULES:
        step = fddp.train_step(product, seen, group=group, schedule=schedule)
        state, _ = step(step.init(np.float32(2)), rows(1 + group.rank))
        np.testing.assert_allclose(state.opt_state, 1 + group.size, rtol=1e-6)
        assert same_on_all_ranks(group, state)
