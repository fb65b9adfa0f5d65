"""Ranks with unequally many rows, and ranks that look up different rows of a table."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from on_ranks.claims import claim, same_on_all_ranks
from problems import RATE, rows, towards_the_mean

import fddp


@claim()
def a_shorter_last_batch_on_one_rank_counts_by_its_rows(group: fddp.Group):
    all_rows = [0.0] * 4 * (group.size - 1) + [8.0, 8.0]
    step = towards_the_mean(group)
    state, _ = step(step.init(jnp.zeros(())), rows(0, 0, 0, 0))
    short = group.rank == group.size - 1
    state, info = step(state, rows(8, 8) if short else rows(0, 0, 0, 0))
    np.testing.assert_allclose(state.params, np.mean(all_rows), rtol=1e-6)
    np.testing.assert_allclose(info.loss, np.square(all_rows).mean(), rtol=1e-6)


@claim(quick=("gloo",))
def later_batches_may_have_unequally_many_rows(group: fddp.Group):
    counts = [4 + 2 * rank for rank in range(group.size)]
    data = np.random.default_rng(5).normal(size=(sum(counts), 3)).astype(np.float32)
    local_rows = np.split(data, np.cumsum(counts)[:-1])[group.rank]

    def loss(w: Any, x: Any) -> Any:
        return jnp.mean((jnp.tanh(x @ w) - 1) ** 2), {"mean": jnp.mean(x)}

    options: dict[str, Any] = {
        "group": group,
        "has_aux": True,
        "accumulation_steps": 2,
    }
    step = fddp.train_step(loss, optax.sgd(RATE), **options)
    state = step.init(np.zeros(3, np.float32))
    state, _ = step(state, np.zeros((4, 3), np.float32))
    old = np.asarray(state.params)
    (_, aux), grads = jax.value_and_grad(loss, has_aux=True)(old, data)
    pending, _ = step.no_sync(jax.tree.map(jnp.copy, state), local_rows[:2])
    for before, remaining in ((state, local_rows), (pending, local_rows[2:])):
        after, info = step(before, remaining)
        np.testing.assert_allclose(np.asarray(after.params), old - RATE * grads, rtol=1e-5)
        np.testing.assert_allclose(np.asarray(info.aux["mean"]), aux["mean"], rtol=1e-5)
        assert same_on_all_ranks(group, after.params)


@claim()
def few_rows_of_a_table_travel_and_more_of_them_too(group: fddp.Group):
    """Each rank looks up three rows, then rank 0 seven, of which the message has no room for
    four."""
    lookups = [[(5 * rank + k) % 7 for k in range(3)] for rank in range(group.size)]
    more = [[0, 1, 2, 3, 4, 50, 59], *lookups[1:]]
    expected = np.zeros((20_000, 2))
    dense_bytes = 4 * 20_000 * 2
    for step_rows in (lookups, more):
        joined = np.concatenate(step_rows)
        np.add.at(expected, joined, -1 / len(joined))
    step = fddp.train_step(
        lambda p, ids: jnp.mean(jnp.sum(p[ids], axis=1)),
        optax.sgd(1.0),
        group=group,
    )
    state, few = step(step.init(np.zeros((20_000, 2), np.float32)), np.array(lookups[group.rank]))
    state, many = step(state, np.array(more[group.rank]))
    np.testing.assert_allclose(state.params, expected, rtol=1e-6)
    assert same_on_all_ranks(group, state.params)
    assert (
        int(few.sent[0])
        == (group.size - 1) * (3 * (2 + 1) * 4 + 1)
        < dense_bytes
        < int(many.sent[0])
    )
