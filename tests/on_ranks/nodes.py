"""States in shards inside of nodes, and parts of gradients that are summed between nodes."""

from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from on_ranks.claims import claim, same_on_all_ranks
from problems import layer

import fddp

PARAMS = {"w": np.linspace(-1, 1, 15, dtype=np.float32).reshape(3, 5), "b": np.float32(0.25)}
WAYS = (
    ("fused", "optimizer", 1, False),
    ("staged", "optimizer", 2, False),
    ("staged", "state", 1, False),
    ("eager", "state", 2, False),
    ("fused", "state", 1, True),
    ("staged", "state", 2, True),
)


@claim(sizes=(4,))
def a_state_in_shards_of_nodes_trains_as_a_whole_one(group: fddp.Group):
    batch = np.sin(np.arange(12 * group.size, dtype=np.float32)).reshape(-1, 3)
    mine = batch.reshape(group.size, -1, 3)[group.rank]
    optimizer = optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(0.05))
    expected = jax.tree.map(jnp.asarray, PARAMS)
    opt_state = optimizer.init(expected)
    for _ in range(3):
        updates, opt_state = optimizer.update(jax.grad(layer)(expected, batch), opt_state, expected)
        expected = optax.apply_updates(expected, updates)
    nodes = group.hierarchical(local=2)
    for schedule, shard, micro_batches, again in WAYS:
        options: Any = {"schedule": schedule, "shard": shard, "bucket_cap_mb": 0, "accumulation_steps": micro_batches}
        step = fddp.train_step(layer, optimizer, group=nodes, reshard_after_forward=again, **options)
        state = step.init(PARAMS)
        for _ in range(3):
            state, info = step(state, mine)
        held = state.opt_state[1][0].mu["w"]
        assert held.parts.addressable_shards[0].data.shape == (8,), "half of 15 numbers"
        whole = fddp.whole(state, group=nodes)
        for got, wanted in zip(
            jax.tree.leaves((whole.params, whole.opt_state)), jax.tree.leaves((expected, opt_state))
        ):
            np.testing.assert_allclose(np.asarray(got), wanted, rtol=1e-5, atol=1e-6)
        assert same_on_all_ranks(group, (whole.params, whole.opt_state, jax.device_get(info.loss)))


@claim(sizes=(4,), quick=("mpi",))
def a_state_in_shards_of_nodes_is_written_once_and_goes_on_elsewhere(group: fddp.Group):
    folder = Path(group.broadcast_object(mkdtemp()))
    mine = np.sin(np.arange(12, dtype=np.float32) + group.rank).reshape(-1, 3)
    step = fddp.train_step(layer, optax.adam(0.05), group=group.hierarchical(local=2), shard="state")
    state, _ = step(step.init(PARAMS), mine)
    with fddp.Checkpoints(folder, step) as checkpoints:
        checkpoints.save(state, now=True)
    other = fddp.train_step(layer, optax.adam(0.05), group=group, shard="state")
    with fddp.Checkpoints(folder, other) as checkpoints:
        back, _ = checkpoints.restore(other.init(PARAMS))
    for got, wanted in zip(jax.tree.leaves(fddp.whole(back)), jax.tree.leaves(fddp.whole(state)), strict=True):
        np.testing.assert_array_equal(np.asarray(got), np.asarray(wanted))
    other(back, mine)
