"""Any number of calls, then a step, are one step on all their rows.

Nothing is sent in between. Plain JAX on the joined batch is the truth, and a loop over replicas
where each has its own buffers. `test_value_and_grad.py` tests the report of a call on its rows and
pending gradients.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import trees
from every_schedule import SCHEDULES
from problems import first_column
from trees import bits, on_each_device
from truth import by_plain_jax

import fddp

close = partial(trees.close, rtol=1e-12, atol=1e-13)

pytestmark = pytest.mark.steps

REPLICAS = 4
ROWS = 16  # of one call: two micro-batches of two rows for each replica
HELD = (0, 3, 1, 4)  # calls of no_sync before each step
CALLS = sum(HELD) + len(HELD)
RNG = np.random.default_rng(1)
PARAMS = {"w": RNG.normal(size=(3, 5)), "b": RNG.normal(size=5), "head": RNG.normal(size=5)}
ADAM = optax.adam(1e-2)


def batches(count: int) -> Iterator[np.ndarray]:
    """The rows of so many calls, the same each time."""
    random = np.random.default_rng(2)
    return (random.normal(size=(ROWS, 3)) for _ in range(count))


@cache
def by_one_replica() -> list[tuple[Any, Any]]:
    """Parameters and loss after each step of one replica on all rows since the last."""
    rows = batches(CALLS)
    joined = [np.concatenate([next(rows) for _ in range(calls + 1)]) for calls in HELD]
    result = by_plain_jax(first_column, ADAM, PARAMS, joined)
    return list(zip(result.history, result.losses))


@pytest.mark.quick("2 micro-batches-overlap")
@SCHEDULES
@pytest.mark.parametrize("steps", [1, 2], ids="{} micro-batches".format)
def test_any_number_of_calls_and_a_step_are_one_step_on_all_their_rows(group, x64, schedule, steps):
    options: Any = {"schedule": schedule, "accumulation_steps": steps, "bucket_cap_mb": 0}
    step = fddp.train_step(first_column, ADAM, group=group(REPLICAS), **options)
    state = step.init(PARAMS)
    rows = batches(CALLS)
    for number, (calls, expected) in enumerate(zip(HELD, by_one_replica())):
        before = bits((state.params, state.opt_state))
        turn = [next(rows) for _ in range(calls + 1)]
        for part in turn[:-1]:
            state, _ = step.no_sync(state, part)
            assert bits((state.params, state.opt_state)) == before and int(state.step) == number
        state, info = step(state, turn[-1])
        close((state.params, info.loss), expected)
        assert state.accumulated is None and int(state.step) == number + 1


### Traffic

# An instruction of XLA's that moves something between replicas.
MESSAGE = re.compile(
    r" (all-reduce|all-gather|all-to-all|reduce-scatter|collective-[a-z]+)(-start)?\("
)


def recorded(group: fddp.Group) -> tuple[fddp.Group, list[str]]:
    """The group, and the names of the messages it sends from now on: inside programs when these are
    traced."""
    messages: list[str] = []

    def noted(name: str, message: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            messages.append(name)
            return message(*args)

        return call

    communicator = replace(
        group.communicator, all_reduce=noted("inside", group.communicator.all_reduce)
    )
    calls = {name: noted(name, f) for name, f in group.hosts._asdict().items() if callable(f)}
    hosts = group.hosts._replace(**calls)
    return replace(group, communicator=communicator, hosts=hosts), messages


@SCHEDULES
def test_calls_and_steps_of_any_numbers_of_rows_are_one_step_on_all_of_them(group, x64, schedule):
    """The pending gradients may also go on with a step of its own first batch, as after a
    restart."""
    data = np.concatenate(list(batches(3)))
    counts = (8, 24, 16)
    pieces = np.split(data, np.cumsum(counts)[:-1])
    options: Any = {"group": group(REPLICAS), "schedule": schedule}
    step, second_step = (fddp.train_step(first_column, optax.sgd(0.1), **options) for _ in range(2))
    state, _ = step.no_sync(step.init(PARAMS), pieces[0])
    state, _ = step.no_sync(state, pieces[1])
    state, _ = second_step(state, pieces[2])
    grads = jax.grad(first_column)(PARAMS, data)
    close(state.params, jax.tree.map(lambda p, g: p - 0.1 * g, PARAMS, grads))


@pytest.mark.parametrize("schedule", ["overlap", "after"])
def test_no_sync_asks_for_no_message_and_the_step_for_one_per_bucket(group, schedule):
    four, messages = recorded(group(REPLICAS))
    options: Any = {"schedule": schedule, "accumulation_steps": 2, "bucket_cap_mb": 0}
    step = fddp.train_step(first_column, optax.sgd(0.1), group=four, **options)
    rows = np.ones((ROWS, 3), np.float32)
    state, _ = step(
        step.init(jax.tree.map(np.float32, PARAMS)), rows
    )  # which also compares the ranks
    assert messages
    messages.clear()
    for _ in range(3):
        state, _ = step.no_sync(state, rows)
    assert messages == []
    step(state, rows)
    assert messages == ["inside"] * 3 == messages[:1] * len(step.plan.buckets)


def running(params: Any, x: Any, *, model_state: Any) -> Any:
    """A buffer that keeps a running mean of the rows it sees, and enters the loss."""
    mean = 0.5 * model_state + jnp.mean(x, axis=0)
    return first_column(params, x - mean), (mean, {"mean": jnp.mean(mean)})


def test_xla_puts_no_collective_into_no_sync_either(group):
    def noisy(params: Any, x: Any, *, model_state: Any, rng: Any) -> Any:
        return running(
            params, x * jax.random.bernoulli(rng, shape=x.shape), model_state=model_state
        )

    step = fddp.train_step(noisy, optax.sgd(0.1), group=group(REPLICAS), accumulation_steps=2)
    rows = np.ones((ROWS, 3), np.float32)
    first = step.init(
        jax.tree.map(np.float32, PARAMS), model_state=np.zeros(3, np.float32), rng=jax.random.key(0)
    )
    second, _ = step.no_sync(first, rows)
    for state in (first, second):
        lowered = step.settled.accumulate.lower(
            state._replace(accumulated=None), state.accumulated, rows
        )
        text = lowered.compile().as_text() or ""
        assert " while(" in text and not MESSAGE.search(text)
    assert MESSAGE.search(step.lower(second, rows).compile().as_text() or "")


### Buffers


def by_hand(
    rows: Sequence[np.ndarray], model_states: list[Any], steps: int
) -> tuple[Any, list[list[Any]]]:
    """Mean gradient at PARAMS over all rows, each replica with its own buffers; and the buffers
    after each call."""
    gradient = jax.jit(jax.value_and_grad(running, has_aux=True))
    grads = []
    history = []
    for part in rows:
        for k, local_rows in enumerate(np.split(part, REPLICAS)):
            for micro in np.split(local_rows, steps):
                (_, (model_states[k], _)), grad = gradient(
                    PARAMS, micro, model_state=model_states[k]
                )
                grads.append(grad)
        history.append(list(model_states))
    return jax.tree.map(lambda *leaf_grads: sum(leaf_grads) / len(leaf_grads), *grads), history


@SCHEDULES
@pytest.mark.parametrize("broadcast", [True, False], ids=["broadcast", "own"])
def test_buffers_are_not_broadcast_before_the_step(group, x64, schedule, broadcast):
    options: Any = {
        "schedule": schedule,
        "broadcast_buffers": broadcast,
        "accumulation_steps": 2,
        "bucket_cap_mb": 0,
    }
    step = fddp.train_step(running, optax.sgd(1.0), group=group(REPLICAS), **options)
    start = np.ones(3)
    rows = list(batches(3))
    state = step.init(PARAMS, model_state=start)
    grads, history = by_hand(rows, [start] * REPLICAS, steps=2)
    for part, buffers in zip(rows[:-1], history):
        state, _ = step.no_sync(state, part)
        assert state.accumulated is not None
        close(np.asarray(state.accumulated.model_state), np.stack(buffers))
        assert len(np.unique(state.accumulated.model_state, axis=0)) == REPLICAS
        assert bits(on_each_device(state.model_state)) == [start.tobytes()] * REPLICAS
    state, _ = step(state, rows[-1])
    last = [np.asarray(x) for x in history[-1]]
    close(on_each_device(state.model_state), [last[0]] * REPLICAS if broadcast else last)
    close(state.params, jax.tree.map(lambda p, g: p - g, PARAMS, grads))


def test_in_turns_with_steps_nothing_is_checked_anew(
    group: Callable[[int], fddp.Group], monkeypatch: Any
):
    """The arguments of a call differ from those of the next; a check of a large state would take
    long."""
    checked = []
    monkeypatch.setattr("fddp.step.later_batches.check_params", lambda *args: checked.append(args))
    step = fddp.train_step(first_column, ADAM, group=group(2))
    state = step.init(PARAMS)
    rows = np.ones((ROWS, 3))
    for _ in range(3):
        for call in (step.no_sync, step.no_sync, step):
            state, _ = call(state, rows)
    assert len(checked) == 1
