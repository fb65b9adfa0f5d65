"""Layers under `lax.scan` in shards: slices travel, and are updated, by themselves, and nothing
else changes."""

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from scanned_net import layer, net, scanned, slices
from trees import close
from truth import by_plain_jax

import fddp

pytestmark = pytest.mark.steps

Groups = Callable[[int], fddp.Group]
LAYERS = 5
WIDTH = 23  # neither a layer's 529 elements nor the bias are divided by 2, 3 or 8 replicas
CAP = 0.0085  # MiB: two layers of 64 bits
DRAW = np.random.default_rng(7)
ROWS = DRAW.normal(size=(48, WIDTH))
SLICES = ["layers/kernel[0:2]", "layers/kernel[2:4]", "layers/kernel[4:5]"]


def weights() -> dict[str, Any]:
    make = np.random.default_rng(1).normal
    layers = {
        "bias": make(size=(LAYERS, WIDTH)) / 9,
        "kernel": make(size=(LAYERS, WIDTH, WIDTH)) / 6,
    }
    return {
        "in": make(size=(WIDTH, WIDTH)) / 5,
        "layers": layers,
        "out": make(size=(WIDTH, 2)),
        "unused": make(size=3),
    }


INNER: dict[str, Callable[[Any, Any], Any]] = {
    "plainly": lambda x, p: scanned(x, p["layers"]),
    "in reverse": lambda x, p: scanned(x, p["layers"], reverse=True),
    "rematerialised whole": lambda x, p: jax.checkpoint(scanned)(x, p["layers"]),
    "each rematerialised": lambda x, p: jax.lax.scan(jax.checkpoint(layer), x, p["layers"])[0],
    "beside tied parameters": lambda x, p: jax.lax.scan(
        lambda x, w: layer(x @ p["in"], w), x, p["layers"]
    )[0],
}
OPTIMIZERS: dict[str, Callable[[], optax.GradientTransformation]] = {
    "adamw": lambda: optax.adamw(0.05),
    "clipped": lambda: optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(0.05)),
    "adafactor": lambda: optax.adafactor(0.05, min_dim_size_to_factor=2),
    "muon": lambda: optax.contrib.muon(0.05),
}


def trained(step: fddp.TrainStep, steps: int = 3) -> fddp.TrainState:
    state = step.init(weights())
    for k in range(steps):
        state, _ = step(state, ROWS + k)
    return state


def plain(loss: Any, optimizer: optax.GradientTransformation, steps: int = 3) -> tuple[Any, Any]:
    return by_plain_jax(loss, optimizer, weights(), [ROWS + k for k in range(steps)])[:2]


def case(
    n: int,
    shard: str,
    schedule: str,
    inner: str = "plainly",
    optimizer: str = "adamw",
    slow: bool = False,
    **options: Any,
) -> Any:
    name = " ".join([f"{n}", shard, schedule, inner, optimizer, *options])
    marks = [pytest.mark.slow] if slow else []
    return pytest.param(n, shard, schedule, inner, optimizer, options, id=name, marks=marks)


@pytest.mark.quick(
    "2 state eager plainly clipped accumulation_steps",
    "3 optimizer staged beside tied parameters adafactor",
    "8 state eager in reverse clipped",
    "3 state staged each rematerialised adamw",
)
@pytest.mark.parametrize(
    ("n", "shard", "schedule", "inner", "optimizer", "options"),
    [
        case(2, "optimizer", "staged"),
        case(2, "state", "staged", optimizer="clipped", slow=True),
        case(2, "state", "eager", slow=True),
        case(8, "optimizer", "staged", "in reverse", "clipped", slow=True),
        case(8, "state", "eager", "in reverse", "clipped"),
        case(3, "optimizer", "staged", "rematerialised whole"),
        case(3, "state", "eager", "rematerialised whole", slow=True),
        case(3, "state", "staged", "each rematerialised"),
        case(3, "optimizer", "staged", "beside tied parameters", "adafactor"),
        case(2, "state", "eager", "beside tied parameters", "muon"),
        case(3, "optimizer", "staged", accumulation_steps=2, slow=True),
        case(2, "state", "eager", optimizer="clipped", accumulation_steps=3),
        case(2, "optimizer", "staged", optimizer="clipped", skip_nonfinite=True, slow=True),
        case(2, "state", "staged", "each rematerialised", find_unused_parameters=True),
        case(1, "state", "staged", slow=True),
    ],
)
def test_stacked_layers_in_shards_travel_in_slices_and_are_trained_as_by_plain_jax(
    group: Groups,
    x64: None,
    n: int,
    shard: Any,
    schedule: Any,
    inner: str,
    optimizer: str,
    options: Any,
):
    loss = net(INNER[inner])
    make = OPTIMIZERS[optimizer]
    step = fddp.train_step(
        loss, make(), group=group(n), shard=shard, schedule=schedule, bucket_cap_mb=CAP, **options
    )
    state = fddp.whole(trained(step), group=group(n))
    assert sorted(slices(step)) == SLICES
    params, opt_state = plain(loss, make())
    if (
        "find_unused_parameters" in options
    ):  # such a leaf stays, where plain JAX lets its weight decay
        params["unused"] = weights()["unused"]
    close(state.params, params)
    if "find_unused_parameters" not in options:
        close(state.opt_state, opt_state)


