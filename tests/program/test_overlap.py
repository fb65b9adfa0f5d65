"""Starts and dones stand where messages overlap and stay in order, for a carrier that records."""

from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback

from fddp.program import Carrier, exchange, overlapped

RANKS = 3


def recorded(calls: list[str]) -> Carrier:
    """A carrier whose ranks all have this rank's arrays; `calls` gets the calls in order."""
    flying = dict[int, tuple[list[jax.Array], str]]()
    numbers = count()

    def start(token: jax.Array, arrays: Sequence[jax.Array], kind: str, *_: Any) -> Any:
        number = next(numbers)
        calls.append(f"start {number} of {len(arrays)}")
        flying[number] = list(arrays), kind
        return token * 1.0, number

    def done(tokens: Sequence[jax.Array], number: int, forms: Sequence[Any], turn: int):
        calls.append(f"done {number} of {len(forms)}")
        arrays, kind = flying.pop(number)
        flat = jnp.concatenate([x.ravel() for x in arrays])
        if kind == "sum":
            flat = RANKS * flat
        elif kind == "gather":
            flat = jnp.tile(flat, RANKS)
        at = np.cumsum([0, *(np.prod(form.shape, dtype=int) for form in forms)])
        results = [flat[a:b].reshape(form.shape) for a, b, form in zip(at, at[1:], forms)]
        return tokens[0], results

    return Carrier(start, done)


def run(f: Callable[..., Any], *args: Any) -> tuple[list[str], Any]:
    """The calls of `f(carrier, *args)` in order, and its outputs under `overlapped`."""
    calls = list[str]()
    closed = jax.make_jaxpr(lambda *args: f(recorded(calls), *args))(*args)
    _, outputs = overlapped(closed, jnp.ones(()), args)
    return calls, outputs


def test_all_messages_start_before_the_first_is_awaited():
    def f(carrier: Carrier, x: jax.Array) -> Any:
        first = exchange(carrier, "sum", jnp.sin(x), RANKS)
        second = exchange(carrier, "sum", jnp.cos(jnp.sin(x)), RANKS)
        return first, second

    x = jnp.arange(4.0)
    calls, (first, second) = run(f, x)
    assert calls == ["start 0 of 1", "start 1 of 1", "done 0 of 1", "done 1 of 1"]
    np.testing.assert_allclose(first, RANKS * np.sin(x), rtol=1e-6)
    np.testing.assert_allclose(second, RANKS * np.cos(np.sin(x)), rtol=1e-6)


def test_a_message_that_needs_another_starts_as_soon_as_that_is_received():
    def f(carrier: Carrier, x: jax.Array) -> Any:
        needed = exchange(carrier, "sum", x, RANKS)
        other = exchange(carrier, "sum", x + 1, RANKS)
        return exchange(carrier, "sum", 2 * needed, RANKS), other

    calls, (last, other) = run(f, jnp.ones(2))
    assert [call.split(" of")[0] for call in calls] == [
        *("start 0", "start 1", "done 0", "start 2", "done 1", "done 2")
    ]
    np.testing.assert_array_equal(last, [18.0, 18.0])
    np.testing.assert_array_equal(other, [6.0, 6.0])


def test_a_message_copies_joined_arrays_in_and_split_results_out_without_xla():
    def f(carrier: Carrier, a: jax.Array, b: jax.Array) -> Any:
        bucket = jnp.concatenate([a.reshape(1, -1), b[None]], axis=1).reshape(-1)
        message = jnp.concatenate([bucket, jnp.ones(1)])
        summed, tail = jax.lax.split(exchange(carrier, "sum", message, RANKS), (6, 1))
        first, second = jax.lax.split(summed, (4, 2))
        return first.reshape(2, 2), second, tail

    calls, (first, second, tail) = run(f, jnp.arange(4.0).reshape(2, 2), jnp.full(2, 7.0))
    assert calls == ["start 0 of 3", "done 0 of 3"]
    np.testing.assert_array_equal(first, RANKS * np.arange(4.0).reshape(2, 2))
    np.testing.assert_array_equal([*second, *tail], [21.0, 21.0, 3.0])


def test_one_token_goes_through_every_call_and_a_done_waits_for_what_can_be_computed():
    """A done holds a thread of XLA. What it waits for is an argument of its call."""
    seen = list[list[float]]()
    carrier = recorded([])

    def start(token: jax.Array, *rest: Any) -> tuple[jax.Array, Any]:
        seen.append([float(token)])
        return token + 1, carrier.start(token, *rest)[1]

    def done(tokens: Sequence[jax.Array], *rest: Any) -> Any:
        seen.append(list(map(float, tokens)))
        return tokens[0] + 1, carrier.done(tokens, *rest)[1]

    def f(x: jax.Array) -> Any:
        add = lambda x: exchange(Carrier(start, done), "sum", x, RANKS)  # noqa: E731
        return add(x), add(2 * x), x + 5

    x = jnp.ones(2)
    token, _ = overlapped(jax.make_jaxpr(f)(x), jnp.ones(()), [x])
    assert seen == [[1.0], [2.0], [3.0, 6.0], [4.0, 6.0]] and float(token) == 5.0


