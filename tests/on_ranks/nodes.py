"""States in shards inside of nodes, and parts of gradients that are summed between nodes."""

from typing import Any

import jax
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
