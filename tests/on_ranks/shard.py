"""States in shards, one on each rank."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from on_ranks.claims import claim, error_of, same_on_all_ranks
from problems import square
from truth import by_plain_jax

import fddp


@claim(sizes=(3, 4))
def shards_of_a_subgroup_are_put_together_by_its_ranks(group: fddp.Group):
    ranks = [0, 1] if group.rank < 2 else list(range(2, group.size))
    if len(ranks) == 1:
        return
    pair = group.subgroup(ranks)
    step = fddp.train_step(square, optax.adam(0.1), group=pair, shard="state")
    first = np.arange(5, dtype=np.float32) + ranks[0]
    state = step.init(first)
    np.testing.assert_array_equal(fddp.whole(state.params), first)
    np.testing.assert_array_equal(fddp.whole(state, group=pair).params, first)
    assert "the group is another" in error_of(lambda: fddp.whole(state, group=group))


@claim()
def a_step_is_told_of_a_state_that_other_ranks_hold(group: fddp.Group):
    """The order differs: each rank holds a part, but that of another rank."""
    step = fddp.train_step(square, optax.adam(0.1), group=group, shard="state")
    state = step.init(np.arange(5, dtype=np.float32))
    batch = np.ones((2, 5), np.float32)
    reversed_step = step.on(group.subgroup(range(group.size)[::-1]))
    assert "the state is in shards that" in error_of(lambda: reversed_step(state, batch))
    turned_state = reversed_step.init(np.arange(5, dtype=np.float32))
    turned_state, _ = reversed_step(turned_state, batch)
    assert "the state is in shards that" in error_of(lambda: reversed_step(state, batch))
    step(state, batch)


@claim(quick=("mpi",))
def a_matrix_that_an_update_needs_whole_goes_home(group: fddp.Group):
    def loss(p: Any, x: Any) -> jax.Array:
        return jnp.mean((jnp.tanh(x @ p["v"]) @ p["w"] - p["b"]) ** 2)

    params = {
        "v": np.sin(np.arange(15.0)).reshape(3, 5),
        "w": np.cos(np.arange(20.0)).reshape(5, 4),
        "b": np.ones(4),
    }
    batch = np.sin(np.arange(12.0 * group.size)).reshape(-1, 3)
    local_rows = batch.reshape(group.size, -1, 3)[group.rank]
    optimizer = optax.chain(
        optax.clip_by_global_norm(0.1), optax.contrib.muon(0.05, weight_decay=0.1)
    )
    jax.config.update("jax_enable_x64", True)  # the threads of a step are to know it, too
    try:
        expected, opt_state, *_ = by_plain_jax(loss, optimizer, params, [batch] * 2)
        for schedule, shard in (
            ("overlap", "optimizer"),
            ("overlap", "state"),
            ("after", "optimizer"),
        ):
            options: Any = {"schedule": schedule, "shard": shard, "bucket_cap_mb": 0}
            step = fddp.train_step(loss, optimizer, group=group, **options)
            state = step.init(params)
            for _ in range(2):
                state, _ = step(state, local_rows)
            gathered = fddp.whole(state, group=group)
            for got, want in zip(
                jax.tree.leaves((gathered.params, gathered.opt_state)),
                jax.tree.leaves((expected, opt_state)),
            ):
                np.testing.assert_allclose(np.asarray(got), want, rtol=1e-9, atol=1e-13)
            assert same_on_all_ranks(group, (gathered.params, gathered.opt_state))
    finally:
        jax.config.update("jax_enable_x64", False)


@claim(quick=("gloo",))
def a_norm_of_some_leaves_is_not_taken_beside_a_message(group: fddp.Group):
    """The leaf that is ready last is clipped alone: its update communicates while nothing else
    may."""
    params = {f"p{k:02}": np.full((8, 8), 0.1 + k / 100, np.float32) for k in range(8)}
    sgd = optax.sgd(0.01, momentum=0.5)
    labels: Any = {name: "clipped" if name == "p00" else "plain" for name in params}
    rules: Any = {"plain": sgd, "clipped": optax.chain(optax.clip_by_global_norm(0.01), sgd)}

    def loss(p: Any, x: Any) -> jax.Array:
        for name in sorted(p):
            x = jnp.tanh(x @ p[name])
        return jnp.mean(x**2)

    results = []
    for shard in (None, "optimizer"):
        options: Any = {"bucket_cap_mb": 0, "shard": shard}
        step = fddp.train_step(loss, optax.multi_transform(rules, labels), group=group, **options)
        state = step.init(params)
        for _ in range(30):
            state, _ = step(state, np.full((4, 8), group.rank + 1.0, np.float32))
        results.append(state.params)
    for got, want in zip(*map(jax.tree.leaves, results)):
        np.testing.assert_allclose(np.asarray(got), np.asarray(want), rtol=1e-5)
