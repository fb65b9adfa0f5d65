"""A program on parts of arrays makes the parts of what it makes of whole arrays, and asks other
ranks as seldom as it can."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fddp.buckets import ShardLayout
from fddp.comm.communicator import axis_communicator
from fddp.jax_internals import CALLS
from fddp.jaxpr.equations import straighten
from fddp.jaxpr.part_kinds import Follows, Same, Total, Whole
from fddp.jaxpr.part_passes import LeafWork, passes, result_kinds, whole_leaves
from fddp.jaxpr.part_program import Ranks, on_parts
from fddp.sharding.owners import at_owners

A = Follows(0)
B = Follows(1)
X = np.linspace(-1, 2, 21).reshape(7, 3)
Y = np.linspace(2, 3, 10).reshape(2, 5)
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
    return jax.nn.relu(a.reshape(21)).reshape(7, 3) * 0.9, jnp.where(b > 2.5, b, 0.5) + jnp.full(
        (2, 5), 2.0
    )


def halves(a: Any, b: Any) -> Any:
    total = 0.5 * jnp.sum(a) - jnp.sum(b) / 4
    return a * total, total


def called(a: Any, b: Any) -> Any:
    """Sums that come out of programs inside of programs."""
    norm = jax.checkpoint(lambda a: jnp.sum(a**2))(a) + jax.jit(
        jax.checkpoint(lambda b: jnp.sum(b))
    )(b)
    return a / jnp.sqrt(norm), jax.nn.relu(b - jnp.vdot(b.ravel(), jnp.sqrt(b.ravel())))


# How often numbers of all parts are put together: those that do not wait for each other, at once.
SHARED = {clipped: 1, trusted: 1, counted: 3, branched: 3, moments: 0, halves: 1, called: 1}


@pytest.mark.steps
@pytest.mark.parametrize(("f", "times"), SHARED.items())
def test_a_program_on_parts_makes_the_parts_of_what_it_makes_of_whole_arrays(
    f: Callable[..., Any], times: int
):
    with jax.enable_x64(True):
        outputs = f(jnp.asarray(X), jnp.asarray(Y))
        pieces, calls, exchanges = divided(f)
        assert (calls, exchanges) == (times, 0)
        for want, got in zip(outputs, pieces):
            np.testing.assert_allclose(joined(got, want), want, rtol=1e-14)


@pytest.mark.quick(
    *(
        f"<lambda>-{reason}"
        for reason in ("transpose", "reduce_sum", "sort", "rev", "scan", "slice")
    )
)
@pytest.mark.steps
@pytest.mark.parametrize(
    ("f", "reason"),
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
def test_what_mixes_a_leaf_runs_at_its_owner_and_the_first_such_equation_is_named(
    f: Callable[..., Any], reason: str
):
    with jax.enable_x64(True):
        a = jnp.asarray(X)
        reasons = whole_leaves(jax.make_jaxpr(f)(a), [A])
        assert list(reasons) == [0] and reason in reasons[0]
        (got,), _, exchanges = divided(lambda a, b: (f(a),))
        np.testing.assert_allclose(joined(got, f(a)), f(a), rtol=1e-14)
        assert exchanges == 1


def orthogonal(a: Any, b: Any) -> Any:
    """Operations on whole arrays stay at the owners, as in Muon; operations on parts go on in
    parts."""
    x = a.T / jnp.linalg.norm(a.T)
    for _ in range(3):
        x = 1.5 * x - 0.5 * x @ x.T @ x
    return a - 0.1 * x.T, b


def summed_between(a: Any, b: Any) -> Any:
    """A norm of arrays from two owners, for the next arrays there."""
    a = a @ jnp.full((3, 3), 0.1)
    b = b[::-1]
    norm = jnp.sqrt(sum(jnp.sum(x**2) for x in (a, b)))
    return jnp.cumsum(a / norm, axis=0), b / norm


def of_rows_and_columns(a: Any, b: Any) -> Any:
    """Arrays of a leaf that are smaller than it, as in Adafactor."""
    rows = jnp.mean(a**2, axis=0)
    columns = jnp.mean(a**2, axis=1)
    return a / jnp.sqrt(rows / jnp.mean(rows)) / jnp.sqrt(columns)[:, None], rows + b[0, 0] * 0


def in_a_branch(a: Any, b: Any) -> Any:
    return jax.lax.cond(jnp.sum(a) > 0, orthogonal, lambda a, b: (a, jnp.sort(b)), a, b)


@pytest.mark.steps
@pytest.mark.parametrize(
    ("f", "exchanges"), [(orthogonal, 1), (summed_between, 2), (in_a_branch, 2)]
)
def test_a_leaf_goes_to_its_owner_as_often_as_the_ranks_exchange_numbers_in_between(
    f: Callable[..., Any], exchanges: int
):
    with jax.enable_x64(True):
        outputs = f(jnp.asarray(X), jnp.asarray(Y))
        pieces, _, count = divided(f)
        for want, got in zip(outputs, pieces):
            np.testing.assert_allclose(joined(got, want), want, rtol=1e-13)
        assert count == exchanges


def test_what_meets_parts_of_its_leaf_goes_on_in_parts():
    """The momentum goes to its owner; the weights, which decay, need not."""

    def decayed(momentum: Any, w: Any) -> Any:
        direction, _ = orthogonal(0.9 * momentum, 0)
        return w - 0.1 * (direction + 0.01 * w)

    program = straighten(jax.make_jaxpr(decayed)(X, X), CALLS)
    (work,) = [work for step in passes(program, [A, A])[0] for work in step.works]
    assert len(work.inputs) == len(work.outputs) == 1


def test_two_leaves_in_one_equation_are_refused():
    closed = jax.make_jaxpr(lambda a, b: jnp.tanh(a * b))(1.0 * X, 1.0 * X)
    assert result_kinds(closed, [A, B]) == [Whole(frozenset({0, 1}), "mul of several leaves")]
    nobody: Any = None
    with pytest.raises(ValueError, match="mul of several leaves needs whole arrays"):
        on_parts(closed, [A, B], Ranks(nobody, nobody, nobody))(jnp.zeros(6), jnp.zeros(6))


def test_what_is_equal_everywhere_stays_so_and_sums_are_told():
    def f(a: Any, count: Any) -> Any:
        return (
            count + 1,
            jnp.full((7, 3), 2.0) * count,
            jnp.arange(3),
            jnp.sum(a),
            0.5 * jnp.sum(a),
            jnp.sum(a) + 1,
        )

    kinds = result_kinds(jax.make_jaxpr(f)(jnp.asarray(X), 3), [A, Same()])
    assert kinds == [Same(), Same(), Same(False), Total("sum"), Total("sum"), Same()]
    assert Same(False) != Follows(0) and Same() != Follows(1)


def divided(f: Callable[..., Any]) -> tuple[list[Any], int, int]:
    """The parts of each rank, the number of sums between ranks, and the number of exchanges with
    owners."""
    arrays = [jnp.asarray(X), jnp.asarray(Y)]
    comm = axis_communicator("ranks", RANKS, "cpu")
    closed = jax.make_jaxpr(f)(*arrays)
    calls = [0, 0]

    def part(size: int) -> int:
        return -(-size // RANKS)

    def put_together(op: str, numbers: Sequence[Any]) -> Sequence[Any]:
        calls[0] += 1
        collective = {"sum": jax.lax.psum, "max": jax.lax.pmax, "min": jax.lax.pmin}[op]
        return [collective(x, "ranks") for x in numbers]

    def exchanged(works: Sequence[LeafWork], *args: Any) -> Sequence[Sequence[Any]]:
        calls[1] += 1
        return at_owners(comm, [ShardLayout((), RANKS)] * 2, works, *args)

    def is_element(leaf: int, size: int) -> Any:
        del leaf
        return jax.lax.axis_index("ranks") * part(size) + jnp.arange(part(size)) < size

    run = on_parts(closed, [A, B], Ranks(is_element, put_together, exchanged))
    padded = [
        jnp.pad(x.ravel(), (0, RANKS * part(x.size) - x.size), constant_values=7.0) for x in arrays
    ]
    outputs = jax.vmap(run, axis_name="ranks")(*(x.reshape(RANKS, -1) for x in padded))
    return outputs, calls[0], calls[1]


def joined(pieces: Any, like: Any) -> Any:
    """The array of these parts; any of them if they are equal everywhere."""
    if pieces.shape[1:] == like.shape or like.ndim == 0:
        np.testing.assert_array_equal(pieces, jnp.broadcast_to(pieces[0], pieces.shape))
        return pieces[0].reshape(like.shape)
    return pieces.ravel()[: like.size].reshape(like.shape)
