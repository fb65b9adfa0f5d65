"""Losses that have collectives of their own."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from on_ranks.claims import claim, schedules
from problems import RATE, rows, square
from trees import close

import fddp


def centred(w: Any, x: Any) -> jax.Array:
    return square(w, x - jax.lax.pmean(jnp.mean(x), "replica"))


@claim()
def a_loss_may_have_collectives_over_the_groups_axis(group: fddp.Group):
    step = fddp.train_step(centred, optax.sgd(RATE), group=group)
    _, info = step(step.init(jnp.zeros(())), rows(group.rank))
    np.testing.assert_allclose(info.loss, np.arange(group.size).var(), rtol=1e-6)


### Against plain JAX on the joined batch, in float64


ROWS = 6


def clip(p: Any, batch: Any, axis: str | None) -> jax.Array:
    """Each image against all texts, and each text against all images."""
    image, text = (jnp.tanh(batch[name] @ p[name]) for name in ("image", "text"))
    images = image
    texts = text
    first = 0
    if axis:
        images, texts = (jax.lax.all_gather(x, axis, tiled=True) for x in (image, text))
        first = jax.lax.axis_index(axis) * len(image)
    labels = first + jnp.arange(len(image))
    entropy = optax.softmax_cross_entropy_with_integer_labels
    return jnp.mean(entropy(image @ texts.T, labels) + entropy(text @ images.T, labels))


def normalized(p: Any, batch: Any, axis: str | None) -> jax.Array:
    """Layers that are centred over all rows, by one sum each, and a sum of squares."""
    mean = (lambda x: jax.lax.pmean(jnp.mean(x, 0), axis)) if axis else (lambda x: jnp.mean(x, 0))
    x = batch["image"]
    for w in (p["first"], p["second"]):
        x = x @ w
        x = x - mean(x)
        x = jnp.tanh(x / jnp.sqrt(mean(x**2) + 1e-3))
    return jnp.mean((x - 0.3) ** 2)


def below_the_largest(p: Any, batch: Any, axis: str | None) -> jax.Array:
    """The distance of each number from the largest one of all rows."""
    x = jnp.tanh(batch["image"] @ p["image"])
    top = jnp.max(jax.lax.stop_gradient(x), 0)
    top = jax.lax.pmax(top, axis) if axis else top
    return jnp.mean((x - top) ** 2)


def in_loops(p: Any, batch: Any, axis: str | None) -> jax.Array:
    """Sums over replicas in a scan, in a rematerialized part, in a branch and in a condition."""
    mean = (lambda x: jax.lax.pmean(jnp.mean(x, 0), axis)) if axis else (lambda x: jnp.mean(x, 0))

    def layer(x: Any, w: Any) -> Any:
        x = jnp.tanh(x @ w)
        return x - mean(x), None

    x, _ = jax.lax.scan(layer, batch["image"], jnp.stack([p["first"], p["second"]]))
    x = jax.checkpoint(lambda x: jnp.sin(x) + mean(jnp.cos(x)))(x)
    x = jax.lax.cond(jnp.sum(p["first"]) > 1e9, lambda x: x, lambda x: x * mean(x**2), x)
    squares = jax.lax.stop_gradient(x**2)
    small = lambda scale: jnp.all(mean(scale * squares) < 0.01)  # noqa: E731
    x *= jax.lax.while_loop(lambda scale: ~small(scale), lambda scale: scale / 2, 1.0)
    return jnp.mean((x - 0.3) ** 2)


def beside_the_previous_rows(p: Any, batch: Any, axis: str | None) -> jax.Array:
    """Each replica's rows times the squares of the previous replica's: in a ring and in a line.

    The squares tell the two directions of a ring apart.
    """
    image, text = (jnp.tanh(batch[name] @ p[name]) for name in ("image", "text"))
    if axis:
        size = jax.lax.axis_size(axis)
        ring = [(k, (k + 1) % size) for k in range(size)]
        previous = jax.lax.ppermute(image, axis, ring)
        before = jax.lax.ppermute(text, axis, ring[:-1])
    else:
        previous = jnp.roll(image, ROWS, 0)
        before = jnp.roll(text, ROWS, 0).at[:ROWS].set(0.0)
    return jnp.mean(image * previous**2 + text * before**2)


LOSSES = (clip, normalized, below_the_largest, in_loops, beside_the_previous_rows)


def holds(group: fddp.Group, loss: Any) -> None:
    """Value and gradients are those of one device on the joined batch, under every schedule."""
    with jax.enable_x64(True):
        draw = np.random.default_rng(0)
        params = {name: draw.normal(size=(6, 6)) for name in ("image", "text", "first", "second")}
        rows = {name: draw.normal(size=(ROWS * group.size, 6)) for name in ("image", "text")}
        local_rows = jax.tree.map(lambda x: x[ROWS * group.rank :][:ROWS], rows)
        value, grads = jax.jit(jax.value_and_grad(partial(loss, axis=None)))(params, rows)
        for schedule in schedules(group):
            with_axis = partial(loss, axis=group.axis_name)
            f = fddp.value_and_grad(with_axis, group=group, schedule=schedule, bucket_cap_mb=0)
            got, local_grads = f(params, local_rows)
            np.testing.assert_allclose(got, value, rtol=1e-10, err_msg=schedule)
            close(local_grads, grads)


@claim(quick=("gloo",))
def a_contrastive_loss_is_that_of_the_joined_batch(group: fddp.Group):
    holds(group, clip)


@claim(quick=("gloo",))
def layers_that_are_normalized_over_all_rows_are_those_of_the_joined_batch(group: fddp.Group):
    holds(group, normalized)


@claim(quick=("mpi",))
def rows_of_the_previous_replica_are_those_of_the_joined_batch(group: fddp.Group):
    holds(group, beside_the_previous_rows)


@claim()
def a_maximum_over_all_rows_is_that_of_the_joined_batch(group: fddp.Group):
    holds(group, below_the_largest)


@claim(quick=("gloo",))
def sums_over_replicas_in_loops_and_branches_are_those_of_the_joined_batch(group: fddp.Group):
    holds(group, in_loops)
