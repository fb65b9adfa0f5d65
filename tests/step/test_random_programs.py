"""Losses of loops and collectives, drawn at random, train as plain JAX trains on the joined batch,
in float64."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import strategies as st
from trees import close
from truth import by_plain_jax

import fddp

ROWS = 6  # of a replica; two and three replicas divide them
WIDTH = 4
CAP = 0.0003  # MiB: two layers


### Collectives over the replicas, and their equivalents on the joined rows

# (x, axis or None, replicas) → x, changed by something that all replicas know
Word = Callable[[Any, str | None, int], Any]


def centred(x: Any, axis: str | None, replicas: int) -> Any:
    mean = jnp.mean(x, 0)
    return x - (jax.lax.pmean(mean, axis) if axis else mean)


def scaled(x: Any, axis: str | None, replicas: int) -> Any:
    total = jnp.sum(x**2, 0)
    return x / jnp.sqrt((jax.lax.psum(total, axis) if axis else total) + 1)


def below_the_largest(x: Any, axis: str | None, replicas: int) -> Any:
    top = jnp.max(jax.lax.stop_gradient(x), 0)
    return x - (jax.lax.pmax(top, axis) if axis else top)


def attending(x: Any, axis: str | None, replicas: int) -> Any:
    everybody = jax.lax.all_gather(x, axis, tiled=True) if axis else x
    return x + jax.nn.softmax(x @ everybody.T) @ everybody


def from_the_neighbour(x: Any, axis: str | None, replicas: int) -> Any:
    if axis:
        return x + jnp.sin(
            jax.lax.ppermute(x, axis, [(k, (k + 1) % replicas) for k in range(replicas)])
        )
    return x + jnp.sin(jnp.roll(x, ROWS, 0))


def dealt(x: Any, axis: str | None, replicas: int) -> Any:
    if axis:
        return x + jnp.cos(jax.lax.all_to_all(x, axis, 0, 0, tiled=True))
    blocks = x.reshape(replicas, replicas, -1, WIDTH).swapaxes(0, 1)
    return x + jnp.cos(blocks.reshape(x.shape))


def from_all(x: Any, axis: str | None, replicas: int) -> Any:
    place = jnp.arange(ROWS * replicas, dtype=x.dtype)[:, None] / ROWS
    if axis:
        return x + jax.lax.psum_scatter(place * jnp.mean(x, 0), axis, tiled=True)
    return x + place * replicas * jnp.mean(x, 0)


WORDS: tuple[Word, ...] = (
    centred,
    scaled,
    below_the_largest,
    attending,
    from_the_neighbour,
    dealt,
    from_all,
)


### Programs


class Loop(NamedTuple):
    """A scan over layers."""

    length: int
    reverse: bool
    unroll: int
    remat: bool
    inside: Word | None
    """The operation of each layer on all rows; not over a part of the replicas' rows alone."""
    results: bool
    """True if the results of each round are used, too."""


class Drawn(NamedTuple):
    """A loss and the options of its training."""

    layers: tuple[Loop | Word, ...]
    replicas: int
    options: dict[str, Any]


LOOPS = st.builds(
    Loop,
    length=st.integers(1, 5),
    reverse=st.booleans(),
    unroll=st.integers(1, 2),
    remat=st.booleans(),
    inside=st.sampled_from([None, None, centred, attending]),
    results=st.booleans(),
)


@st.composite
def programs(draw: Any) -> Drawn:
    """Up to three loops and five collectives, in any order."""
    layers = draw(st.lists(LOOPS, max_size=3)) + draw(st.lists(st.sampled_from(WORDS), max_size=5))
    options = draw(
        st.fixed_dictionaries(
            {
                "schedule": st.sampled_from(["overlap", "after"]),
                "bucket_cap_mb": st.sampled_from([0, CAP, 25]),
            },
            optional={
                "shard": st.just("state"),
                "find_unused_parameters": st.just(True),
                "donate": st.just(False),
                "skip_nonfinite": st.just(True),
            },
        )
    )
    return Drawn(tuple(draw(st.permutations(layers))), draw(st.integers(1, 3)), options)


