"""A program that is split where it need not wait for its last messages computes what it did."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import jaxpr_as_fun
from program.test_overlap import RANKS, recorded

from fddp.program import SplitProgram, exchange, overlapped, split_late

PARAMS = jnp.arange(1.0, 5.0)
ROWS = jnp.full((3, 4), 0.5)


def step(calls: list[str]) -> Any:
    """A step of two messages: the first one carries the loss."""
    carrier = recorded(calls)

    def run(params: jax.Array, moments: jax.Array, rows: jax.Array) -> tuple[Any, ...]:
        loss, grads = jax.value_and_grad(lambda w: jnp.mean((rows @ w) ** 2))(params)
        total = exchange(carrier, "sum", jnp.stack([loss, 1.0]), RANKS)
        mean = exchange(carrier, "sum", grads, RANKS) / total[1]
        moments = 0.9 * moments + mean
        return params - 0.1 * moments, moments, total[0] / total[1]

    return run


def split(calls: list[str]) -> tuple[Any, SplitProgram]:
    closed = jax.make_jaxpr(step(calls))(PARAMS, 0 * PARAMS, ROWS)
    return closed, split_late(closed, [2], passes=2)


def run(f: Any, *args: Any) -> list[Any]:
    closed = jax.make_jaxpr(f)(*args)
    return overlapped(closed, jnp.ones(()), jax.tree.leaves(args))[1]


def test_the_first_part_starts_all_messages_and_receives_those_of_its_outputs():
    calls = list[str]()
    _, parts = split(calls)
    report, *_ = run(parts.first, PARAMS, 0 * PARAMS, ROWS)
    assert calls == ["start 0 of 1", "start 1 of 1", "done 0 of 1"]
    np.testing.assert_allclose(report, np.mean((ROWS @ PARAMS) ** 2))


def test_both_parts_together_are_the_program():
    calls = list[str]()
    closed, parts = split(calls)
    expected = run(jaxpr_as_fun(closed), PARAMS, 0 * PARAMS, ROWS)
    args = [PARAMS, 0 * PARAMS, ROWS]

    def whole(*args: jax.Array) -> list[Any]:
        report, computed = parts.first(*args)
        return [*parts.rest([args[k] for k in parts.passed], parts.received(computed)), *report]

    for value, wanted in zip(run(whole, *args), expected, strict=True):
        np.testing.assert_array_equal(value, wanted)


def test_a_program_whose_outputs_need_all_messages_has_no_late_one():
    closed = jax.make_jaxpr(step([]))(PARAMS, 0 * PARAMS, ROWS)
    assert split_late(closed, [0, 1, 2], passes=2).begun == ()


def test_messages_leave_when_ready_and_arrive_as_a_forward_pass_needs_them():
    calls = list[str]()

    def layers(params: list[jax.Array]) -> list[jax.Array]:
        carrier = recorded(calls)
        return [x - exchange(carrier, "sum", jnp.sin(x), RANKS) for x in params]

    params = [jnp.ones(n) for n in (6, 5, 3)]  # the last layer is ready first
    parts = split_late(jax.make_jaxpr(layers)(params), [], passes=3)

    def whole(*params: jax.Array) -> list[jax.Array]:
        return parts.rest(params, parts.received(parts.first(*params)[1]))

    for value, x in zip(run(whole, *params), params, strict=True):
        np.testing.assert_allclose(value, x - RANKS * np.sin(x), rtol=1e-6)
    starts = [f"start {k} of 1" for k in range(3)]
    assert calls == [*starts, *(f"done {k} of 1" for k in (2, 1, 0))]
