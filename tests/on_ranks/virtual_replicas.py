"""Virtual replicas on real ranks have the bits of each rank alone with all rows."""

from itertools import islice
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from on_ranks.claims import claim

import fddp

VIRTUAL = 12
BATCH = 24
STEPS = 3
DRAW = np.random.default_rng(29)
ROWS = DRAW.normal(size=(50, 6)).astype(np.float32)
PARAMS = {"b": np.zeros(4, np.float32), "w": DRAW.normal(size=(6, 4)).astype(np.float32)}


def loss_fn(params: Any, rows: Any, rng: Any) -> Any:
    mask = jax.random.bernoulli(rng, 0.8, rows.shape)
    tokens = jnp.sum(mask)
    value = jnp.sum(jnp.tanh((rows * mask) @ params["w"] + params["b"]) ** 2) / tokens
    return fddp.Weighted(value, tokens), jnp.max(rows)


def trained(group: fddp.Group, **options: Any) -> list[bytes]:
    optimizer = optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(0.01))
    chosen: Any = {"has_aux": True, "virtual_replicas": VIRTUAL, "accumulation_steps": 2} | options
    step = fddp.train_step(loss_fn, optimizer, group=group, **chosen)
    state = step.init(PARAMS, rng=jax.random.key(0))
    reports = []
    share: Any = {"rank": group.rank, "size": group.processes}
    for rows in islice(fddp.samples(50, BATCH, virtual_replicas=VIRTUAL, **share), STEPS):
        state, info = step(state, ROWS[rows])
        reports += [np.asarray(x).tobytes() for x in (info.loss, info.aux)]
    params: Any = (state.params, state.opt_state)
    return [*reports, *(np.asarray(x).tobytes() for x in jax.tree.leaves(params))]


@claim(quick=("gloo",))
def the_bits_are_those_of_one_replica_alone(group: fddp.Group):
    single = fddp.mesh_group(jax.make_mesh((1,), ("replica",), devices=jax.local_devices()[:1]))
    assert trained(group, bucket_cap_mb=0) == trained(single)
