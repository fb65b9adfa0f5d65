"""Trainings in which errors are caught.

One step takes every number of every leaf to the mean of the ranks' x; each leaf is a bucket.
"""

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from on_ranks.claims import claim, error_of, sampled, schedules

import fddp
from fddp.schedules import fused

LEAVES = 6
PLACES = ("before a message", "after a message", "in a stage", "in an update")


def host(act: Callable[[], None]) -> Callable[[jax.Array], jax.Array]:
    """The identity, with a call of a function on the host."""

    def pass_on(x: Any) -> Any:
        act()
        return x

    return lambda x: jax.pure_callback(pass_on, jax.ShapeDtypeStruct(x.shape, x.dtype), x)


def breakable(group: fddp.Group, lanes: int) -> tuple[fddp.TrainStep, set[str]]:
    """A step that fails at chosen places, and the set of these; one rank is slower than the
    other."""
    broken = set[str]()

    def fail(place: str) -> None:
        if place in broken:
            time.sleep(0.1 * group.rank)
            raise ArithmeticError(place)

    def failing(real: Any) -> Any:
        def reduce(wire: jax.Array) -> jax.Array:
            time.sleep(0.02 * group.rank)
            third = (
                wire.size // group.placement.replicas_in_array // 10 == LEAVES - 2
            )  # loss and weight, two numbers more, ride along
            if third:
                fail("before a message")
            total = real.all_reduce(wire)
            if third:
                fail("after a message")
            return total

        return real._replace(all_reduce=reduce, clones=tuple(map(failing, real.clones)))

    backward = jax.custom_vjp(lambda w: w)
    backward.defvjp(lambda w: (w, None), lambda _, g: (host(lambda: fail("in a stage"))(g),))
    sgd = optax.sgd(0.5)

    def loss(params: Any, x: Any) -> Any:
        return sum(jnp.sum(((backward(w) if k == 1 else w) - x) ** 2) for k, w in enumerate(params))

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        new: Any = sgd.update(updates, state, params)[0]
        return [
            host(lambda: fail("in an update"))(w) if k == 1 else w for k, w in enumerate(new)
        ], state

    group = fddp.round_robin([group] * lanes)
    step = fddp.train_step(
        loss,
        optax.GradientTransformation(sgd.init, update),
        group=replace(group, transport=failing(group.transport)),
        schedule="staged",
        bucket_cap_mb=0,
        donate=False,
    )
    return step, broken


def start(step: fddp.TrainStep) -> fddp.TrainState:
    return step.init([jnp.zeros(10 * (k + 1)) for k in range(LEAVES)])


def rows(group: fddp.Group) -> np.ndarray:
    return np.full(1, group.rank, np.float32)


def trains(group: fddp.Group, step: fddp.TrainStep, state: fddp.TrainState) -> None:
    """Runs a step from the start, and checks its result."""
    state, _ = step(state, rows(group))
    for w in state.params:
        np.testing.assert_array_equal(w, np.full(w.shape, np.arange(group.size).mean()))


@contextmanager
def no_log() -> Iterator[None]:
    """Silences JAX's log of errors in functions on the host."""
    logger = logging.getLogger("jax._src.callback")
    logger.disabled = True
    yield
    logger.disabled = False


def errors_on_all_ranks_are_caught(group: fddp.Group, lanes: int, *places: str) -> None:
    step, broken = breakable(group, lanes)
    state = start(step)
    trains(group, step, state)
    for place in places:
        broken.add(place)
        with no_log():
            assert place in error_of(partial(step, state, rows(group)), Exception)
        broken.clear()
        trains(group, step, state)


@claim()
def after_an_error_that_all_ranks_catch_the_next_attempt_trains(group: fddp.Group):
    errors_on_all_ranks_are_caught(group, 1, *PLACES, *sampled(group, PLACES))


@claim(quick=("gloo",))
def after_an_error_on_one_of_several_lanes_the_next_attempt_trains(group: fddp.Group):
    errors_on_all_ranks_are_caught(group, 2, *PLACES[:2] * 4)


@claim()
def a_rank_whose_first_run_fails_alone_does_not_compare_its_program_again(group: fddp.Group):
    runs: list[int] = []

    def fails_once(*args: Any) -> Any:
        runner = fused(*args)

        def run(*args: Any) -> Any:
            runs.append(group.rank)
            if len(runs) == 1 and group.rank == group.size - 1:
                raise ArithmeticError("on purpose")
            return runner.run(*args)

        return runner._replace(run=run)

    step = fddp.train_step(
        lambda w, x: jnp.sum((w - x) ** 2),
        optax.sgd(0.5),
        group=group,
        schedule=fails_once,
        donate=False,
    )
    state = step.init(jnp.zeros(10))
    if group.rank == group.size - 1:
        assert "on purpose" in error_of(partial(step, state, rows(group)), Exception)
    new, _ = step(state, rows(group))
    np.testing.assert_array_equal(new.params, np.full(10, np.arange(group.size).mean()))


@claim()
def a_rank_that_fails_alone_before_it_sends_may_try_again(group: fddp.Group):
    def loss(w: Any, x: Any) -> Any:
        return jnp.sum((w - x) ** 2)

    for schedule in schedules(group, ("fused", "staged", "after")):
        step = fddp.train_step(loss, optax.sgd(0.5), group=group, schedule=schedule, donate=False)
        state = step.init(jnp.zeros(10))
        for number in (-1, 0, 1):
            if group.rank == number:  # the others wait meanwhile
                assert "shapes" in error_of(
                    partial(step, state, np.zeros((1, 3), np.float32)), Exception
                )
            new, _ = step(state, rows(group))
            np.testing.assert_array_equal(
                new.params, np.full(10, np.arange(group.size).mean()), err_msg=schedule
            )
