"""Claims about what follows its inputs element by element: `fddp.jaxpr.elements` and `fddp.jaxpr.on_parts`."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fddp.jaxpr.elements import Follows, Same, Total, Whole, kinds
from fddp.jaxpr.on_parts import on_parts

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
        parts, _ = divided(f)
        for want, got in zip(whole, parts):
            np.testing.assert_allclose(joined(got, want), want, rtol=1e-14)


@pytest.mark.parametrize(("f", "times"), [(clipped, 1), (trusted, 1), (moments, 0), (halves, 1), (counted, 3)])
def test_numbers_that_do_not_wait_for_each_other_are_put_together_at_once(f: Callable[..., Any], times: int):
    _, calls = divided(f)
    assert calls == times


@pytest.mark.parametrize(
    ("f", "why"),
    [
        (lambda a: a @ jnp.ones((3, 3)), "dot_general"),
        (lambda a: a.T, "transpose"),
        (lambda a: a - a.mean(axis=0), "reduce_sum"),
        (lambda a: a + jnp.arange(21.0).reshape(7, 3), "add"),
        (lambda a: jnp.sort(a, axis=0), "sort"),
        (lambda a: a[::-1], "rev"),
        (lambda a: a.ravel(order="F") * a.ravel(), ""),
        (lambda a: a[:, :1] * a[:, 1:], ""),
        (lambda a: jnp.sum(jnp.outer(a.ravel(), a.ravel())), ""),
        (lambda a: jnp.vdot(a.ravel(), jnp.arange(21.0)), "dot_general"),
        (lambda a: jnp.bitwise_and.reduce(a.astype(int).ravel()), "reduce_and"),
        (lambda a: jax.lax.fori_loop(0, 3, lambda k, a: a / 2, a), "scan"),
        (lambda a: a + jax.random.normal(jax.random.key(0), a.shape), "add"),
        (lambda a: jax.lax.cond(a[0, 0] > 0, lambda: a, lambda: -a), "slice"),
    ],
)
def test_what_mixes_elements_needs_whole_arrays_and_says_which_equation_does(f: Callable[..., Any], why: str):
    closed = jax.make_jaxpr(f)(jnp.asarray(X, jnp.float32))
    (kind,) = kinds(closed, [A])
    assert isinstance(kind, Whole) and kind.leaves == {0} and why in kind.why
    with pytest.raises(ValueError, match=f"{why}.* needs whole arrays"):
        on_parts(closed, [A], lambda leaf: jnp.ones(6, bool), lambda op, numbers: numbers)(jnp.zeros(6))


def test_two_leaves_in_one_equation_need_whole_arrays():
    (kind,) = kinds(jax.make_jaxpr(lambda a, b: a * b)(1.0 * X, 1.0 * X), [A, B])
    assert kind == Whole(frozenset({0, 1}), "mul of several leaves")


def test_what_is_equal_everywhere_stays_so_and_sums_are_told():
    def f(a: Any, count: Any) -> Any:
        return count + 1, jnp.full((7, 3), 2.0) * count, jnp.arange(3), jnp.sum(a), 0.5 * jnp.sum(a), jnp.sum(a) + 1

    found = kinds(jax.make_jaxpr(f)(jnp.asarray(X), 3), [A, Same()])
    assert found == [Same(), Same(), Same(False), Total("sum"), Total("sum"), Same()]
    assert Same(False) != Follows(0) and Same() != Follows(1)


def divided(f: Callable[..., Any]) -> tuple[list[Any], int]:
    """What each rank makes of its parts, and how often the ranks have put numbers together."""
    arrays = [jnp.asarray(X), jnp.asarray(Y)]
    closed, calls = jax.make_jaxpr(f)(*arrays), [0]
    sizes = [-(-x.size // RANKS) for x in arrays]

    def put_together(op: str, numbers: Sequence[Any]) -> Sequence[Any]:
        calls[0] += 1
        collective = {"sum": jax.lax.psum, "max": jax.lax.pmax, "min": jax.lax.pmin}[op]
        return [collective(x, "ranks") for x in numbers]

    def there(leaf: int) -> Any:
        return jax.lax.axis_index("ranks") * sizes[leaf] + jnp.arange(sizes[leaf]) < arrays[leaf].size

    run = on_parts(closed, [A, B], there, put_together)
    padded = [jnp.pad(x.ravel(), (0, RANKS * size - x.size), constant_values=7.0) for x, size in zip(arrays, sizes)]
    made = jax.vmap(run, axis_name="ranks")(*(x.reshape(RANKS, -1) for x in padded))
    return made, calls[0]


def joined(parts: Any, like: Any) -> Any:
    """The array of which these are the parts; of what is equal everywhere any."""
    if parts.ndim > like.ndim + (like.ndim == 0) or like.ndim == 0:
        np.testing.assert_array_equal(parts, jnp.broadcast_to(parts[0], parts.shape))
        return parts[0].reshape(like.shape)
    return parts.ravel()[: like.size].reshape(like.shape)
