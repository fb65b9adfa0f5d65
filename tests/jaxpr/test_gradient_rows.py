"""Number of rows of a gradient that can differ from zero: programs against computed gradients."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen

from fddp.jaxpr import touched_rows

TABLE = jnp.asarray(np.random.default_rng(0).normal(size=(100, 4)))
IDS = np.array([[3, 7, 20], [50, 51, 99]])
FILTER = jnp.ones((4, 4))


def rematerialised_loop(table: Any) -> Any:
    def body(total: Any, ids: Any) -> Any:
        return total + jnp.sum(jnp.tanh(table[ids])), None

    return jax.lax.scan(jax.checkpoint(body), 0.0, IDS)[0]


def in_16_bits(table: Any) -> Any:
    embed = linen.Embed(100, 4, dtype=jnp.bfloat16)
    return jnp.sum(jnp.float32(embed.apply({"params": {"embedding": table}}, IDS)))


@jax.custom_vjp
def looked_up(table: Any) -> Any:
    return table[IDS]


looked_up.defvjp(
    lambda table: (table[IDS], None),
    lambda _, g: (jnp.zeros((100, 4), g.dtype).at[IDS].add(2 * g),),
)


def branch(table: Any) -> Any:
    return jax.lax.cond(
        IDS[0, 0] > jnp.sum(FILTER), lambda: jnp.sum(table[IDS]), lambda: jnp.sum(table[IDS[0]])
    )


FEW: dict[str, tuple[Callable[[Any], Any], int]] = {
    "a lookup": (lambda t: jnp.sum(jnp.sin(t[IDS])), 6),
    "weighed": (
        lambda t: 3 * jnp.mean(t[IDS] @ FILTER, where=np.array([[True], [False], [True]])),
        6,
    ),
    "scaled before": (lambda t: jnp.sum((t * jnp.sqrt(8.0))[IDS]), 6),
    "taken, and none": (
        lambda t: jnp.sum(jnp.take(t, np.array([1, 2, 999]), axis=0, mode="fill", fill_value=0)),
        3,
    ),
    "two lookups": (lambda t: jnp.sum(t[IDS]) + jnp.sum(t[IDS[0]] ** 2), 9),
    "the first rows": (lambda t: jnp.sum(jnp.sin(t[:5])), 5),
    "a slice somewhere": (lambda t: jnp.sum(jax.lax.dynamic_slice_in_dim(t, IDS[0, 0], 4)), 4),
    "for each row of a batch": (lambda t: jnp.sum(jax.vmap(lambda k: jnp.sum(t[k]) ** 2)(IDS)), 6),
    "in 16 bits": (in_16_bits, 6),
    "a derivative of one's own": (lambda t: jnp.sum(looked_up(t)), 6),
    "no path at all": (lambda t: jnp.sum(FILTER), 0),
}
ALL: dict[str, Callable[[Any], Any]] = {
    "tied to the outputs": lambda t: jnp.sum(t[IDS] @ t.T),
    "decayed by the loss": lambda t: jnp.sum(t[IDS]) + jnp.sum(t**2),
    "normalized first": lambda t: jnp.sum((t / jnp.linalg.norm(t))[IDS]),
    "looked up along the other dim": lambda t: jnp.sum(t[:, IDS[0, :2] % 4]),
    "weighed by padded ones": lambda t: jnp.sum(
        t * jnp.pad(jnp.zeros((90, 1)), ((0, 10), (0, 0)), constant_values=1.0)
    ),
    "looked up in a loop": rematerialised_loop,
    "looked up in a branch": branch,
    "looked up by a product": lambda t: jnp.sum(jax.nn.one_hot(IDS, 100) @ t),
}


@pytest.mark.steps
@pytest.mark.parametrize("name", FEW)
def test_a_gradient_has_no_more_rows_than_its_program_tells(name: str):
    loss, expected = FEW[name]
    (count,) = touched_rows(jax.make_jaxpr(jax.grad(loss))(TABLE))
    assert count == expected
    assert np.any(np.asarray(jax.grad(loss)(TABLE)) != 0, axis=1).sum() <= count


@pytest.mark.parametrize("name", ALL)
def test_what_reads_a_whole_table_touches_all_of_it(name: str):
    (count,) = touched_rows(jax.make_jaxpr(jax.grad(ALL[name]))(TABLE))
    assert count == 100
