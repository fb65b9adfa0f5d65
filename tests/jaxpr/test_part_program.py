"""Claims about programs on parts of arrays: `part_kinds`, `part_passes` and `part_program` of `fddp.jaxpr`."""

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fddp.jax_internals import CALLS
from fddp.jaxpr.equations import straighten
from fddp.jaxpr.part_kinds import Follows, Same, Total, Whole
from fddp.jaxpr.part_passes import kinds, needed_whole, passes
from fddp.jaxpr.part_program import Ranks, on_parts

A, B = Follows(0), Follows(1)
X, Y = np.linspace(-1, 2, 21).reshape(7, 3), np.linspace(2, 3, 10).reshape(2, 5)
RANKS = 4


def clipped(a: Any, b: Any) -> Any:
    norm = jnp.sqrt(sum(jnp.sum(x**2) for x in (a, b)))
    return a / jnp.maximum(1, norm), b / jnp.maximum(1, norm)


def trusted(a: Any, b: Any) -> Any:
    """A ratio for each leaf, one norm in another."""
    ratio = jnp.linalg.norm(a) / jnp.linalg.norm(a + 1)
    return a * ratio, b * jnp.linalg.norm(b, keepdims=True)


def counted(a: Any, b: Any) -> Any:
    """Constants in it that are sizes of whole arrays; elements of the padding would count, too."""
    return a - jnp.mean(jnp.exp(a)), b * jnp.max(-b) + jnp.min(b)


def branched(a: Any, b: Any) -> Any:
    fine = jnp.all(jnp.isfinite(a)) & (jnp.sum(b) > 0)
    return jax.lax.cond(fine, clipped, lambda a, b: (a, jnp.zeros_like(b)), a, b)


def moments(a: Any, b: Any) -> Any:
    return jax.nn.relu(a.reshape(21)).reshape(7, 3) * 0.9, jnp.where(b > 2.5, b, 0.5) + jnp.full((2, 5), 2.0)


def halves(a: Any, b: Any) -> Any:
    total = 0.5 * jnp.sum(a) - jnp.sum(b) / 4
    return a * total, total


def called(a: Any, b: Any) -> Any:
    """Sums that come out of programs inside of programs."""
    norm = jax.checkpoint(lambda a: jnp.sum(a**2))(a) + jax.jit(jax.checkpoint(lambda b: jnp.sum(b)))(b)
    return a / jnp.sqrt(norm), jax.nn.relu(b - jnp.vdot(b.ravel(), jnp.sqrt(b.ravel())))


SHARED = [clipped, trusted, counted, branched, moments, halves, called]


@pytest.mark.parametrize("f", SHARED)
def test_a_program_on_parts_makes_the_parts_of_what_it_makes_of_whole_arrays(f: Callable[..., Any]):
    with jax.enable_x64(True):
        whole = f(jnp.asarray(X), jnp.asarray(Y))
        parts, _, gathered = divided(f)
        assert gathered == []
        for want, got in zip(whole, parts):
            np.testing.assert_allclose(joined(got, want), want, rtol=1e-14)


@pytest.mark.parametrize(("f", "times"), [(clipped, 1), (trusted, 1), (moments, 0), (halves, 1), (counted, 3)])
def test_numbers_that_do_not_wait_for_each_other_are_put_together_at_once(f: Callable[..., Any], times: int):
    _, calls, _ = divided(f)
    assert calls == times


@pytest.mark.parametrize(
    ("f", "why"),
    [
        (lambda a: a @ jnp.ones((3, 3)), "dot_general"),
        (lambda a: a.T, "transpose"),
        (lambda a: a - a.mean(axis=0), "reduce_sum"),
        (lambda a: jnp.sort(a, axis=0), "sort"),
        (lambda a: a[::-1], "rev"),
        (lambda a: a.ravel(order="F") * a.ravel(), ""),
        (lambda a: a[:, :1] * a[:, 1:], ""),
        (lambda a: jnp.sum(jnp.outer(a.ravel(), a.ravel())), ""),
        (lambda a: jnp.bitwise_and.reduce(a.astype(int).ravel()), "reduce_and"),
        (lambda a: jax.lax.fori_loop(0, 3, lambda k, a: a / 2, a), "scan"),
        (lambda a: jax.lax.cond(a[0, 0] > 0, lambda: a, lambda: -a), "slice"),
    ],
)
def test_what_mixes_the_elements_of_a_leaf_is_gathered_and_the_first_equation_told(f: Callable[..., Any], why: str):
    with jax.enable_x64(True):
        a = jnp.asarray(X)
        found = needed_whole(jax.make_jaxpr(f)(a), [A])
        assert list(found) == [0] and why in found[0]
        (got,), _, gathered = divided(lambda a, b: (f(a),))
        np.testing.assert_allclose(joined(got, f(a)), f(a), rtol=1e-14)
        assert set(gathered) == {21}


