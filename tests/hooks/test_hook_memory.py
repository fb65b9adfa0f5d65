"""Hooks that remember nothing go with steps that cross their border, and with states in shards."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest
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

HOOKS: dict[str, Any] = {
    "bf16": hooks.bf16(),
    "fp16": hooks.fp16(),
    "quantize": hooks.quantize(block=4, error_feedback=False),
    "topk": hooks.topk(0.5, error_feedback=False),
    "adasum": hooks.adasum(),
}
WAYS: dict[str, dict[str, Any]] = {
    "eager": {"schedule": "eager"},
    **{
        f"{schedule}, {shard} in shards": {"schedule": schedule, "shard": shard}
        for schedule in ("fused", "staged", "after", "eager")
        for shard in ("optimizer", "state")
        if (schedule, shard) != ("eager", "optimizer")
    },
}


def loss_fn(p: Any, x: Any) -> Any:
    return jnp.mean((jnp.tanh(x @ p["w"] - p["b"]) @ p["v"] - 1) ** 2)


def trained(group: fddp.Group, steps: int = 4, **options: Any) -> tuple[Any, list[int]]:
    step = fddp.train_step(loss_fn, optax.adam(0.05), group=group, bucket_cap_mb=0.00005, first_bucket_mb=0, **options)
    state = step.init(PARAMS)
    sent = list[int]()
    for rows in ROWS[:steps]:
        state, info = step(state, rows)
        sent.append(int(np.sum(info.sent)))
    return fddp.whole(state.params), sent


# Adasum looks at whole leaves, and stands for all hooks in most ways.
CASES = [
    (name, way) for way in WAYS for name in HOOKS if name == "adasum" or way in ("eager", "fused, state in shards")
]


@pytest.mark.parametrize(("name", "way"), CASES)
def test_a_hook_without_memory_makes_the_same_of_whole_leaves_in_every_way(group: Groups, name: str, way: str):
    plain, _ = trained(group(3), schedule="staged", hook=HOOKS[name])
    got, sent = trained(group(3), hook=HOOKS[name], **WAYS[way])
    close(got, plain, rtol=1e-5, atol=1e-6)
    assert min(sent) > 0


def test_micro_batches_in_shards_go_through_the_hook_each(group: Groups):
    """Each of them rounds by itself: to what 16 bits hold it is the sum without a hook."""
    plain, _ = trained(group(2), accumulation_steps=2)
    got, _ = trained(group(2), accumulation_steps=2, shard="state", hook=hooks.bf16())
    close(got, plain, rtol=1e-7, atol=0.02)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"schedule": "eager"}, "the next step begins before all sums are back"),
        ({"shard": "state"}, "a bucket is scattered once for each micro-batch"),
    ],
)
def test_a_hook_with_a_memory_is_refused_where_it_cannot_be(group: Groups, options: Any, says: str):
    step = fddp.train_step(loss_fn, optax.adam(0.1), group=group(2), hook=hooks.quantize(), **options)
    with pytest.raises(ValueError, match=rf"which remembers things from step to step: {says}.*without a memory"):
        step.init(PARAMS)


@pytest.mark.parametrize("shard", ["optimizer", "state"])
@pytest.mark.parametrize(
    "optimizer", [optax.flatten(optax.adam(0.1)), optax.contrib.muon(0.05), optax.adafactor(0.1)], ids=["0", "1", "2"]
)
def test_on_one_replica_shards_go_with_any_optimizer(group: Groups, optimizer: Any, shard: Any):
    plain = fddp.train_step(loss_fn, optimizer, group=group(1))
    step = fddp.train_step(loss_fn, optimizer, group=group(1), shard=shard)
    want, state = plain.init(PARAMS), step.init(PARAMS)
    for rows in ROWS[:2]:
        want, _ = plain(want, rows)
        state, _ = step(state, rows)
    close(fddp.whole(state), want, rtol=1e-6, atol=1e-7)
