"""Layers under `lax.scan` in shards train as by plain JAX."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
from scanned_net import layer, net, overlapping, scanned
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
    inner: str = "plainly",
    optimizer: str = "adamw",
    slow: bool = False,
    **options: Any,
) -> Any:
    name = " ".join([f"{n}", shard, inner, optimizer, *options])
    marks = [pytest.mark.slow] if slow else []
    return pytest.param(n, shard, inner, optimizer, options, id=name, marks=marks)


@pytest.mark.quick(
    "2 state plainly clipped accumulation_steps",
    "3 optimizer beside tied parameters adafactor",
    "8 state in reverse clipped",
    "3 state each rematerialised adamw",
)
@pytest.mark.parametrize(
    ("n", "shard", "inner", "optimizer", "options"),
    [
        case(2, "optimizer"),
        case(2, "state", optimizer="clipped", slow=True),
        case(2, "state", slow=True),
        case(8, "optimizer", "in reverse", "clipped", slow=True),
        case(8, "state", "in reverse", "clipped"),
        case(3, "optimizer", "rematerialised whole"),
        case(3, "state", "rematerialised whole", slow=True),
        case(3, "state", "each rematerialised"),
        case(3, "optimizer", "beside tied parameters", "adafactor"),
        case(2, "state", "beside tied parameters", "muon"),
        case(3, "optimizer", accumulation_steps=2, slow=True),
        case(2, "state", optimizer="clipped", accumulation_steps=3),
        case(2, "optimizer", optimizer="clipped", skip_nonfinite=True, slow=True),
        case(2, "state", "each rematerialised", find_unused_parameters=True),
        case(1, "state", slow=True),
    ],
)
def test_stacked_layers_in_shards_are_trained_as_by_plain_jax(
    group: Groups,
    x64: None,
    n: int,
    shard: Any,
    inner: str,
    optimizer: str,
    options: Any,
):
    loss = net(INNER[inner])
    make = OPTIMIZERS[optimizer]
    replicas = overlapping(group(n))
    step = fddp.train_step(loss, make(), group=replicas, shard=shard, bucket_cap_mb=CAP, **options)
    state = fddp.whole(trained(step), group=replicas)
    params, opt_state = plain(loss, make())
    if (
        "find_unused_parameters" in options
    ):  # such a leaf stays, where plain JAX lets its weight decay
        params["unused"] = weights()["unused"]
    close(state.params, params)
    if "find_unused_parameters" not in options:
        close(state.opt_state, opt_state)


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