def test_effects_stay_in_order_though_a_message_needs_the_last_one_alone():
    said = list[float]()

    def say(x: Any) -> Any:
        said.append(float(x[0]))
        return x

    def f(carrier: Carrier, x: jax.Array) -> jax.Array:
        io_callback(say, x, x, ordered=True)
        return exchange(carrier, "sum", io_callback(say, x, 2 * x, ordered=True), RANKS)

    run(f, jnp.ones(2))
    assert said == [1.0, 2.0]


@pytest.mark.parametrize("loop", ["scan", "while", "condition", "cond"])
def test_messages_inside_of_loops_and_branches_are_started_and_awaited_there(loop: str):
    def f(carrier: Carrier, x: jax.Array) -> jax.Array:
        add = lambda x: exchange(carrier, "sum", x, RANKS)  # noqa: E731
        if loop == "scan":
            return jax.lax.scan(lambda total, row: (total + add(row), None), x[0], x)[0]
        if loop == "cond":
            return jax.lax.cond(x[0, 0] > 0, lambda x: add(x)[0], lambda x: x[0], x)
        body = lambda state: (state[0] + 1, add(state[1]))  # noqa: E731
        test = lambda state: state[0] < 2  # noqa: E731
        if loop == "condition":
            test = lambda state: add(state[1])[0] < 20  # noqa: E731
        return jax.lax.while_loop(test, body, (0, x[0]))[1]

    x = jnp.array([[1.0, 2.0], [3.0, 4.0]])
    expected = {"scan": [13.0, 20.0], "cond": [3.0, 6.0]}.get(loop, [9.0, 18.0])
    calls, (total,) = run(f, x)
    assert [call.split()[0] for call in calls][:2] == ["start", "done"]
    np.testing.assert_array_equal(total, expected)

    def start(token: jax.Array, *rest: Any) -> Any:
        return token + 1, carrier.start(token, *rest)[1]

    carrier = recorded([])
    closed = jax.make_jaxpr(lambda x: f(Carrier(start, carrier.done), x))(x)
    token, _ = overlapped(closed, jnp.ones(()), [x])
    # What follows waits for the messages of all rounds.
    assert float(token) == (2.0 if loop == "cond" else 3.0)


def test_a_gather_returns_the_rows_of_all_ranks():
    calls, (rows,) = run(lambda carrier, x: exchange(carrier, "gather", x, RANKS), jnp.arange(2.0))
    assert calls == ["start 0 of 1", "done 0 of 1"]
    np.testing.assert_array_equal(rows, [[0.0, 1.0]] * RANKS)


def test_a_value_of_an_earlier_stage_is_read_behind_the_start_that_precedes():
    """XLA runs what is ready first: only a product with the token keeps the second stage back."""

    def f(carrier: Carrier, x: jax.Array, w: jax.Array) -> Any:
        hidden = jnp.tanh(x @ w)
        first = exchange(carrier, "sum", hidden @ w, RANKS)
        return first, exchange(carrier, "sum", jnp.exp(hidden), RANKS)

    closed = jax.make_jaxpr(lambda x, w: f(recorded([]), x, w))(jnp.ones((2, 2)), jnp.ones((2, 2)))
    run_it = lambda token, *args: overlapped(closed, token, args)[1]  # noqa: E731
    rewritten = jax.make_jaxpr(run_it)(jnp.ones(()), jnp.ones((2, 2)), jnp.ones((2, 2))).jaxpr
    (exp,) = (eqn for eqn in rewritten.eqns if eqn.primitive.name == "exp")
    made = {var: eqn for eqn in rewritten.eqns for var in eqn.outvars}
    assert made[exp.invars[0]].primitive.name == "mul"


def test_a_program_without_messages_is_unchanged_and_returns_its_token():
    closed = jax.make_jaxpr(lambda x: jnp.sin(x) + 1)(1.0)
    token, (value,) = overlapped(closed, jnp.ones(()), [jnp.float32(2.0)])
    assert float(token) == 1.0
    np.testing.assert_allclose(value, np.sin(2.0) + 1, rtol=1e-6)


def test_a_message_has_the_name_of_the_scope_around_it():
    names = list[str]()
    carrier = recorded([])

    def start(*args: Any) -> Any:
        names.append(args[4])
        return carrier.start(*args)

    def f(x: jax.Array) -> Any:
        with jax.named_scope("step"), jax.named_scope("bucket0"):
            named = exchange(Carrier(start, carrier.done), "sum", x, RANKS)
        return named, exchange(Carrier(start, carrier.done), "gather", x, RANKS)

    x = jnp.ones(2)
    overlapped(jax.make_jaxpr(f)(x), jnp.ones(()), [x])
    assert names == ["bucket 0", "gather"]
