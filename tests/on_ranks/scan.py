"""Layers under `lax.scan` on several ranks."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec
from on_ranks.claims import claim, same_on_all_ranks
from problems import square
from trees import close
from truth import by_plain_jax

import fddp

ADAM = optax.adam(1e-3)


@claim(quick=("gloo",))
def stacked_layers_are_trained_as_by_plain_jax(group: fddp.Group):
    trained_as_by_plain_jax(group)


@claim(quick=("mpi",))
def stacked_layers_in_shards_are_trained_as_by_plain_jax(group: fddp.Group):
    for shard in ("optimizer", "state"):
        trained_as_by_plain_jax(group, shard=shard)


def trained_as_by_plain_jax(group: fddp.Group, **options: Any) -> None:
    draw = np.random.default_rng(0)
    layers = {"kernel": draw.normal(size=(7, 32, 32)), "bias": draw.normal(size=(7, 32))}
    params = jax.tree.map(
        lambda x: x.astype(np.float32) / 8, {"in": draw.normal(size=(16, 32)), "layers": layers}
    )
    rows = draw.normal(size=(4 * group.size, 16)).astype(np.float32)
    batches = [np.roll(rows, k, axis=0) for k in range(4)]
    expected = by_plain_jax(loss, ADAM, params, batches)
    step = fddp.train_step(loss, ADAM, group=group, bucket_cap_mb=0.01, **options)
    state = step.init(params)
    for batch, value in zip(batches, expected.losses):
        state, info = step(state, batch[4 * group.rank :][:4])
        np.testing.assert_allclose(info.loss, value, rtol=1e-5)
    close(fddp.whole(state.params, group=group), expected.params, rtol=1e-3, atol=1e-5)


def layer(x: Any, w: Any) -> tuple[Any, None]:
    return x + jnp.tanh(x @ w["kernel"] + w["bias"]), None


def loss(p: Any, x: Any) -> jax.Array:
    return jnp.mean((jax.lax.scan(layer, x @ p["in"], p["layers"])[0] @ p["in"].T - x) ** 2)


@claim(quick=("mpi",))
def layers_are_summed_in_their_loop_if_all_ranks_have_the_same_program(group: fddp.Group):
    draw = np.random.default_rng(0)
    params = {
        "layers": draw.normal(size=(5, 16, 16)).astype(np.float32) / 8,
        "in": np.eye(16, dtype=np.float32),
    }
    rows = draw.normal(size=(4 * group.size, 16)).astype(np.float32)

    for branches, rounds in ((False, 5), (True, 1)):

        def summed(p: Any, x: Any, *, rng: Any, branches: bool = branches) -> jax.Array:
            x = x @ p["in"] if branches and group.rank else x @ p["in"] * 1.0 + 0.0 * x
            x += 0.0 * jax.random.normal(rng, x.shape)  # keys of each rank
            return jnp.mean(
                (jax.lax.scan(lambda x, w: (x + jnp.tanh(x @ w), None), x, p["layers"])[0]) ** 2
            )

        key = jax.random.key(0)
        grads = jax.grad(summed)(params, rows, rng=key)
        expected = jax.tree.map(lambda w, g: w - 0.1 * g, params, grads)
        for schedule in ("overlap", "after", "eager"):
            step = fddp.train_step(
                summed, optax.sgd(0.1), group=group, bucket_cap_mb=0.001, schedule=schedule
            )
            state, _ = step(step.init(params, rng=key), rows[4 * group.rank :][:4])
            state = step.finish(state)
            assert max(bucket.rounds for bucket in step.plan.buckets) == rounds
            close(state.params, expected, rtol=1e-4, atol=1e-6)


@claim(quick=("gloo",))
def a_layers_message_travels_while_its_loop_computes_the_next(group: fddp.Group):
    params = {"layers": np.full((9, 64, 64), 1 / 64, np.float32)}
    rows = np.ones((256, 64), np.float32)
    step = fddp.train_step(
        lambda p, x: jnp.mean(
            jax.lax.scan(lambda x, w: (x + jnp.tanh(x @ w), None), x, p["layers"])[0] ** 2
        ),
        optax.sgd(0.1),
        group=group,
        bucket_cap_mb=0.01,
    )
    state, _ = step(step.init(params), rows)
    under_the_loop = list[bool]()
    for _ in range(20):  # on a busy machine the lane's thread may run after the loop
        state, _ = step(state, rows)
        layers = [x for x in step.timeline().messages if x.name == "bucket 0"]
        assert len(layers) == 9
        last_start = max(x.started for x in layers)
        assert last_start < min(x.awaited for x in layers)
        under_the_loop.append(min(x.sent for x in layers) < last_start)
    assert any(under_the_loop)


@claim(backends=("gloo",))
def a_scan_of_steps_over_global_arrays_gives_the_bits_of_a_loop(group: fddp.Group):
    step = fddp.train_step(square, ADAM, group=group, donate=False)
    first = step.init(np.linspace(-1, 1, 7, dtype=np.float32))
    rows = np.sin(np.arange(3 * 4 * 7, dtype=np.float32)).reshape(3, 4, 7) + group.rank
    state = first
    losses = []
    for batch in rows:
        state, info = step(state, batch)
        losses.append(float(info.loss))
    sharding: Any = first.step.sharding
    along = NamedSharding(sharding.mesh, PartitionSpec(None, group.axis_name))
    batches = jax.make_array_from_process_local_data(along, rows)
    scanned, infos = jax.jit(lambda state, batches: jax.lax.scan(step, state, batches))(
        first, batches
    )
    assert np.array_equal(scanned.params, state.params) and int(scanned.step) == 3
    assert infos.loss.addressable_data(0).tolist() == losses
    assert same_on_all_ranks(group, scanned.params)
