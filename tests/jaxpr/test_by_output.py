"""A program in parts, each of which makes some of its outputs."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from trees import same_bits

from fddp.jax_internals import form_of_program, jaxpr_as_fun
from fddp.jaxpr import each_alone, inputs_of_outputs, pieces, run_seeds, seeded


def layers(seed: Any = 0) -> list[Any]:
    """Keys that are drawn from keys in several ways, and a leaf of each."""
    key = jax.random.key(seed)
    split = jax.random.split(key, 5)
    old = jax.random.split(jax.random.PRNGKey(3), 2)
    keys = [
        *split,
        split[2],
        jax.random.fold_in(key, 4),
        old[1],
        jax.random.fold_in(split[0], jnp.arange(3)[1]),
    ]
    return [jax.random.normal(key, (40, 3)) * 0.02 for key in keys]


def test_parts_make_together_what_the_program_makes():
    closed = jax.make_jaxpr(lambda x, y: (x @ y, jnp.sin(x), (x @ y).sum(), jnp.zeros(2)))(
        jnp.eye(3), jnp.ones((3, 3))
    )
    args = jnp.eye(3) * 2, jnp.full((3, 3), 0.5)
    outputs = {}
    for piece in pieces(closed, [[1], [0, 2], [3]]):
        outputs |= dict(
            zip(piece.makes, jaxpr_as_fun(piece.program)(*(args[number] for number in piece.reads)))
        )
    same_bits([outputs[k] for k in range(4)], jaxpr_as_fun(closed)(*args))


def test_a_part_holds_no_equation_that_its_outputs_do_not_need():
    closed = jax.make_jaxpr(lambda x: (jnp.sin(x), jnp.cos(jnp.exp(x))))(1.0)
    names = [
        [eqn.primitive.name for eqn in piece.program.jaxpr.eqns]
        for piece in pieces(closed, [[0], [1]])
    ]
    assert names == [["sin"], ["exp", "cos"]]


def test_a_loop_is_left_with_the_values_that_a_part_needs():
    def loop(x: Any) -> Any:
        return jax.lax.scan(lambda c, _: (c + 1, (jnp.sin(c), jnp.exp(c))), x, length=3)[1]

    sines, _ = pieces(jax.make_jaxpr(loop)(1.0), [[0], [1]])
    assert "sin" in str(sines.program) and "exp" not in str(sines.program)
    (values,) = jaxpr_as_fun(sines.program)(1.0)
    np.testing.assert_array_equal(values, loop(1.0)[0])


def test_inputs_of_outputs_are_those_that_a_change_reaches():
    closed = jax.make_jaxpr(lambda a, b, c: (a * b, jax.jit(jnp.sin)(c), jnp.zeros(2)))(
        1.0, 1.0, 1.0
    )
    assert inputs_of_outputs(closed) == [{0, 1}, {2}, frozenset()]


def test_outputs_of_one_dear_value_stay_together_and_others_do_not():
    dear = jax.make_jaxpr(lambda x: [*(x @ x @ x)])(jnp.eye(8))
    cheap = jax.make_jaxpr(lambda x: [x * k for k in range(8)])(jnp.eye(8))
    assert [len(piece.makes) for piece in each_alone(dear)] == [8]
    assert [len(piece.makes) for piece in each_alone(cheap)] == [1] * 8


def test_seeds_and_the_rest_make_what_the_program_makes():
    closed = jax.make_jaxpr(layers)()
    seeds, remainder = seeded(closed)
    same_bits(jaxpr_as_fun(remainder)(*run_seeds(seeds)), jaxpr_as_fun(closed)())


def test_equal_layers_are_equal_programs_once_seeds_are_drawn():
    _, remainder = seeded(jax.make_jaxpr(layers)())
    layers_apart = pieces(remainder, [[k] for k in range(len(remainder.jaxpr.outvars))])
    assert len({form_of_program(piece.program) for piece in layers_apart}) == 1


@pytest.mark.parametrize("outside", [False, True], ids=["made inside", "captured"])
def test_a_key_is_a_seed_wherever_it_was_made(outside: bool):
    key = jax.random.key(0)
    closed = jax.make_jaxpr(
        lambda: jax.random.normal(key if outside else jax.random.key(0), (3,))
    )()
    seeds, remainder = seeded(closed)
    assert len(remainder.jaxpr.invars) == 1 and not remainder.consts
    same_bits(jaxpr_as_fun(remainder)(*run_seeds(seeds)), jaxpr_as_fun(closed)())


def test_floats_are_no_seeds_as_xla_rounds_constants_in_its_own_way():
    scale = jnp.float32(0.3)
    _, remainder = seeded(
        jax.make_jaxpr(lambda: jax.random.normal(jax.random.key(0), (3,)) * jnp.sqrt(scale))()
    )
    assert all(not jnp.issubdtype(var.aval.dtype, jnp.floating) for var in remainder.jaxpr.invars)
