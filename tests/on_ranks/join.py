"""Ranks that run out of data before the others."""

from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
from on_ranks.claims import claim, error_of
from problems import pull, rows

import fddp


def uneven(group: fddp.Group) -> list[np.ndarray]:
    """Rank r has r + 1 batches, each of ones."""
    return [rows(1)] * (group.rank + 1)


@claim()
def a_rank_without_data_counts_for_nothing_until_all_are_done(group: fddp.Group):
    by_all = []
    by_active = []
    for results, option in ((by_all, True), (by_active, False)):
        step = pull(group)
        state = step.init(np.float32(0))
        for batch in fddp.join(uneven(group), group, divide_by_initial_world_size=option):
            state, _ = step(state, batch)
            results.append(float(state.params))
    # In step k all but the first k ranks have a batch.
    np.testing.assert_allclose(by_active, -np.arange(1.0, group.size + 1), rtol=1e-6)
    np.testing.assert_allclose(
        by_all, -np.cumsum(np.arange(group.size, 0, -1) / group.size), rtol=1e-6
    )


@claim()
def join_ends_on_every_rank_at_once_if_asked(group: fddp.Group):
    batches_read: list[Any] = []
    batches = fddp.join(uneven(group), group, throw_on_early_termination=True)
    assert "rank 0 has run out" in error_of(lambda: batches_read.extend(batches), RuntimeError)
    assert len(batches_read) == 1


@claim()
def a_rank_without_any_batch_is_an_error_on_every_rank(group: fddp.Group):
    def batches() -> Iterator[np.ndarray]:
        if group.rank > 0:
            yield rows(1)

    assert "no batch at all on rank 0" in error_of(lambda: list(fddp.join(batches(), group)))


@claim()
def a_rank_without_data_uses_no_parameter(group: fddp.Group):
    step = pull(group, find_unused_parameters=True)
    state = step.init(np.float32(0))
    counts = []
    for batch in fddp.join(uneven(group), group):
        state, info = step(state, batch)
        counts.append(int(info.used))
    assert counts == list(range(group.size, 0, -1))


@claim()
def a_rank_that_ends_with_a_small_batch_counts_with_all_its_rows_afterwards(group: fddp.Group):
    counts = (4, 4, 4) if group.rank == 0 else (4, 1)
    batches = [np.full(count, 1.0 + number, np.float32) for number, count in enumerate(counts)]
    step = fddp.train_step(lambda w, x: jnp.mean(w * x), optax.sgd(1.0), group=group)
    state = step.init(jnp.zeros(()))
    params_after = [0.0]
    for batch in fddp.join(batches, group):
        state, _ = step(state, batch)
        params_after.append(float(state.params))
    # All rows of the first and the second step; of the third rank 0's four, divided by four rows of
    # each rank.
    np.testing.assert_allclose(-np.diff(params_after), [1, 2, 3 / group.size], rtol=1e-6)