def params_of(drawn: Drawn) -> dict[str, Any]:
    make = np.random.default_rng(len(drawn.layers)).normal
    stacks = {
        f"layers {at}": {
            "kernel": make(size=(part.length, WIDTH, WIDTH)) / 3,
            "bias": make(size=(part.length, WIDTH)) / 9,
        }
        for at, part in enumerate(drawn.layers)
        if isinstance(part, Loop)
    }
    return {"first": make(size=(WIDTH, WIDTH)) / 2, "last": make(size=WIDTH)} | stacks


def loss(drawn: Drawn, axis: str | None, params: Any, rows: Any) -> jax.Array:
    x = rows @ params["first"]
    for at, part in enumerate(drawn.layers):
        x = (
            looped(part, params[f"layers {at}"], x, axis)
            if isinstance(part, Loop)
            else part(x, axis, drawn.replicas)
        )
    return jnp.mean((jnp.tanh(x) @ params["last"] - 0.3) ** 2)


def looped(loop: Loop, layers: Any, x: Any, axis: str | None) -> Any:
    def layer(x: Any, w: Any) -> Any:
        y = jnp.tanh(x @ w["kernel"] + w["bias"])
        y = loop.inside(y, axis, 0) if loop.inside else y
        return y, jnp.sum(y) if loop.results else None

    body = jax.checkpoint(layer) if loop.remat else layer
    y, sums = jax.lax.scan(body, x, layers, reverse=loop.reverse, unroll=loop.unroll)
    if sums is None:
        return y
    total = jnp.sum(jnp.sin(sums)) if axis is None else jnp.sum(jnp.sin(jax.lax.psum(sums, axis)))
    return y * total


def holds(group: Callable[[int], fddp.Group], drawn: Drawn) -> None:
    """Three steps take the parameters to where plain JAX takes them.

    Some of these programs multiply a rounding by many thousands. Plain JAX from parameters that are
    a rounding off measures the factor.
    """
    optimizer = optax.sgd(0.01, momentum=0.9)
    batches = [
        np.random.default_rng(turn).normal(size=(ROWS * drawn.replicas, WIDTH)) for turn in range(3)
    ]
    params = params_of(drawn)
    step = fddp.train_step(
        partial(loss, drawn, "replica"), optimizer, group=group(drawn.replicas), **drawn.options
    )
    state = step.init(params)
    for rows in batches:
        state, _ = step(state, rows)
    joined = partial(loss, drawn, None)
    expected = by_plain_jax(joined, optimizer, params, batches).params
    perturbed = jax.tree.map(lambda x: x * (1 + 4 * np.finfo(x.dtype).eps), params)
    off = by_plain_jax(joined, optimizer, perturbed, batches).params
    distance = max(
        float(np.max(np.abs(a - b)))
        for a, b in zip(jax.tree.leaves(off), jax.tree.leaves(expected))
    )
    close(fddp.whole(state.params), expected, atol=1e-12 + 4 * distance)


def drawn_often(count: int, seed: int | None = None) -> Callable[[Any], Any]:
    """So many programs, the same in each run."""
    settings = hypothesis.settings(
        max_examples=count,
        deadline=None,
        derandomize=seed is None,
        database=None,
        suppress_health_check=[
            hypothesis.HealthCheck.function_scoped_fixture,
            hypothesis.HealthCheck.too_slow,
        ],
    )
    return settings if seed is None else lambda test: hypothesis.seed(seed)(settings(test))


@pytest.mark.steps
@drawn_often(4)  # the first one that hypothesis draws is the smallest
@hypothesis.given(drawn=programs())
def test_random_programs_of_loops_and_collectives_train_as_plain_jax(group, x64, drawn):
    holds(group, drawn)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(60))  # many tests in a file start it early
def test_three_hundred_random_programs_train_as_plain_jax(group, x64, seed: int):
    @drawn_often(5, seed)
    @hypothesis.given(drawn=programs())
    def hold(drawn: Any) -> None:
        holds(group, drawn)

    hold()
    jax.clear_caches()