@pytest.mark.parametrize(
    "f",
    [
        lambda a: a + jnp.arange(21.0).reshape(7, 3),
        lambda a: a + jax.random.normal(jax.random.key(0), a.shape),
        lambda a: jax.lax.div(a, jnp.full((1, 1), 3.0)) * jnp.arange(1.0, 4.0),
        lambda a: jnp.where(jnp.arange(21).reshape(7, 3) % 2 == 0, a, 0),
        lambda a: jnp.vdot(a.ravel(), jnp.arange(21.0)),
        lambda a: jax.lax.cond(jnp.sum(a) > 0, lambda: a, lambda: jnp.arange(21.0).reshape(7, 3)),
    ],
)
def test_of_an_array_that_is_equal_on_all_ranks_each_takes_its_part(f: Callable[..., Any]):
    with jax.enable_x64(True):
        (got,), _, gathered = divided(lambda a, b: (f(a),))
        np.testing.assert_allclose(joined(got, f(jnp.asarray(X))), f(jnp.asarray(X)), rtol=1e-14)
        assert gathered == []


def orthogonal(a: Any, b: Any) -> Any:
    """As Muon: what only works on whole arrays goes on with them; what meets parts goes on in parts."""
    x = a.T / jnp.linalg.norm(a.T)
    for _ in range(3):
        x = 1.5 * x - 0.5 * x @ x.T @ x
    return a - 0.1 * x.T, b


def summed_between(a: Any, b: Any) -> Any:
    """A norm of what was made of two whole leaves, for what is made of them next."""
    a, b = a @ jnp.full((3, 3), 0.1), b[::-1]
    norm = jnp.sqrt(sum(jnp.sum(x**2) for x in (a, b)))
    return jnp.cumsum(a / norm, axis=0), b / norm


def of_rows_and_columns(a: Any, b: Any) -> Any:
    """As Adafactor: arrays of a leaf that are smaller than it."""
    square = a**2
    rows, columns = jnp.mean(square, axis=0), jnp.mean(square, axis=1)
    return a / jnp.sqrt(rows / jnp.mean(rows)) / jnp.sqrt(columns)[:, None], rows + b[0, 0] * 0


def in_a_branch(a: Any, b: Any) -> Any:
    return jax.lax.cond(jnp.sum(a) > 0, orthogonal, lambda a, b: (a, jnp.sort(b)), a, b)


@pytest.mark.parametrize(
    ("f", "sizes"),
    [
        (orthogonal, [21]),
        (summed_between, [21, 10]),
        # Of a branch that is not taken, too: no rank knows before which one it is.
        (in_a_branch, [10, 21]),
        (of_rows_and_columns, [21, 10]),
    ],
)
def test_an_array_is_gathered_once_however_many_equations_need_it_whole(f: Callable[..., Any], sizes: list[int]):
    with jax.enable_x64(True):
        whole = f(jnp.asarray(X), jnp.asarray(Y))
        parts, _, gathered = divided(f)
        for want, got in zip(whole, parts):
            np.testing.assert_allclose(joined(got, want), want, rtol=1e-13)
        assert gathered == sizes


def test_a_number_that_all_ranks_make_of_whole_arrays_is_not_summed_once_more():
    assert divided(summed_between)[1] == 0


