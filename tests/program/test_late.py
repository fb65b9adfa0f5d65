"""A program that is split where it need not wait for its last messages computes what it did."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import jaxpr_as_fun
from program.test_overlap import RANKS, recorded

from fddp.jaxpr import form_of
from fddp.program import SplitProgram, exchange, overlapped, split_late
from fddp.step.schedules.late_sums import first_third

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


def test_the_last_two_thirds_leave_in_the_order_of_the_next_forward_pass():
    """Six layers, of which the last is ready first, and the first is read first."""
    calls = list[str]()

    def six_layers(params: list[jax.Array]) -> list[jax.Array]:
        carrier = recorded(calls)
        return [x - exchange(carrier, "sum", jnp.sin(x), RANKS) for x in params]

    params = [jnp.ones(n) for n in (6, 6, 6, 5, 3, 1)]
    closed = jax.make_jaxpr(six_layers)(params)
    parts = split_late(closed, [], passes=6, at_once=first_third)

    def whole(*params: jax.Array) -> list[jax.Array]:
        return parts.rest(params, parts.received(parts.first(*params)[1]))

    assert [form_of(parts.program.jaxpr.eqns[at].invars[0]).size for at in parts.begun] == [
        *(6, 6),
        *(1, 3, 5, 6),
    ]
    for value, x in zip(run(whole, *params), params, strict=True):
        np.testing.assert_allclose(value, x - RANKS * np.sin(x), rtol=1e-6)
    starts = [f"start {k} of 1" for k in range(6)]
    assert calls == [*starts, *(f"done {k} of 1" for k in range(6))]
