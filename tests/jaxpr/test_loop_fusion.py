"""A loop over the rows of an earlier loop runs inside of that loop, with the same results."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fddp.jaxpr import computed_by_layer, fused_loops

X = jnp.arange(12.0).reshape(4, 3)
AXIS = [("replica", 2)]


def rows(x, **options):
    return jax.lax.scan(lambda a, b: (a + b, a * b), jnp.ones(3), x, **options)[1]


def summed(x):
    return jax.lax.map(lambda row: jax.lax.psum(row, "replica"), x)


FUSED = {
    "plainly": lambda x: summed(rows(x)),
    "in reverse": lambda x: summed(rows(x, reverse=True)),
    "unrolled by two": lambda x: summed(rows(x, unroll=2)),
    "scaled, cast and added to": lambda x: summed(
        (2 * rows(x)).astype(jnp.bfloat16) + x.astype(jnp.bfloat16)
    ),
    "reshaped and joined": lambda x: summed(
        jnp.concatenate([rows(x), rows(x).reshape(-1).reshape(4, 3)], axis=1)
    ),
    "of two loops": lambda x: summed(rows(x) + rows(x + 1)),
    "and read outside": lambda x: (y := rows(x)) + summed(y),
    "added to what is made behind it": lambda x: (lambda y, z: summed(y + jnp.sin(z)))(
        rows(x), jnp.cos(x)
    ),
}
APART = {
    "a sum over rows": lambda x: summed((y := rows(x)) / jnp.sum(y)),
    "rows in another order": lambda x: summed(rows(x)[::-1]),
    "rows of other lengths": lambda x: summed(rows(x).reshape(2, 6)),
    "the last state": lambda x: summed(
        x + jax.lax.scan(lambda a, b: (a + b, a), jnp.ones(3), x)[0]
    ),
}


def loops(f):
    return str(jax.make_jaxpr(f, axis_env=AXIS)(X)).count("scan[")


def on_two(f):
    return jax.vmap(f, axis_name="replica")(jnp.stack([X, X + 0.5]))


@pytest.mark.parametrize("written", FUSED)
def test_rows_are_summed_in_the_loop_that_makes_them(written):
    f = FUSED[written]
    assert loops(fused_loops(f)) == loops(f) - 1
    np.testing.assert_array_equal(on_two(fused_loops(f)), on_two(f))


@pytest.mark.parametrize("written", APART)
def test_what_needs_more_than_its_row_stays_behind_the_loop(written):
    f = APART[written]
    assert loops(fused_loops(f)) == loops(f)
    np.testing.assert_array_equal(on_two(fused_loops(f)), on_two(f))


def test_two_loops_are_not_each_before_the_other():
    def f(x):
        first = rows(x)
        second = rows(x + 1)
        return summed(first * jnp.max(second)), summed(second * jnp.max(first))

    got = on_two(fused_loops(f))
    jax.tree.map(np.testing.assert_array_equal, got, on_two(f))


def test_outputs_that_a_loop_could_make_to_the_end_are_found_with_its_rounds():
    program = jax.make_jaxpr(lambda x: (2 * rows(x), jnp.sum(rows(x)), x))(X)
    assert {number: stack.length for number, stack in computed_by_layer(program).items()} == {0: 4}
