"""Gradients that touch few rows of an embedding travel as rows; training is that of one device on
the joined batch."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import trees
from truth import by_plain_jax

import fddp

close = partial(trees.close, rtol=1e-9)

pytestmark = pytest.mark.steps

Groups = Callable[[int], fddp.Group]
DRAW = np.random.default_rng(7)
ALL = 6000
WIDTH = 4
PARAMS = {"embed": DRAW.normal(size=(ALL, WIDTH)), "out": DRAW.normal(size=(WIDTH, 2))}
# Moments and decay move rows that no gradient touches.
OPTIMIZER = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(0.02, weight_decay=0.1))


def loss_fn(p: Any, batch: Any) -> Any:
    return jnp.mean((jnp.tanh(p["embed"][batch["ids"]]) @ p["out"] - batch["y"]) ** 2)


def batch_of(rows: int, seed: int) -> Any:
    random = np.random.default_rng(seed)
    return {"ids": random.integers(ALL, size=rows), "y": random.normal(size=(rows, 2))}


def by_one_replica(batches: list[Any], loss: Callable[..., Any] = loss_fn) -> Any:
    """Plain JAX on the joined batches."""
    return by_plain_jax(loss, OPTIMIZER, PARAMS, batches).params


def nbytes(replicas: int, rows: int) -> int:
    """Bytes of each replica to all others: rows of float64 with their numbers, and a flag for more
    rows."""
    return (replicas - 1) * (rows * (8 * WIDTH + 4) + 1)


@pytest.mark.quick("3-overlap")
@pytest.mark.parametrize("schedule", ["overlap", "after"])
@pytest.mark.parametrize("replicas", [2, 3])
def test_few_rows_travel_and_all_others_are_updated_too(
    group: Groups, x64: None, schedule: Any, replicas: int
):
    batches = [batch_of(8 * replicas, seed) for seed in range(4)]
    step = fddp.train_step(loss_fn, OPTIMIZER, group=group(replicas), schedule=schedule)
    state = step.init(PARAMS)
    for batch in batches:
        state, info = step(state, batch)
        names = [bucket.names for bucket in step.plan.buckets]
        assert int(info.sent[names.index(("embed",))]) == nbytes(replicas, 8)
    close(state.params, by_one_replica(batches))
    assert f"embed (8 of {ALL} rows, with their numbers)" in str(step.plan)


@pytest.mark.quick("overlap")
@pytest.mark.parametrize("schedule", ["overlap", "after"])
def test_more_rows_than_the_first_batch_had_travel_as_well(group: Groups, x64: None, schedule: Any):
    """Rows travel on one replica alone, on both, and on none again."""
    batches = [batch_of(rows, rows) for rows in (8, 32, 8)]
    batches[1]["ids"] = np.concatenate([np.arange(16), np.full(16, 3)])
    step = fddp.train_step(loss_fn, OPTIMIZER, group=group(2), schedule=schedule)
    state = step.init(PARAMS)
    nbytes_sent = []
    for batch in batches:
        state, info = step(state, batch)
        nbytes_sent.append(int(info.sent[-1]))
    dense_bytes = 8 * ALL * WIDTH  # an all-reduce of two replicas
    assert nbytes_sent == [nbytes(2, 4), nbytes(2, 4) + dense_bytes, nbytes(2, 4)]
    close(state.params, by_one_replica(batches))


def test_rows_of_micro_batches_and_of_calls_without_synchronization_come_together(
    group: Groups, x64: None
):
    batches = [batch_of(16, seed) for seed in range(3)]
    step = fddp.train_step(loss_fn, OPTIMIZER, group=group(2), accumulation_steps=2)
    state, info = step(step.init(PARAMS), batches[0])
    assert int(info.sent[-1]) == nbytes(2, 8)
    state, _ = step.no_sync(state, batches[1])
    state, info = step(state, batches[2])
    joined = {name: np.concatenate([batch[name] for batch in batches[1:]]) for name in batches[0]}
    close(state.params, by_one_replica([batches[0], joined]))


def tied(p: Any, batch: Any) -> Any:
    return jnp.mean((jnp.tanh(p["embed"][batch["ids"]]) @ p["embed"].T) ** 2) + jnp.mean(
        p["out"] ** 2
    )


def test_a_table_that_is_read_otherwise_too_travels_whole(group: Groups, x64: None):
    batches = [batch_of(16, seed) for seed in range(2)]
    step = fddp.train_step(tied, OPTIMIZER, group=group(2))
    state = step.init(PARAMS)
    for batch in batches:
        state, _ = step(state, batch)
    assert all(bucket.rows is None for bucket in step.plan.buckets)
    close(state.params, by_one_replica(batches, tied))


@pytest.mark.parametrize(
    "options",
    [
        {"hook": fddp.hooks.bf16()},
        {"shard": "optimizer"},
        {"virtual_replicas": 4},
    ],
    ids=lambda options: next(iter(options)),
)
def test_what_needs_whole_gradients_gets_them(group: Groups, options: dict[str, Any]):
    step = fddp.train_step(loss_fn, optax.adam(0.02), group=group(2), **options)
    step(step.init(PARAMS), batch_of(16, 0))
    assert all(bucket.rows is None for bucket in step.plan.buckets)


def test_a_plan_with_rows_serves_an_all_reduce_of_ones_own(group: Groups):
    step = fddp.train_step(loss_fn, optax.adam(0.02), group=group(2))
    step(step.init(PARAMS), batch_of(16, 0))
    assert any(bucket.rows for bucket in step.plan.buckets)
    mesh = jax.sharding.Mesh(jax.devices()[:2], "replica")
    spec = jax.sharding.PartitionSpec("replica")
    two = jax.tree.map(lambda x: np.stack([x, 3 * x]).astype(np.float32), PARAMS)

    def mean(tree: Any) -> Any:
        return fddp.all_reduce(
            jax.tree.map(lambda x: x[0], tree), step.plan, axis_name="replica", op="mean"
        )

    got = jax.shard_map(
        mean, mesh=mesh, in_specs=spec, out_specs=jax.sharding.PartitionSpec(), check_vma=False
    )(two)
    close(got, jax.tree.map(lambda b: 2 * b, PARAMS), rtol=1e-6)
