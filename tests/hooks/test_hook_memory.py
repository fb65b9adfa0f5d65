"""Hooks, with a memory and without, work with steps that cross their border and states in
shards."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tiers import crossed
from trees import close

import fddp
from fddp import hooks

pytestmark = pytest.mark.steps

Groups = Callable[[int], fddp.Group]
DRAW = np.random.default_rng(3)
PARAMS = {
    "b": DRAW.normal(size=5).astype(np.float32),
    "w": DRAW.normal(size=(3, 5)).astype(np.float32),
    "v": DRAW.normal(size=(5, 2)).astype(np.float32),
}
ROWS = DRAW.normal(size=(4, 12, 3)).astype(np.float32)
WIDE = DRAW.normal(size=(3, 12, 16)).astype(np.float32)


def signs(comm: fddp.Communicator, bucket: fddp.GradBucket, memory: Any) -> Any:
    return comm.all_reduce(jnp.sign(bucket.buffer)), memory


def largest(comm: fddp.Communicator, bucket: fddp.GradBucket, memory: Any) -> Any:
    return comm.size * jnp.max(comm.all_gather(bucket.buffer), axis=0), memory


WHOLE_LEAVES: dict[str, Any] = {
    "topk": hooks.topk(0.5, error_feedback=False),
    "adasum": hooks.adasum(),
    "8 bits": hooks.quantize(block=4),
    "topk with memory": hooks.topk(0.3),
    "powersgd": hooks.powersgd(1, start_step=1, min_compression_rate=1),
}
BY_ELEMENT: dict[str, Any] = {
    "allreduce": hooks.allreduce(),
    "bf16": hooks.bf16(),
    "fp16": hooks.fp16(),
    "signs": fddp.Hook(lambda leaf: (), signs, "signs", by_element=True),
    "bf16 of signs": hooks.bf16(fddp.Hook(lambda leaf: (), signs, "signs", by_element=True)),
    "largest": fddp.Hook(lambda leaf: (), largest, "largest", by_element=True),
}
WAYS: dict[str, dict[str, Any]] = {
    f"{schedule}, {shard} in shards": {"schedule": schedule, "shard": shard}
    for schedule in ("overlap", "after")
    for shard in ("optimizer", "state")
}


def loss_fn(p: Any, x: Any) -> Any:
    return jnp.mean((jnp.tanh(x @ p["w"] - p["b"]) @ p["v"] - 1) ** 2)


def trained(group: fddp.Group, steps: int = 4, **options: Any) -> tuple[Any, list[int]]:
    step = fddp.train_step(
        loss_fn, optax.adam(0.05), group=group, bucket_cap_mb=0.00005, first_bucket_mb=0, **options
    )
    state = step.init(PARAMS)
    nbytes = list[int]()
    for rows in ROWS[:steps]:
        state, info = step(state, rows)
        nbytes.append(int(np.sum(info.sent)))
    return fddp.whole(state.params), nbytes


@pytest.mark.quick("overlap, state in shards-bf16 of signs", "after, state in shards-largest")
@crossed(options=WAYS, name=list(BY_ELEMENT))
def test_a_hook_of_elements_does_the_same_in_shards(
    group: Groups, name: str, options: dict[str, Any]
):
    plain, _ = trained(group(3), steps=1, hook=BY_ELEMENT[name])
    got, nbytes = trained(group(3), steps=1, hook=BY_ELEMENT[name], **options)
    # A scattered sum of 16 bits is rounded once less, and Adam's first step is 0.05 either way.
    close(got, plain, rtol=1e-5, atol=1e-6)
    assert min(nbytes) > 0


def test_micro_batches_in_shards_go_through_the_hook_each(group: Groups):
    """Each of them is rounded by itself: for numbers of 16 bits it is the sum without a hook."""
    plain, _ = trained(group(2), accumulation_steps=2)
    got, _ = trained(group(2), accumulation_steps=2, shard="state", hook=hooks.bf16())
    close(got, plain, rtol=1e-7, atol=0.02)


@pytest.mark.quick("topk")
@pytest.mark.parametrize("name", ["topk", "8 bits"])
def test_what_a_replica_has_not_sent_yet_is_what_it_remembers(group: Groups, name: str):
    """Over three steps of two micro-batches each: messages and residual are all gradients, which
    equal the rows in this loss."""
    hook = {
        "8 bits": hooks.quantize(block=4),
        "topk": hooks.topk(0.3),
    }[name]
    loss = lambda w, x: jnp.mean(x @ w)  # noqa: E731
    step = fddp.train_step(loss, optax.sgd(1.0), group=group(3), hook=hook, accumulation_steps=2)
    state = step.init(np.zeros(16, np.float32))
    for rows in WIDE:
        state, _ = step(state, rows)
    # A micro-batch weighs 1 however many rows it has: sums are in units of six of them.
    received = -6 * np.asarray(fddp.whole(state.params))
    residual = sum(np.sum(x, axis=0) for x in jax.tree.leaves(state.hook_state))
    assert np.abs(residual).max() > 1e-4
    np.testing.assert_allclose(received + residual, 6 * WIDE.mean(1).sum(0), rtol=1e-5, atol=1e-5)


@pytest.mark.quick("0-state", "2-optimizer")
@pytest.mark.parametrize("shard", ["optimizer", "state"])
@pytest.mark.parametrize(
    "optimizer",
    [optax.flatten(optax.adam(0.1)), optax.contrib.muon(0.05), optax.adafactor(0.1)],
    ids=["0", "1", "2"],
)
def test_on_one_replica_shards_go_with_any_optimizer(group: Groups, optimizer: Any, shard: Any):
    plain = fddp.train_step(loss_fn, optimizer, group=group(1))
    step = fddp.train_step(loss_fn, optimizer, group=group(1), shard=shard)
    want = plain.init(PARAMS)
    state = step.init(PARAMS)
    for rows in ROWS[:2]:
        want, _ = plain(want, rows)
        state, _ = step(state, rows)
    close(fddp.whole(state), want, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("schedule", ["overlap", "after"])
def test_a_sum_that_is_not_finite_moves_no_memory_of_other_buckets(group: Groups, schedule: Any):
    """The parameters stay zeros, and the loss finite; each gradient is finite, too."""
    draw = np.random.default_rng(0)
    rows = {name: draw.normal(size=(2, 64)).astype(np.float32) for name in "ab"}
    step = fddp.train_step(
        lambda p, x: jnp.mean(x["a"] @ p["a"] + x["b"] @ p["b"]),
        optax.sgd(0.0),
        group=group(2),
        hook=hooks.quantize(),
        schedule=schedule,
        bucket_cap_mb=0,
        donate=False,
    )
    state, _ = step(step.init(dict.fromkeys("ab", np.zeros(64, np.float32))), rows)
    moved, _ = step(state, rows)
    overflowing = {"a": rows["a"], "b": np.full((2, 64), 3e38, np.float32)}
    after, info = step(state, overflowing)
    assert np.isfinite(info.loss)
    memories = [jax.tree.map(np.asarray, x.hook_state) for x in (state, moved, after)]
    assert not np.array_equal(memories[0]["a"]["sent"], memories[1]["a"]["sent"])
    jax.tree.map(np.testing.assert_array_equal, memories[0], memories[2])
