"""Layers under `lax.scan`: where programs overlap their sums run in the loop, and nothing else
changes."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from scanned_net import layer, net, overlapping, scanned, with_rng
from trees import close
from truth import by_plain_jax

import fddp
from fddp.jax_internals import KINDS, heavy_operations, parse

LAYERS = 5
WIDTH = 6
CAP = 0.0007  # MiB: two layers
ROWS = np.random.default_rng(7).normal(size=(8, WIDTH))


def stack(*lengths: int) -> dict[str, np.ndarray]:
    make = np.random.default_rng(sum(lengths)).normal
    return {
        "bias": make(size=(*lengths, WIDTH)) / 9,
        "kernel": make(size=(*lengths, WIDTH, WIDTH)) / 3,
    }


def weights() -> dict[str, Any]:
    make = np.random.default_rng(1).normal
    return {"in": make(size=(WIDTH, WIDTH)), "layers": stack(LAYERS), "out": make(size=(WIDTH, 2))}


def tied(x: Any, p: Any) -> Any:
    """The first matrix is also in each layer."""
    return jax.lax.scan(lambda x, w: layer(x @ p["in"], w), x, p["layers"])[0]


def with_results(x: Any, p: Any) -> Any:
    def round_of_layer(x: Any, w: Any) -> tuple[Any, Any]:
        return (y := layer(x, w)[0]), y

    x, outputs = jax.lax.scan(round_of_layer, x, p["layers"])
    return x + jnp.mean(outputs**2, 0)


WRITTEN = {
    "plainly": lambda x, p: scanned(x, p["layers"]),
    "in reverse": lambda x, p: scanned(x, p["layers"], reverse=True),
    "unrolled by two": lambda x, p: scanned(x, p["layers"], unroll=2),
    "rematerialised whole": lambda x, p: jax.checkpoint(scanned)(x, p["layers"]),
    "each layer rematerialised": lambda x, p: jax.lax.scan(jax.checkpoint(layer), x, p["layers"])[
        0
    ],
    "beside tied parameters": tied,
    "with results of each round": with_results,
    "with random numbers": with_rng,
    "twice over the same layers": lambda x, p: scanned(scanned(x, p["layers"]), p["layers"]),
    "and read by something else": lambda x, p: (
        scanned(x, p["layers"]) + jnp.mean(p["layers"]["kernel"] ** 2)
    ),
}
# Of the stack's own rows, one by one: nothing is taken for a layer that is none.
MASKS = np.random.default_rng(2).integers(2, size=(LAYERS, 1, WIDTH, WIDTH))
JOINED = {
    "of rows": lambda p: jnp.concatenate([jnp.asarray(mask, jnp.float64) for mask in MASKS]),
    "of columns": lambda p: jnp.concatenate(
        [p["layers"]["kernel"][..., :2], jnp.ones((LAYERS, WIDTH, 4))], -1
    ),
}


def trained(step: Any, params: Any, steps: int = 3) -> tuple[Any, Any]:
    state = step.init(params)
    for k in range(steps):
        state, _ = step(state, ROWS + k)
    return step, jax.device_get(state.params)


def plain(loss: Any, optimizer: Any, params: Any, steps: int = 3, replicas: int = 2) -> Any:
    batches = [ROWS + k for k in range(steps)]
    return by_plain_jax(loss, optimizer, params, batches, parts=replicas).params


def compare(got: Any, expected: Any) -> None:
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-13), got, expected)


def fused(loss: Any, optimizer: Any, group: Any, **options: Any) -> Any:
    caps: dict[str, Any] = {"bucket_cap_mb": CAP, **options}
    return fddp.train_step(loss, optimizer, group=overlapping(group), **caps)


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


@pytest.mark.quick("with random numbers", "beside tied parameters", "rematerialised whole")
@pytest.mark.steps
@pytest.mark.parametrize("written", WRITTEN)
def test_stacked_layers_are_summed_in_their_loop_as_by_plain_jax(group, x64, written):
    loss = net(WRITTEN[written])
    optimizer = optax.adamw(0.1)
    step, params = trained(fused(loss, optimizer, group(8)), weights())
    assert in_rounds(step) == {"layers/kernel": LAYERS, "layers/bias": LAYERS}
    assert sums_in_loops(step, weights()) == 1
    compare(params, plain(loss, optimizer, weights(), replicas=8))


@pytest.mark.quick("{'accumulation_steps': 2}")
@pytest.mark.steps
@pytest.mark.parametrize(
    "options",
    [{"accumulation_steps": 2}, {"find_unused_parameters": True}, {"skip_nonfinite": True}],
    ids=str,
)
def test_what_is_pending_or_asked_of_gradients_does_not_keep_sums_out_of_the_loop(
    group, x64, options
):
    loss = net(WRITTEN["plainly"])
    optimizer = optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(0.1))
    step, params = trained(fused(loss, optimizer, group(4), **options), weights())
    assert in_rounds(step) and sums_in_loops(step, weights()) == 1
    compare(params, plain(loss, optimizer, weights(), replicas=8))


@pytest.mark.steps
def test_a_cap_below_a_layer_divides_the_message_of_a_round(group, x64):
    loss = net(WRITTEN["plainly"])
    step, params = trained(fused(loss, optax.adamw(0.1), group(2), bucket_cap_mb=0), weights())
    messages = [bucket.names for bucket in step.plan.buckets if bucket.rounds > 1]
    assert messages == [("layers/bias",), ("layers/kernel",)]
    assert sums_in_loops(step, weights()) == 1
    compare(params, plain(loss, optax.adamw(0.1), weights()))


@pytest.mark.steps
def test_gradients_that_no_sync_left_pending_are_summed_with_the_rest(group, x64):
    loss = net(WRITTEN["plainly"])
    step = fused(loss, optax.sgd(0.1), group(2))
    state, _ = step.no_sync(step.init(weights()), ROWS)
    state, _ = step(state, ROWS + 1)
    assert in_rounds(step)
    grads = jax.grad(lambda p: (loss(p, ROWS) + loss(p, ROWS + 1)) / 2)(weights())
    compare(jax.device_get(state.params), jax.tree.map(lambda w, g: w - 0.1 * g, weights(), grads))


@pytest.mark.steps
def test_two_loops_over_two_stacks_sum_each_its_own(group, x64):
    def loss(p: Any, rows: Any) -> Any:
        return net(
            lambda x, p: WRITTEN["plainly"](WRITTEN["plainly"](x, p), {"layers": p["more"]})
        )(p, rows)

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
    step = fused(net(WRITTEN["plainly"]), optax.sgd(0.1), group(2), **options)
    step(step.init(params), np.float32(ROWS))
    assert in_rounds(step) == {}


@pytest.mark.steps
def test_cpus_on_which_nothing_overlaps_keep_stacks_whole(group):
    step = fddp.train_step(
        net(WRITTEN["plainly"]), optax.sgd(0.1), group=group(2), bucket_cap_mb=CAP
    )
    step(step.init(weights()), ROWS)
    assert in_rounds(step) == {}


@pytest.mark.steps
def test_each_round_counts_with_the_bytes_that_it_sends(group):
    params = jax.tree.map(jnp.float32, weights())
    step = fused(net(WRITTEN["plainly"]), optax.sgd(0.1), group(2))
    _, info = step(step.init(params), np.float32(ROWS))
    assert info.sent is not None
    (at,) = (k for k, bucket in enumerate(step.plan.buckets) if bucket.rounds > 1)
    # Of two replicas each sends as many bytes as it has.
    assert int(info.sent[at]) == LAYERS * (6 * 6 + 6) * 4
    assert "(in 5 rounds)" in str(step.plan)


@pytest.mark.steps
@pytest.mark.parametrize("name", JOINED)
def test_an_array_that_is_joined_beside_the_layers_is_not_taken_for_them(group, x64, name):
    def pruned(x: Any, p: Any) -> Any:
        return scanned(x, p["layers"] | {"kernel": p["layers"]["kernel"] * JOINED[name](p)})

    _, params = trained(fused(net(pruned), optax.adamw(0.1), group(2)), weights())
    compare(params, plain(net(pruned), optax.adamw(0.1), weights()))


@pytest.mark.steps
def test_a_stack_of_no_layers_is_trained_beside_others(group, x64):
    def with_empty_stack(x: Any, p: Any) -> Any:
        return scanned(scanned(x, p["none"]), p["layers"])

    params = weights() | {"none": stack(0)}
    step, got = trained(fused(net(with_empty_stack), optax.adamw(0.1), group(2)), params)
    assert in_rounds(step)
    compare(got, plain(net(with_empty_stack), optax.adamw(0.1), params))


@pytest.mark.steps
def test_flax_layers_under_nn_scan_are_summed_in_their_loop(group, x64):
    class Block(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array, _: None) -> tuple[jax.Array, None]:
            return x + nn.tanh(nn.Dense(WIDTH, param_dtype=jnp.float64)(x)), None

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            blocks = nn.scan(
                nn.remat(Block),
                variable_axes={"params": 0},
                split_rngs={"params": True},
                length=LAYERS,
            )
            return nn.Dense(2, param_dtype=jnp.float64)(blocks()(x, None)[0])

    params = jax.device_get(Net().init(jax.random.key(0), ROWS)["params"])

    def loss(params: Any, rows: Any) -> jax.Array:
        return jnp.mean(jnp.asarray(Net().apply({"params": params}, rows)) ** 2)

    step, got = trained(fused(loss, optax.adam(0.1), group(2)), params)
    assert any("kernel" in name for name in in_rounds(step))
    compare(got, plain(loss, optax.adam(0.1), params))


def test_a_checkpointed_loop_of_a_few_bytes_trains_as_plain_jax(
    group, optimized: None, uncached: None
):
    """XLA:CPU aborts the process at a barrier in a loop of less than 1 KiB that it compiles as a
    small call."""

    def loss(p: Any, x: Any) -> Any:
        return jnp.mean(
            jax.lax.scan(lambda h, _: (jax.checkpoint(body)(p, h), None), x, None, length=3)[0] ** 2
        )

    def body(p: Any, h: Any) -> Any:
        return jnp.tanh(h @ p["w"] + p["b"])

    params = {
        "w": np.linspace(-1, 1, 9, dtype=np.float32).reshape(3, 3),
        "b": np.ones(3, np.float32),
    }
    rows = np.linspace(-1, 1, 12, dtype=np.float32).reshape(4, 3)
    expected = by_plain_jax(loss, optax.sgd(0.1), params, [rows])
    step = fddp.train_step(loss, optax.sgd(0.1), group=group(4))
    state, _ = step(step.init(params), rows)
    close(state.params, expected.params, rtol=1e-5, atol=1e-6)
