"""Messages in flight survive a busy interpreter, cleared caches, and other calls of the group."""

import ctypes
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import optax
from on_ranks.claims import claim, error_of
from on_ranks.one_program import ADAM, batches, loss, mine, net
from trees import equal

import fddp

HELD_US = 50_000
SGD = optax.sgd(0.1)


def step_of(group: fddp.Group, optimizer: Any = ADAM, **options: Any) -> fddp.TrainStep:
    options = {"schedule": "eager", "bucket_cap_mb": 0.001, **options}
    return fddp.train_step(loss, optimizer, group=group, **options)


def trained(group: fddp.Group, between: Callable[[], None] = lambda: None, **options: Any) -> Any:
    step = step_of(group, **options)
    state = step.init(net())
    for batch in batches(group, 3):
        state, _ = step(state, mine(group, batch))
        between()
    return step.finish(state)


@contextmanager
def held_interpreter() -> Iterator[None]:
    """Another thread holds the interpreter for 50 ms at a time."""
    ended = threading.Event()

    def hold() -> None:
        while not ended.is_set():
            ctypes.PyDLL(None).usleep(HELD_US)

    thread = threading.Thread(target=hold)
    thread.start()
    yield
    ended.set()
    thread.join()


@claim()
def a_thread_that_holds_the_interpreter_changes_no_bit(group: fddp.Group):
    expected = trained(group)
    with held_interpreter():
        equal(trained(group), expected)


@claim(quick=("mpi",))
def caches_cleared_between_steps_change_no_bit(group: fddp.Group):
    equal(trained(group, jax.clear_caches), trained(group))


@claim()
def two_steps_and_an_evaluation_in_flight_at_once_have_the_bits_of_each_alone(group: fddp.Group):
    first, second = step_of(group), step_of(group, SGD, schedule="overlap")
    a, b = first.init(net()), second.init(net())
    local = [mine(group, batch) for batch in batches(group, 3)]
    errors = list[Any]()
    for batch in local:
        a, _ = first(a, batch)
        b, _ = second(b, batch)
        errors.append(fddp.evaluate(loss, b.params, [batch], group=group))
    equal(first.finish(a), trained(group))
    alone = trained(group, optimizer=SGD, schedule="overlap")
    equal(b, alone)
    equal(errors[-1], fddp.evaluate(loss, alone.params, [local[-1]], group=group))


@claim()
def states_that_another_step_has_used_or_that_are_deleted_are_refused(group: fddp.Group):
    step = step_of(group)
    local = mine(group, batches(group, 1)[0])
    used, _ = step(step.init(net()), local)
    state, _ = step(used, local)
    assert "donate=False" in error_of(lambda: step(used, local))
    state = step.finish(state)
    copy = jax.tree.map(jnp.copy, state)
    jax.tree.map(lambda x: x.delete(), state)
    assert "donate=False" in error_of(lambda: step(state, local))
    jax.block_until_ready(step(copy, local))


@claim(backends=("mpi",))
def a_vmap_of_a_step_is_refused(group: fddp.Group):
    step = step_of(group)
    local = mine(group, batches(group, 1)[0])
    state, _ = step(step.init(net()), local)
    two = jax.tree.map(lambda x: jnp.stack([x, x]), (step.finish(state), local))
    assert "jax.vmap" in error_of(lambda: jax.vmap(jax.jit(step))(*two), TypeError)
