"""Claims about compiled stages: `fddp.relay`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fddp.comm.placement import REPLICATED
from fddp.schedules.stage_programs import relay


def made(group, f, args, groups, donate=()):
    """The outputs of a program that is run in stages, and the stages."""
    one = group(1)
    leaves = [one.placement.place(np.asarray(x, np.float32), REPLICATED) for x in args]
    given = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves]
    closed = jax.make_jaxpr(f)(*given)
    stages = relay(one.placement, closed, groups, given, [REPLICATED] * len(given), REPLICATED, donate)
    values, outputs = dict(enumerate(leaves)), {}
    for k, group_of in enumerate(groups):
        outputs.update(zip(group_of, stages.run(k, values)))
    return [outputs[number] for number in range(len(outputs))], stages, leaves


def chain(x, *weights):
    for w in weights:
        x = jnp.sin(x @ w)
        yield x


WEIGHTS = [np.random.default_rng(k).normal(size=(3, 3)) for k in range(4)]


@pytest.mark.parametrize("groups", [[[0, 1, 2, 3]], [[0], [1], [2], [3]], [[2], [0, 3], [1]]])
def test_outputs_are_those_of_the_program_in_any_order(group, groups):
    outputs, _, _ = made(group, lambda *a: list(chain(*a)), [np.ones((2, 3)), *WEIGHTS], groups)
    for got, want in zip(outputs, chain(jnp.ones((2, 3)), *(jnp.asarray(w, jnp.float32) for w in WEIGHTS))):
        np.testing.assert_allclose(got, want, rtol=1e-5)


def test_equal_stages_are_compiled_once(group):
    """Layers of equal shape: a network ten times as deep compiles no longer."""
    _, stages, _ = made(group, lambda *a: list(chain(*a)), [np.ones((2, 3)), *WEIGHTS], [[0], [1], [2], [3]])
    first, *others, last = stages.programs
    assert len(set(map(id, others))) == 1
    # The first reads an input, the last hands nothing on.
    assert len({id(first), id(others[0]), id(last)}) == 3


def test_stages_that_differ_in_a_constant_are_different_programs(group):
    def f(x):
        return [jnp.sin(x) + np.arange(3.0), jnp.sin(x) + np.array([0.0, 1.0, 5.0])]

    (a, b), _, _ = made(group, f, [np.zeros(3)], [[0], [1]])
    assert (a.tolist(), b.tolist()) == ([0, 1, 2], [0, 1, 5])


def test_a_donated_input_lives_until_the_last_stage_that_reads_it(group):
    outputs, _, (a, b) = made(
        group, lambda a, b: [jnp.sin(a), jnp.sin(a * b)], [np.ones(3), np.ones(3)], [[0], [1]], donate=[0]
    )
    assert a.is_deleted() and not b.is_deleted()
    np.testing.assert_allclose(outputs[1], np.sin(np.ones(3)), rtol=1e-6)


def test_an_input_is_donated_only_where_an_output_can_have_its_memory(group):
    """A warning of JAX's ends a test: nothing here may be donated in vain."""
    f = lambda n, x: [n + 1, x * n]  # noqa: E731
    _, _, (n, x) = made(group, f, [np.zeros(()), np.ones(3)], [[0], [1]], donate=[0, 1])
    assert x.is_deleted() and not n.is_deleted()
    _, _, (a, b) = made(group, lambda a, b: [a + b], [np.ones(3), np.ones(3)], [[0]], donate=[0, 1])
    assert [a.is_deleted(), b.is_deleted()] == [True, False]


def test_a_stage_for_which_there_is_nothing_to_do_does_nothing(group):
    outputs, _, _ = made(group, lambda a: [a + 1], [np.ones(3)], [[], [0], []])
    assert outputs[0].tolist() == [2, 2, 2]


def test_stages_that_call_different_functions_of_the_host_are_different_programs(group):
    form = jax.ShapeDtypeStruct((3,), np.float32)

    def on_host(number):
        return lambda x: jax.pure_callback(lambda x: np.asarray(x + np.float32(number)), form, x)

    (a, b), _, _ = made(group, lambda x: [on_host(1)(x), on_host(2)(x)], [np.zeros(3)], [[0], [1]])
    assert (a.tolist(), b.tolist()) == ([1] * 3, [2] * 3)
