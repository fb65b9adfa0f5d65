"""Layers under `lax.scan` in one program that overlaps: their sums run in the loop, and nothing
else changes."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from scanned_net import net
from test_scanned_layers import (
    CAP,
    LAYERS,
    ROWS,
    SLICED,
    compare,
    plain,
    stack,
    trained,
    weights,
)

import fddp
from fddp.program import heavy_operations, parse
from fddp.program.collectives import KINDS


def overlapping(group: Any) -> Any:
    """The same replicas, with programs that count as overlapping, like those of GPUs."""
    return replace(group, placement=group.placement._replace(overlaps=True))


def fused(loss: Any, optimizer: Any, group: Any, **options: Any) -> Any:
    caps: dict[str, Any] = {"bucket_cap_mb": CAP, **options}
    return fddp.train_step(loss, optimizer, group=overlapping(group), schedule="fused", **caps)


def in_rounds(step: Any) -> dict[str, int]:
    return {
        name: bucket.rounds
        for bucket in step.plan.buckets
        if bucket.rounds > 1
        for name in bucket.names
    }


def sums_in_loops(step: Any, params: Any) -> int:
    """The number of loops of the compiled program with both a sum and products."""
    module = parse(step.lower(step.init(params), ROWS).compile().as_text())
    lines = [schedule.lines for schedule in module.schedules() if schedule.loops]
    summing = [loop for loop in lines if any(line.opcode.startswith(KINDS) for line, _ in loop)]
    return sum(any(heavy_operations(module, line) for line, _ in loop) for loop in summing)


@pytest.mark.quick(
    "plainly", "with random numbers", "beside tied parameters", "rematerialised whole", "in reverse"
)
@pytest.mark.steps
@pytest.mark.parametrize("written", SLICED)
def test_stacked_layers_are_summed_in_their_loop_as_by_plain_jax(group, x64, written):
    loss = net(SLICED[written])
    optimizer = optax.adamw(0.1)
    step, params = trained(fused(loss, optimizer, group(8)), weights())
    assert in_rounds(step) == {"layers/kernel": LAYERS, "layers/bias": LAYERS}
    assert sums_in_loops(step, weights()) == 1
    compare(params, plain(loss, optimizer, weights(), replicas=8))


@pytest.mark.steps
@pytest.mark.parametrize(
    "options",
    [{"accumulation_steps": 2}, {"find_unused_parameters": True}, {"skip_nonfinite": True}],
    ids=str,
)
def test_what_is_pending_or_asked_of_gradients_does_not_keep_sums_out_of_the_loop(
    group, x64, options
):
    loss = net(SLICED["plainly"])
    optimizer = optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(0.1))
    step, params = trained(fused(loss, optimizer, group(4), **options), weights())
    assert in_rounds(step) and sums_in_loops(step, weights()) == 1
    compare(params, plain(loss, optimizer, weights(), replicas=8))


@pytest.mark.steps
def test_gradients_that_no_sync_left_pending_are_summed_with_the_rest(group, x64):
    loss = net(SLICED["plainly"])
    step = fused(loss, optax.sgd(0.1), group(2))
    state, _ = step.no_sync(step.init(weights()), ROWS)
    state, _ = step(state, ROWS + 1)
    assert in_rounds(step)
    grads = jax.grad(lambda p: (loss(p, ROWS) + loss(p, ROWS + 1)) / 2)(weights())
    compare(jax.device_get(state.params), jax.tree.map(lambda w, g: w - 0.1 * g, weights(), grads))


@pytest.mark.steps
def test_two_loops_over_two_stacks_sum_each_its_own(group, x64):
    def loss(p: Any, rows: Any) -> Any:
        return net(lambda x, p: SLICED["plainly"](SLICED["plainly"](x, p), {"layers": p["more"]}))(
            p, rows
        )

    params = weights() | {"more": stack(3)}
    step, got = trained(fused(loss, optax.adamw(0.1), group(2)), params)
    assert sorted(set(in_rounds(step).values())) == [3, LAYERS]
    assert sums_in_loops(step, params) == 2
    compare(got, plain(loss, optax.adamw(0.1), params))


@pytest.mark.steps
@pytest.mark.parametrize(
    ("layers", "options"),
    [
        (1, {}),
        (LAYERS, {"bucket_cap_mb": 25}),
        (LAYERS, {"order": "reverse"}),
        (LAYERS, {"hook": fddp.hooks.bf16()}),
        (LAYERS, {"shard": "state"}),
    ],
    ids=["one layer", "one bucket", "reverse", "hook", "shard"],
)
def test_stacks_that_cannot_or_need_not_be_summed_in_a_loop_travel_whole(group, layers, options):
    params = jax.tree.map(np.float32, weights() | {"layers": stack(layers)})
    step = fused(net(SLICED["plainly"]), optax.sgd(0.1), group(2), **options)
    step(step.init(params), np.float32(ROWS))
    assert in_rounds(step) == {}


@pytest.mark.steps
def test_cpus_on_which_nothing_overlaps_keep_stacks_whole(group):
    step = fddp.train_step(
        net(SLICED["plainly"]), optax.sgd(0.1), group=group(2), schedule="fused", bucket_cap_mb=CAP
    )
    step(step.init(weights()), ROWS)
    assert in_rounds(step) == {}


@pytest.mark.steps
def test_each_round_counts_with_the_bytes_that_it_sends(group):
    params = jax.tree.map(jnp.float32, weights())
    step = fused(net(SLICED["plainly"]), optax.sgd(0.1), group(2))
    _, info = step(step.init(params), np.float32(ROWS))
    assert info.sent is not None
    (at,) = (k for k, bucket in enumerate(step.plan.buckets) if bucket.rounds > 1)
    # Of two replicas each sends as many bytes as it has.
    assert int(info.sent[at]) == LAYERS * (6 * 6 + 6) * 4
    assert "(in 5 rounds)" in str(step.plan)