@pytest.mark.quick("3-state")
@pytest.mark.parametrize(("n", "shard"), [(8, "optimizer"), (3, "state")])
def test_a_stack_that_is_cut_layer_by_layer_is_trained_in_one_program_too(
    group: Groups, x64: None, n: int, shard: Any
):
    loss = net(INNER["plainly"])
    step = fddp.train_step(
        loss, optax.adamw(0.05), group=group(n), shard=shard, schedule="fused", bucket_cap_mb=CAP
    )
    state = fddp.whole(trained(step), group=group(n))
    assert not slices(step)
    close((state.params, state.opt_state), plain(loss, optax.adamw(0.05)))


@pytest.mark.parametrize(
    ("n", "options", "reason"),
    [
        (2, {"bucket_cap_mb": 25}, "all of it fits into a bucket"),
        (8, {"width": 15}, "parts of a layer would be tiny"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_a_stack_is_scattered_whole_where_slices_are_of_no_use(
    group: Groups, n: int, options: Any, reason: str
):
    del reason
    width = options.pop("width", WIDTH)
    params = {"layers": {"bias": np.zeros((5, width)), "kernel": np.ones((5, width, width))}}
    options = {"bucket_cap_mb": CAP / 2, "schedule": "staged"} | options
    step = fddp.train_step(
        lambda p, x: jnp.mean(scanned(x, p["layers"])),
        optax.adam(0.1),
        group=group(n),
        shard="optimizer",
        **options,
    )
    step(step.init(jax.tree.map(np.float32, params)), np.ones((8, width), np.float32))
    assert not slices(step)


@pytest.mark.parametrize("shard", [pytest.param("optimizer", marks=pytest.mark.slow), "state"])
def test_slices_are_scattered_by_a_hook_that_sums_each_element_by_itself(
    group: Groups, x64: None, shard: Any
):
    loss = net(INNER["plainly"])
    optimizer = optax.sgd(0.001, momentum=0.9)
    options: dict[str, Any] = {"shard": shard, "schedule": "staged", "bucket_cap_mb": CAP}

    def params(hook: fddp.Hook) -> Any:
        step = fddp.train_step(loss, optimizer, group=group(2), hook=hook, **options)
        gathered = fddp.whole(trained(step), group=group(2)).params
        assert slices(step) == SLICES[::-1]
        return gathered

    exact = params(fddp.hooks.allreduce())
    close(exact, plain(loss, optimizer)[0])
    # bfloat16 keeps 8 bits of a gradient.
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, atol=2**-8), params(fddp.hooks.bf16()), exact
    )


def listed(group: fddp.Group, shard: Any, schedule: Any) -> tuple[fddp.TrainStep, Any]:
    step = fddp.train_step(
        net(INNER["plainly"]),
        optax.adam(0.1),
        group=group,
        shard=shard,
        schedule=schedule,
        bucket_cap_mb=CAP,
    )
    state, _ = step(step.init(weights()), ROWS)
    return step, step.tasks(state, ROWS).tasks


def test_slices_leave_while_the_loop_goes_on_and_come_back_while_others_are_updated(
    group: Groups, x64: None
):
    step, tasks = listed(group(2), "optimizer", "staged")
    assert slices(step) == SLICES[::-1]
    names = [task.name for task in tasks]
    for k in range(3):
        later_names = names[names.index(f"bucket {k}") :]
        assert any(
            name.startswith("stage") for name in later_names
        )  # the loop, or a stage before it
        assert later_names.index(f"gather {k}") < later_names.index(f"gather {k + 1}")
    gathered = [names.index(f"gather {k}") for k in range(4)]
    assert all(any(name.startswith("update") for name in names[a:b]) for a, b in pairwise(gathered))
    assert {task.reduction.contents for task in tasks if task.name in ("bucket 1", "gather 1")} == {
        SLICES[1]
    }


@pytest.mark.quick("eager")
@pytest.mark.parametrize("schedule", ["staged", "eager"])
def test_a_round_of_the_forward_loop_waits_for_its_own_layers_alone(
    group: Groups, x64: None, schedule: str
):
    step, tasks = listed(group(2), "state", schedule)
    gathers = [task for task in tasks if task.name.startswith("gather")]
    bucket = {
        task.writes[0].number: step.plan.buckets[int(task.name.split()[1])] for task in gathers
    }
    waits = [
        [bucket[value.number].names for value in task.reads if value.kind == "whole"]
        for task in tasks
        if task.name.startswith("stage")
    ]
    # The first weights, then layer by layer; the last weights came with the first.
    assert [
        name for round_names in waits for names in round_names for name in names if "kernel" in name
    ] == SLICES


@pytest.mark.quick("state-eager")
@pytest.mark.parametrize(
    ("shard", "schedule"), [("optimizer", "staged"), ("state", "staged"), ("state", "eager")]
)
def test_each_slice_is_written_into_memory_that_nobody_reads_later(
    group: Groups, x64: None, shard: str, schedule: str
):
    _, tasks = listed(group(2), shard, schedule)
    updates = [task for task in tasks if task.kind == "update"]
    chains = [task for task in updates if any(value.kind == "written" for value in task.writes)]
    assert len(chains) == 2  # of three slices the last one makes the new shards
    for task in chains:
        for value in (value for value in task.reads if value.kind in ("shards", "written")):
            readers = [reader.name for reader in tasks if value in reader.reads]
            assert readers[-1] == task.name, value


@pytest.mark.parametrize("shard", [pytest.param("optimizer", marks=pytest.mark.slow), "state"])
def test_a_checkpoint_of_a_stack_goes_on_on_other_numbers_of_replicas_and_whole(
    group: Groups, tmp_path: Path, x64: None, shard: Any
):
    def make(n: int, shard: Any) -> fddp.TrainStep:
        return fddp.train_step(
            net(INNER["plainly"]),
            optax.adamw(0.05),
            group=group(n),
            shard=shard,
            schedule="staged",
            bucket_cap_mb=CAP,
        )

    step = make(3, shard)
    state = trained(step, 1)
    with fddp.Checkpoints(tmp_path / "saved", step, every=1) as checkpoints:
        checkpoints.save(state)
    for n, other_shard in ((2, shard), (3, None)):
        step = make(n, other_shard)
        with fddp.Checkpoints(tmp_path / "saved", step, every=1) as checkpoints:
            state, _ = checkpoints.restore(step.init(weights()))
        state, _ = step(state, ROWS + 1)
        close(
            fddp.whole(state, group=group(n)).params,
            plain(net(INNER["plainly"]), optax.adamw(0.05), 2)[0],
        )


def test_what_an_optimizer_keeps_of_a_stack_lies_as_the_stack_does(group: Groups):
    step = fddp.train_step(net(INNER["plainly"]), optax.adam(0.1), group=group(2), shard="state")
    state = step.init(jax.tree.map(np.float32, weights()))
    kernels = [
        tree["layers"]["kernel"]
        for tree in (state.params, state.opt_state[0].mu, state.opt_state[0].nu)
    ]
    assert [x.parts.shape for x in kernels] == [(2 * LAYERS, 265)] * 3
    assert state.params["layers"]["bias"].parts.shape == (
        2 * 58,
    )  # its layers are too small to be cut each
