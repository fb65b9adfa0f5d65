"""Layers under `lax.scan`: their gradients leave, and are used, slice by slice, and nothing else
changes."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from scanned_net import layer, net, scanned, slices, with_rng
from trees import close
from truth import by_plain_jax

import fddp
from fddp.schedules import ahead_of_time

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


SLICED = {
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
# Of the stack's own rows, one by one, and not of its slices: nothing is taken for a slice that is
# none.
MASKS = np.random.default_rng(2).integers(2, size=(LAYERS, 1, WIDTH, WIDTH))
JOINED = {
    "of rows": lambda p: jnp.concatenate([jnp.asarray(mask, jnp.float64) for mask in MASKS]),
    "of columns": lambda p: jnp.concatenate(
        [p["layers"]["kernel"][..., :2], jnp.ones((LAYERS, WIDTH, 4))], -1
    ),
}
UNDER_EAGER = ("plainly", "in reverse", "rematerialised whole", "beside tied parameters")


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


@pytest.mark.quick(
    "plainly-staged",
    "in reverse-staged",
    "rematerialised whole-staged",
    "twice over the same layers-staged",
    "with random numbers-staged",
    "and read by something else-staged",
    "beside tied parameters-eager",
)
@pytest.mark.steps
@pytest.mark.parametrize(
    ("written", "schedule"),
    [
        *((written, "staged") for written in SLICED),
        *((written, "eager") for written in UNDER_EAGER),
    ],
)
def test_stacked_layers_leave_in_slices_and_are_trained_as_by_plain_jax(
    group, x64, written, schedule
):
    loss = net(SLICED[written])
    optimizer = optax.adamw(0.1)
    step, params = trained(
        fddp.train_step(loss, optimizer, group=group(2), schedule=schedule, bucket_cap_mb=CAP),
        weights(),
    )
    kernels = [name for name in slices(step) if "kernel" in name]
    assert sorted(kernels) == [f"layers/kernel[{at}]" for at in ("0:2", "2:4", "4:5")]
    compare(params, plain(loss, optimizer, weights()))


@pytest.mark.steps
@pytest.mark.parametrize("schedule", ["staged", "eager"])
@pytest.mark.parametrize("name", JOINED)
def test_an_array_that_is_joined_beside_the_layers_is_not_taken_for_their_slices(
    group, x64, name, schedule
):
    def pruned(x: Any, p: Any) -> Any:
        return scanned(x, p["layers"] | {"kernel": p["layers"]["kernel"] * JOINED[name](p)})

    options = {"schedule": schedule, "bucket_cap_mb": CAP}
    step, params = trained(
        fddp.train_step(net(pruned), optax.adamw(0.1), group=group(2), **options), weights()
    )
    assert slices(step)
    compare(params, plain(net(pruned), optax.adamw(0.1), weights()))


@pytest.mark.steps
def test_a_stack_of_no_layers_is_trained_beside_others(group, x64):
    def with_empty_stack(x: Any, p: Any) -> Any:
        return scanned(scanned(x, p["none"]), p["layers"])

    params = weights() | {"none": stack(0)}
    _, got = trained(
        fddp.train_step(
            net(with_empty_stack),
            optax.adamw(0.1),
            group=group(2),
            schedule="staged",
            bucket_cap_mb=CAP,
        ),
        params,
    )
    compare(got, plain(net(with_empty_stack), optax.adamw(0.1), params))


@pytest.mark.steps
def test_slices_become_ready_in_the_order_of_the_loops_rounds(group, x64):
    def order(written: str) -> list[str]:
        step = fddp.train_step(
            net(SLICED[written]),
            optax.sgd(0.1),
            group=group(2),
            schedule="staged",
            bucket_cap_mb=CAP,
        )
        step(step.init(weights()), ROWS)
        return [name for name in slices(step) if "kernel" in name]

    last_first = [f"layers/kernel[{at}]" for at in ("4:5", "2:4", "0:2")]
    assert order("plainly") == last_first
    assert order("in reverse") == last_first[::-1]


@pytest.mark.steps
@pytest.mark.parametrize(
    "options",
    [
        {"accumulation_steps": 2},
        {"find_unused_parameters": True},
        {"skip_nonfinite": True},
        {"hook": fddp.hooks.allreduce()},
        {"broadcast_buffers": False, "donate": False},
    ],
    ids=str,
)
def test_slices_go_with_other_options(group, x64, options):
    loss = net(SLICED["plainly"])
    clipped = optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(0.1, momentum=0.9))
    step, params = trained(
        fddp.train_step(
            loss, clipped, group=group(2), schedule="staged", bucket_cap_mb=CAP, **options
        ),
        weights(),
    )
    assert slices(step)
    compare(
        params, plain(loss, clipped, weights(), replicas=2 * options.get("accumulation_steps", 1))
    )


@pytest.mark.quick("staged")
@pytest.mark.steps
@pytest.mark.parametrize("schedule", ["staged", "eager"])
def test_slices_travel_in_sixteen_bits_as_whole_stacks_do(group, schedule):
    def run(schedule: Any) -> tuple[Any, Any]:
        step = fddp.train_step(
            net(SLICED["plainly"]),
            optax.sgd(0.1),
            group=group(2),
            schedule=schedule,
            bucket_cap_mb=CAP,
            hook=fddp.hooks.bf16(),
        )
        return trained(step, jax.tree.map(np.float32, weights()))

    sliced, got = run(schedule)
    unsliced, expected = run("fused")
    assert slices(sliced) and not slices(unsliced)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-3), got, expected)


@pytest.mark.steps
@pytest.mark.parametrize("schedule", ["staged", "eager"])
def test_several_loops_have_slices_of_their_own(group, x64, schedule):
    params = weights() | {"more": stack(4), "deep": stack(3, 2), "one": stack(1)}

    def inner(x: Any, p: Any) -> Any:
        x = scanned(scanned(x, p["layers"]), p["more"], reverse=True)
        x = jax.lax.scan(lambda x, w: (scanned(x, w), None), x, p["deep"])[
            0
        ]  # the outer loop is cut
        return scanned(x, p["one"])

    loss = net(inner)
    step, got = trained(
        fddp.train_step(loss, optax.sgd(0.1), group=group(2), schedule=schedule, bucket_cap_mb=CAP),
        params,
    )
    kernels = {name for name in slices(step) if "kernel" in name}
    assert {name.partition("/")[0] for name in kernels} == {
        "layers",
        "more",
        "deep",
    }  # a loop of one round is whole
    assert {name for name in kernels if "deep" in name} == {
        f"deep/kernel[{at}]" for at in ("0:1", "1:2", "2:3")
    }
    compare(got, plain(loss, optax.sgd(0.1), params))


@pytest.mark.steps
@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"schedule": "fused"}, "one program has no slices to send early"),
        (
            {"schedule": "staged", "hook": fddp.hooks.adasum()},
            "a hook that weighs leaves is given all of each",
        ),
        ({"schedule": "staged", "bucket_cap_mb": 25}, "all of it fits into a bucket"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_a_stack_travels_whole_where_slices_are_of_no_use(group, options, reason):
    del reason
    step = fddp.train_step(
        net(SLICED["plainly"]), optax.sgd(0.1), group=group(2), **({"bucket_cap_mb": CAP} | options)
    )
    step(step.init(weights()), ROWS)
    assert not slices(step)


@pytest.mark.steps
def test_an_update_that_mixes_layers_waits_for_all_slices(group, x64):
    loss = net(SLICED["plainly"])
    optimizer = optax.adafactor(0.1, min_dim_size_to_factor=2)
    step, params = trained(
        fddp.train_step(loss, optimizer, group=group(2), schedule="staged", bucket_cap_mb=CAP),
        weights(),
    )
    assert slices(step)
    compare(params, plain(loss, optimizer, weights()))


@pytest.mark.steps
def test_an_update_may_print_the_gradient_of_a_single_layer(group, capfd):
    def printing(updates: Any, params: Any) -> Any:
        del params
        jax.debug.print("layer {}", jnp.sum(updates["layers"][0]))
        return updates

    optimizer = optax.chain(optax.stateless(printing), optax.sgd(0.5))
    loss = lambda p, x: jnp.sum(jax.lax.scan(lambda x, w: (x + w, None), x, p["layers"])[0])  # noqa: E731
    step = fddp.train_step(loss, optimizer, group=group(1), schedule="staged", bucket_cap_mb=0)
    step(step.init({"layers": jnp.ones((4, 3))}), jnp.ones((2, 3)))
    jax.effects_barrier()
    assert capfd.readouterr().out == "layer 6.0\n"


@pytest.mark.quick("staged")
@pytest.mark.steps
@pytest.mark.parametrize("schedule", ["staged", "eager"])
def test_a_state_is_whole_whenever_somebody_looks(group, x64, schedule):
    loss = net(SLICED["plainly"])
    step = fddp.train_step(
        loss, optax.adam(0.1), group=group(2), schedule=schedule, bucket_cap_mb=CAP, donate=False
    )
    states = [step.init(weights())]
    for k in range(4):
        states.append(step(states[-1], ROWS + k)[0])
        if k == 1:  # a user may change it
            doubled = jax.tree.map(lambda x: 2 * x, states[-1].params)
            states[-1] = states[-1]._replace(params=doubled)
    compare(
        states[2].params, jax.tree.map(lambda x: 2 * x, plain(loss, optax.adam(0.1), weights(), 2))
    )
    shapes = [[x.shape for x in jax.tree.leaves(state)] for state in states]
    assert all(shape == shapes[0] for shape in shapes)
    resumed, _ = step(states[3], ROWS + 3)
    compare(resumed.params, states[4].params)


@pytest.mark.steps
def test_no_sync_adds_up_whole_stacks(group, x64):
    loss = net(SLICED["plainly"])
    step = fddp.train_step(
        loss, optax.sgd(0.1), group=group(2), schedule="staged", bucket_cap_mb=CAP
    )
    state = step.init(weights())
    for _ in range(2):
        state, _ = step.no_sync(state, ROWS)
        state, _ = step(state, ROWS)
    assert slices(step)
    compare(
        jax.device_get(state.params),
        plain(lambda p, rows: loss(p, ROWS), optax.sgd(0.1), weights(), 2),
    )


@pytest.mark.steps
def test_flax_layers_under_nn_scan_leave_in_slices(group, x64):
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

    params = Net().init(jax.random.key(0), ROWS)["params"]

    def loss(params: Any, rows: Any) -> jax.Array:
        return jnp.mean(jnp.asarray(Net().apply({"params": params}, rows)) ** 2)

    step, got = trained(
        fddp.train_step(
            loss, optax.adam(0.1), group=group(2), schedule="staged", bucket_cap_mb=CAP
        ),
        jax.device_get(params),
    )
    assert any("kernel[" in name for name in slices(step))
    compare(got, plain(loss, optax.adam(0.1), params))


@pytest.mark.steps
def test_equal_rounds_share_a_program(group, x64):
    def programs(layers: int) -> tuple[int, int]:
        step = fddp.train_step(
            net(SLICED["plainly"]),
            optax.sgd(0.1),
            group=group(2),
            schedule="staged",
            bucket_cap_mb=CAP / 2,
        )
        state = step.init(weights() | {"layers": stack(layers)})
        state, _ = step(state, ROWS)
        runner = step.tasks(state, ROWS)
        assert len(runner.messages) > layers - 1
        return len(COMPILED), len(TRACED)

    COMPILED: list[str] = []
    TRACED: list[str] = []
    trace = ahead_of_time.program_of
    compile_ = jax.stages.Lowered.compile
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            jax.stages.Lowered,
            "compile",
            lambda self, *a, **k: (COMPILED.append(""), compile_(self, *a, **k))[1],
        )
        patch.setattr(
            ahead_of_time,
            "program_of",
            lambda _, task, *more: (TRACED.append(""), trace(_, task, *more))[1],
        )
        programs(4)
        COMPILED.clear()
        TRACED.clear()
        few = programs(9)
        COMPILED.clear()
        TRACED.clear()
        assert programs(14) == few


@pytest.mark.parametrize("schedule", ["fused", "staged"])
def test_a_checkpointed_loop_of_a_few_bytes_trains_as_plain_jax(
    group, optimized: None, uncached: None, schedule: Any
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
    step = fddp.train_step(loss, optax.sgd(0.1), group=group(4), schedule=schedule)
    state, _ = step(step.init(params), rows)
    close(state.params, expected.params, rtol=1e-5, atol=1e-6)
