"""Ranks that train alone for some steps."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
from on_ranks.claims import claim, same_on_all_ranks
from problems import RATE, square

import fddp


@claim()
def ranks_that_train_alone_send_nothing_and_then_agree(group: fddp.Group):
    batches = np.sin(np.arange(5 * 4 * group.size, dtype=np.float32)).reshape(5, group.size, 4)
    cases: Any = (("fused", 0), ("staged", 1))
    for schedule, delay in cases:
        optimizer = fddp.local_steps(
            optax.sgd(RATE, momentum=0.5), outer=optax.sgd(0.7), every=2, delay=delay
        )
        step = fddp.train_step(square, optimizer, group=group, schedule=schedule)
        state = step.init(jnp.zeros(()))
        synchronized = []
        local = np.zeros(group.size)
        speed = np.zeros(group.size)
        shared = 0.0
        for number, batch in enumerate(batches, start=1):
            state, info = step(state, batch[group.rank])
            synchronized.append(bool(np.asarray(info.sent).any()))
            before = local
            speed = 0.5 * speed + 2 * (local - batch.mean(axis=1))
            local = local - RATE * speed
            if number > delay and (number - delay) % 2 == 0:
                shared -= 0.7 * (shared - np.mean(before if delay else local))
                local = np.full(group.size, shared)
        assert synchronized == (
            [False, False, True, False, True] if delay else [False, True, False, True, False]
        )
        np.testing.assert_allclose(float(state.opt_state.shared), shared, rtol=1e-5)
        gathered = fddp.whole(state, group=group)
        np.testing.assert_allclose(gathered.params, np.mean(local), rtol=1e-5)
        copy = np.asarray(state.params.parts.addressable_shards[0].data)
        np.testing.assert_allclose(copy, local[group.rank : group.rank + 1], rtol=1e-5)
        assert same_on_all_ranks(group, gathered)


@claim(quick=("mpi",))
def ranks_average_moments_and_over_nodes_each_at_its_own_period(group: fddp.Group):
    size = group.size
    batches = np.sin(np.arange(7 * 4 * size, dtype=np.float32)).reshape(7, size, 4)
    # (replicas of an island, of a node, delay, schedule): with four ranks two nodes, or one of two
    # islands
    four = ((1, 2, 0, "fused"), (1, 2, 0, "staged"), (2, 4, 1, "staged"))
    cases: Any = four if size == 4 else ((1, size, 0, "staged"),)
    for island, node, delay, schedule in cases:
        every = {"params": 4, "node": 2, "trace": 3}
        inner = optax.sgd(RATE, momentum=0.5)
        optimizer = fddp.local_steps(
            inner, outer=optax.sgd(0.7), every=every, delay=delay, island=island
        )
        step = fddp.train_step(square, optimizer, group=group.hierarchical(node), schedule=schedule)
        state = step.init(jnp.zeros(()))
        local = np.zeros(size)
        speed = np.zeros(size)
        shared = 0.0
        for number, batch in enumerate(batches, start=1):
            state, _ = step(state, batch[group.rank])
            before = local, speed
            speed = 0.5 * speed + 2 * (
                local - np.repeat(batch.reshape(size // island, -1).mean(axis=1), island)
            )
            local = local - RATE * speed
            snapshot, pace = before if delay else (local, speed)
            local_count = number - delay
            if local_count and local_count % 3 == 0:
                speed = np.full(size, pace.mean())
            if local_count and local_count % 4 == 0:
                shared -= 0.7 * (shared - snapshot.mean())
                local = np.full(size, shared)
            elif local_count and local_count % 2 == 0:
                local = np.repeat(snapshot.reshape(-1, node).mean(axis=1), node)
        copies = (state.params, state.opt_state.inner[0].trace)
        copies = [float(np.asarray(x.parts.addressable_shards[0].data).ravel()[0]) for x in copies]
        np.testing.assert_allclose(copies, [local[group.rank], speed[group.rank]], rtol=1e-5)
        np.testing.assert_allclose(float(state.opt_state.shared), shared, rtol=1e-5)