def test_what_meets_parts_of_its_leaf_goes_on_in_parts():
    """The momentum is gathered; the weights, which decay, need not be."""

    def decayed(momentum: Any, w: Any) -> Any:
        direction, _ = orthogonal(0.9 * momentum, 0)
        return w - 0.1 * (direction + 0.01 * w)

    program = straighten(jax.make_jaxpr(decayed)(X, X), CALLS)
    done, _ = passes(program, [A, A])
    assert sum(len(one.gathers) for one in done) == 1
    assert [one.makes for one in done[-1].steps][-1] == [A]


def test_of_arrays_of_which_one_is_broadcast_to_the_other_only_that_one_is_gathered():
    program = straighten(jax.make_jaxpr(lambda a, row: jax.lax.mul(a, row))(X, X[:1]), CALLS)
    done, found = passes(program, [A, A])
    assert [list(one.gathers) for one in done] == [program.jaxpr.invars[1:], []]
    assert [found[var] for var in program.jaxpr.outvars] == [A]


def test_what_mixes_two_leaves_is_told_and_made_of_both_gathered():
    def f(a: Any, b: Any) -> Any:
        return jnp.tanh(a.reshape(3, 7)[:2, :5] * b), jnp.concatenate([a.ravel(), b.ravel()])

    closed = jax.make_jaxpr(f)(X, Y)
    both = frozenset({0, 1})
    assert kinds(closed, [A, B]) == [Whole(both, "mul of several leaves"), Whole(both, "concatenate of several leaves")]
    with jax.enable_x64(True):
        parts, _, gathered = divided(f)
        for want, got in zip(f(jnp.asarray(X), jnp.asarray(Y)), parts):
            np.testing.assert_allclose(joined(got, want), want, rtol=1e-14)
        assert set(gathered) == {21, 10}


def test_what_is_equal_everywhere_stays_so_and_sums_are_told():
    def f(a: Any, count: Any) -> Any:
        return count + 1, jnp.full((7, 3), 2.0) * count, jnp.arange(3), jnp.sum(a), 0.5 * jnp.sum(a), jnp.sum(a) + 1

    found = kinds(jax.make_jaxpr(f)(jnp.asarray(X), 3), [A, Same()])
    assert found == [Same(), Same(), Same(), Total("sum"), Total("sum"), Same()]
    assert Same() != Follows(0) and Follows(0) != Follows(1)


def divided(f: Callable[..., Any]) -> tuple[list[Any], int, list[int]]:
    """What each rank makes of its parts, how often ranks put numbers together, and the sizes of what they gather."""
    arrays = [jnp.asarray(X), jnp.asarray(Y)]
    closed, forms = jax.make_jaxpr(f, return_shape=True)(*arrays)
    calls, sizes = [0], list[int]()

    def part(size: int) -> int:
        return -(-size // RANKS)

    def rows(x: Any, padding: float = 7.0) -> Any:
        return jnp.pad(x.ravel(), (0, RANKS * part(x.size) - x.size), constant_values=padding).reshape(RANKS, -1)

    def put_together(op: str, numbers: Sequence[Any]) -> Sequence[Any]:
        calls[0] += 1
        collective = {"sum": jax.lax.psum, "max": jax.lax.pmax, "min": jax.lax.pmin}[op]
        return [collective(x, "ranks") for x in numbers]

    def gather(x: Any, shape: tuple[int, ...]) -> Any:
        sizes.append(prod(shape))
        return jax.lax.all_gather(x, "ranks").ravel()[: prod(shape)].reshape(shape)

    def there(size: int) -> Any:
        return jax.lax.axis_index("ranks") * part(size) + jnp.arange(part(size)) < size

    def own(x: Any) -> Any:
        return rows(x)[jax.lax.axis_index("ranks")]

    outputs = [A if x.ndim else Same() for x in jax.tree.leaves(forms)]
    run = on_parts(closed, [A, B], outputs, Ranks(there, own, put_together, gather))
    return jax.vmap(run, axis_name="ranks")(*map(rows, arrays)), calls[0], sizes


def joined(parts: Any, like: Any) -> Any:
    """The array of which these are the parts; of what is equal everywhere any."""
    if like.ndim == 0:
        np.testing.assert_array_equal(parts, jnp.broadcast_to(parts[0], parts.shape))
        return parts[0]
    return parts.ravel()[: like.size].reshape(like.shape)
