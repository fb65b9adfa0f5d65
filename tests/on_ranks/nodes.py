"""States in shards inside of nodes, and parts of gradients that are summed between nodes."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from on_ranks.claims import claim, same_on_all_ranks
from problems import layer
from truth import by_plain_jax

import fddp

PARAMS = {"w": np.linspace(-1, 1, 15, dtype=np.float32).reshape(3, 5), "b": np.float32(0.25)}
WAYS = (
    ("fused", "optimizer", 1),
    ("staged", "optimizer", 2),
    ("staged", "state", 1),
    ("eager", "state", 2),
    ("fused", "state", 1),
)


@claim(sizes=(4,))
def a_state_in_shards_of_nodes_trains_as_a_whole_one(group: fddp.Group):
    batch = np.sin(np.arange(12 * group.size, dtype=np.float32)).reshape(-1, 3)
    local_rows = np.split(batch, group.processes)[group.rank]
    optimizer = optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(0.05))
    expected, opt_state, *_ = by_plain_jax(layer, optimizer, PARAMS, [batch] * 3)
    nodes = group.hierarchical(local=2)
    for schedule, shard, micro_batches in WAYS:
        options: Any = {
            "schedule": schedule,
            "shard": shard,
            "bucket_cap_mb": 0,
            "accumulation_steps": micro_batches,
        }
        step = fddp.train_step(layer, optimizer, group=nodes, **options)
        state = step.init(PARAMS)
        loss = None
        for _ in range(3):
            state, info = step(state, local_rows)
            loss = jax.device_get(info.loss)
        momentum = state.opt_state[1][0].mu["w"]
        assert momentum.parts.addressable_shards[0].data.shape == (8,), "half of 15 numbers"
        gathered = fddp.whole(state, group=nodes)
        for got, want in zip(
            jax.tree.leaves((gathered.params, gathered.opt_state)),
            jax.tree.leaves((expected, opt_state)),
        ):
            np.testing.assert_allclose(np.asarray(got), want, rtol=1e-5, atol=1e-6)
        assert same_on_all_ranks(group, (gathered.params, gathered.opt_state, loss))


@claim(sizes=(4,))
def islands_of_two_train_together_inside_and_synchronize_now_and_then(group: fddp.Group):
    batches = np.sin(np.arange(5 * 12 * group.size, dtype=np.float32)).reshape(5, -1, 3)
    outer = optax.sgd(0.7, momentum=0.9, nesterov=True)
    expected = by_hand(batches, optax.adam(0.05), outer)
    ways: Any = (
        ("fused", None),
        ("staged", None),
        ("staged", "optimizer"),
        ("fused", "state"),
        ("staged", "state"),
    )
    for schedule, shard in ways:
        optimizer = fddp.local_steps(optax.adam(0.05), outer=outer, every=2, island=2)
        step = fddp.train_step(
            layer, optimizer, group=group, schedule=schedule, shard=shard, bucket_cap_mb=0
        )
        state = step.init(PARAMS)
        for batch in batches:
            state, _ = step(state, np.split(batch, group.processes)[group.rank])
        gathered = fddp.whole(state, group=group)
        for got, want in zip(
            jax.tree.leaves(gathered.params), jax.tree.leaves(expected), strict=True
        ):
            np.testing.assert_allclose(np.asarray(got), want, rtol=1e-5, atol=1e-6)
        assert same_on_all_ranks(group, gathered.params)


def by_hand(batches: np.ndarray, inner: Any, outer: Any) -> Any:
    """The mean of two islands that train alone, each on its half of the rows, and meet in every
    second step."""
    shared = jax.tree.map(jnp.asarray, PARAMS)
    islands = [shared, shared]
    states = [inner.init(shared)] * 2
    outside = outer.init(shared)
    for number, batch in enumerate(batches, start=1):
        for k, rows in enumerate(np.split(batch, 2)):
            updates, states[k] = inner.update(
                jax.grad(layer)(islands[k], rows), states[k], islands[k]
            )
            islands[k] = optax.apply_updates(islands[k], updates)
        if number % 2 == 0:
            change = jax.tree.map(lambda old, a, b: old - (a + b) / 2, shared, *islands)
            updates, outside = outer.update(change, outside, shared)
            shared = optax.apply_updates(shared, updates)
            islands = [shared, shared]
    return jax.tree.map(lambda a, b: (a + b) / 2, *islands)
