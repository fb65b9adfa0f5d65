"""Sums of hooks over several processes, against values by hand or NumPy's."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from on_ranks.claims import claim, on_the_wire, same_on_all_ranks

import fddp
from fddp import hooks

WIDTH = 24


def rows_of_ranks(group: fddp.Group) -> np.ndarray:
    """Each rank's gradient of w under mean of w·x: its row x."""
    return np.random.default_rng(5).normal(size=(group.size, WIDTH)).astype(np.float32)


def pulled(
    group: fddp.Group, hook: fddp.Hook, steps: int = 1, **options: Any
) -> tuple[fddp.TrainState, Any]:
    """The mean gradient of a hook: the step of SGD with rate 1 from zeros."""
    loss = lambda w, x: jnp.sum(w * x) / len(x)  # noqa: E731
    step = fddp.train_step(loss, optax.sgd(1.0), group=group, hook=hook, **options)
    state = step.init(np.zeros(WIDTH, np.float32))
    info = None
    for _ in range(steps):
        state, info = step(state, rows_of_ranks(group)[group.rank][None])
    return state, info


@claim(quick=("mpi",))
def sixteen_bits_are_rounded_before_and_after_a_sum_in_float32(group: fddp.Group):
    for hook, dtype, by in (
        (hooks.bf16(), jnp.bfloat16, 1),
        (hooks.fp16(), jnp.float16, group.size),
    ):
        rounded = (rows_of_ranks(group) / by).astype(dtype).astype(np.float32).sum(0)
        mean = by * rounded.astype(dtype).astype(np.float32) / group.size
        state, info = pulled(group, hook)
        np.testing.assert_allclose(
            state.params, -mean, rtol=1e-6, atol=2e-3 * float(jnp.finfo(dtype).eps)
        )
        # Half of the 4-byte words, and loss and weight.
        assert info.sent.tolist() == [on_the_wire(group, 2 * WIDTH), on_the_wire(group, 2 * 4)]
        assert same_on_all_ranks(group, state.params)


@claim(quick=("gloo",))
def eight_bits_travel_and_what_they_lose_comes_later(group: fddp.Group):
    mean = rows_of_ranks(group).mean(0)
    state, info = pulled(group, hooks.quantize(block=8), steps=8)
    np.testing.assert_allclose(state.params, -8 * mean, atol=0.05 * np.abs(mean).max() * 8)
    blocks = -(-WIDTH // 8 // group.size) * group.size  # each rank adds up equally many
    assert int(info.sent[0]) == on_the_wire(group, blocks * (8 + 4))
    assert same_on_all_ranks(group, state.params)


@claim()
def every_rank_adds_the_largest_numbers_of_all(group: fddp.Group):
    rows = rows_of_ranks(group)
    largest = np.argsort(-np.abs(rows), axis=1)[:, :3]
    sparse = np.zeros_like(rows)
    np.put_along_axis(sparse, largest, np.take_along_axis(rows, largest, 1), 1)
    state, info = pulled(group, hooks.topk(3 / WIDTH))
    np.testing.assert_allclose(state.params, -sparse.sum(0) / group.size, rtol=1e-5)
    assert int(info.sent[0]) == 3 * 8 * (group.size - 1)
    residual = np.asarray(state.hook_state.addressable_data(0))
    np.testing.assert_allclose(residual.reshape(-1), (rows - sparse)[group.rank], rtol=1e-6)
    assert same_on_all_ranks(group, state.params)


@claim(quick=("gloo",))
def powersgd_of_full_rank_is_the_plain_sum_after_its_start_and_before(group: fddp.Group):
    rows = np.random.default_rng(6).normal(size=(group.size, 6, 4)).astype(np.float32)
    loss = lambda w, x: jnp.sum(w * x) / len(x)  # noqa: E731
    hook = hooks.powersgd(4, start_step=1, min_compression_rate=0)
    step = fddp.train_step(loss, optax.sgd(1.0), group=group, hook=hook)
    state = step.init(np.zeros((6, 4), np.float32))
    nbytes = []
    for k in range(2):
        state, info = step(state, rows[group.rank][None])
        np.testing.assert_allclose(state.params, -(k + 1) * rows.mean(0), rtol=1e-4, atol=1e-5)
        nbytes.append(int(info.sent[0]))
    assert nbytes == [on_the_wire(group, 6 * 4 * 4), on_the_wire(group, (6 + 4) * 4 * 4)]
    assert same_on_all_ranks(group, state.params)


@claim(quick=("gloo",))
def what_overflows_on_one_rank_stops_all_and_no_hook_remembers_anything_of_it(group: fddp.Group):
    loss = lambda p, x: (jnp.sum(p["a"] * x) + jnp.sum(p["b"])) / len(x)  # noqa: E731
    params = {name: np.zeros(WIDTH, np.float32) for name in "ab"}
    good = rows_of_ranks(group)[group.rank][None]
    bad = np.where(
        (np.arange(WIDTH) == 5) & (group.rank == group.size - 1), np.float32(np.nan), good
    )

    def local_memory(state: Any) -> list[np.ndarray]:
        return [np.asarray(x.addressable_data(0)) for x in jax.tree.leaves(state.hook_state)]

    for hook in (hooks.quantize(), hooks.topk(0.1)):
        optimizer = fddp.dynamic_scale(optax.sgd(1.0), initial=4.0)
        step = fddp.train_step(
            loss, optimizer, group=group, hook=hook, bucket_cap_mb=0, donate=False
        )
        before, _ = step(step.init(params), good)
        after, _ = step(before, bad)
        assert float(after.opt_state.scale) == 2
        np.testing.assert_array_equal(local_memory(after), local_memory(before))
        on, _ = step(after, good)
        assert all(np.all(np.isfinite(x)) for x in (*jax.tree.leaves(on.params), *local_memory(on)))
        assert np.any(on.params["a"] != before.params["a"])
        assert same_on_all_ranks(group, on.params)


@claim(quick=("gloo",))
def leaves_without_elements_are_trained_like_any_other(group: fddp.Group):
    loss = lambda p, x: (jnp.sum(p["w"] * x) + jnp.sum(p["empty"]) + jnp.sum(p["half"])) / len(x)  # noqa: E731
    params = {
        "w": np.zeros(WIDTH, np.float32),
        "empty": np.zeros((0, 3), np.float32),
        "half": np.zeros((3, 0), jnp.bfloat16),
    }
    for hook in (None, hooks.quantize(), hooks.topk(1.0)):
        step = fddp.train_step(loss, optax.sgd(1.0), group=group, hook=hook, bucket_cap_mb=0)
        state = step.init(params)
        for _ in range(2):
            state, _ = step(state, rows_of_ranks(group)[group.rank][None])
        np.testing.assert_allclose(state.params["w"], -2 * rows_of_ranks(group).mean(0), atol=0.1)
        assert state.params["empty"].shape == (0, 3)
        assert same_on_all_ranks(group, state.params["w"])
