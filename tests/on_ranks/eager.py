"""Eager steps, whose messages are still under way between two steps."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from on_ranks.claims import claim, same_on_all_ranks, sampled
from trees import close
from truth import by_plain_jax

import fddp
from fddp.schedules.launcher import own_lane


@claim(quick=("mpi", "gloo"))
def what_is_used_first_and_ready_last_is_never_trained_on_stale(group: fddp.Group):
    """A tied embedding and a layer that is skipped, against plain JAX on the joined batch."""

    def loss(p: Any, x: Any) -> jax.Array:
        h = x @ p["embedding"]
        aside = h @ p["skipped"]
        for w in p["layers"]:
            h = jnp.tanh(h @ w)
        return jnp.mean(((h + aside) @ p["embedding"].T - x) ** 2)

    draw = np.random.default_rng(0)
    params = {
        "embedding": draw.normal(size=(32, 64)).astype(np.float32) / 8,
        "skipped": draw.normal(size=(64, 64)).astype(np.float32) / 8,
        "layers": [draw.normal(size=(64, 64)).astype(np.float32) / 8 for _ in range(9)],
    }
    rows = draw.normal(size=(4 * group.size, 32)).astype(np.float32)
    optimizer = optax.adam(1e-3)
    # In both orders of the messages, and in the final order.
    batches = [np.roll(rows, k, axis=0) for k in range(4)]
    expected = by_plain_jax(loss, optimizer, params, batches)
    step = fddp.train_step(loss, optimizer, group=group, schedule="eager", bucket_cap_mb=0)
    state = step.init(params)
    for batch, value in zip(batches, expected.losses):
        state, info = step(state, batch[4 * group.rank :][:4])
        np.testing.assert_allclose(info.loss, value, rtol=1e-5)
    close(state.params, expected.params, rtol=1e-3, atol=1e-5)


@claim(quick=("mpi",))
def what_is_under_way_between_two_steps_meets_nothing_that_is_said_there(group: fddp.Group):
    """Gathers of the next step run next to the calls of a loop: their results are right, and so is
    the training."""

    def loss(p: Any, x: Any) -> jax.Array:
        for w in p:
            x = jnp.tanh(x @ w)
        return jnp.mean(x**2)

    params = [
        np.sin(np.arange(64.0 * 64, dtype=np.float32) + k).reshape(64, 64) / 8 for k in range(6)
    ]
    batch = np.cos(np.arange(2 * 64.0 * group.size, dtype=np.float32)).reshape(group.size, 2, 64)
    large = np.full(2**16, group.rank + 1.0, np.float32)
    results = []
    cases: Any = (("staged", "state"), ("eager", "state"), ("eager", None))
    for schedule, shard in sampled(group, cases):
        step = fddp.train_step(
            loss,
            optax.sgd(0.05, momentum=0.9),
            group=group,
            schedule=schedule,
            shard=shard,
            bucket_cap_mb=0,
        )
        state = step.init(params)
        losses = []
        for number in range(8):
            state, info = step(state, batch[group.rank])
            losses.append(float(info.loss))
            total = group.all_reduce(large)
            assert np.all(total == sum(range(1, group.size + 1)))
            if number % 2:
                assert same_on_all_ranks(group, fddp.whole(state.params, group=group))
            if number == 4:
                state, _ = step.no_sync(state, batch[group.rank])
            if number == 6:
                state = jax.tree.map(jnp.copy, state)
            assert np.isfinite(fddp.evaluate(loss, state, [batch[group.rank]], group=group))
        results.append((fddp.whole(state.params, group=group), losses))
    first, *later_results = results
    for result in later_results:
        close(result, first, rtol=1e-5, atol=1e-6)


@claim()
def all_steps_of_a_group_share_the_communicator_of_late_messages(group: fddp.Group):
    """MPICH has 2,048 communicators."""
    lanes = {id(own_lane(group)[0].transport) for _ in range(3000)}
    assert len(lanes) == 1
