"""Stacked layers are gathered for each pass, one after the other, in the loop that reads them."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from scanned_net import layer, net, slices, with_rng
from test_scanned_shards import (
    CAP,
    INNER,
    LAYERS,
    SLICES,
    WIDTH,
    plain,
    trained,
    weights,
)
from trees import close

import fddp
from fddp.hlo import parse, sends, work

pytestmark = pytest.mark.steps

Groups = Callable[[int], fddp.Group]
FEW = np.random.default_rng(7).normal(size=(24, WIDTH))
STACK = LAYERS * WIDTH * WIDTH


def by_copies(x: Any, p: Any) -> Any:
    """Cheap copies of the weights are made before the loop, and in it for the backward loop."""
    scaled = {"kernel": 2 * p["layers"]["kernel"], "bias": p["layers"]["bias"]}
    return jax.lax.scan(
        lambda x, w: layer(x, {"kernel": jnp.negative(w["kernel"]), "bias": w["bias"]}), x, scaled
    )[0]


def in_turn(x: Any, p: Any) -> Any:
    """Two loops over the same layers."""
    return jax.lax.scan(layer, jax.lax.scan(layer, x, p["layers"])[0], p["layers"])[0]


def in_pairs(x: Any, p: Any) -> Any:
    return jax.lax.scan(layer, x, p["layers"], unroll=2)[0]


ALONE = {
    **INNER,
    "with random numbers": with_rng,
    "by copies": by_copies,
    "twice": in_turn,
    "unrolled": in_pairs,
}


def shared(
    group: fddp.Group, inner: Any, optimizer: Any, schedule: Any = "fused", **options: Any
) -> fddp.TrainStep:
    settings = {"shard": "state", "reshard_after_forward": True, "bucket_cap_mb": CAP} | options
    return fddp.train_step(net(inner), optimizer, group=group, schedule=schedule, **settings)


def gathering_loops(module: Any) -> int:
    """The number of loops with both gathers and products."""
    loops = [schedule.lines for schedule in module.schedules() if schedule.loops]
    gather = [
        lines_of_loop
        for lines_of_loop in loops
        if any(sends(module, line) and "gather" in line.opcode for line, _ in lines_of_loop)
    ]
    return sum(any(work(module, line, body) for line, body in loop) for loop in gather)


def largest(module: Any) -> int:
    """The largest number of elements of an array in a program."""
    lines = (line for computation in module.computations.values() for line in computation.values())
    return max(x.size for line in lines for x in line.result)


DEFAULT = [(3, "rematerialised whole"), (8, "by copies")]
WIDE = [
    pytest.param(n, inner, marks=pytest.mark.slow)
    for n in (2, 3, 8)
    for inner in ALONE
    if (n, inner) not in DEFAULT
]


@pytest.mark.quick("8-by copies")
@pytest.mark.parametrize(("n", "inner"), [*DEFAULT, *WIDE])
def test_layers_that_a_loop_gathers_are_trained_as_by_plain_jax(
    group: Groups, x64: None, n: int, inner: str
):
    step = shared(group(n), ALONE[inner], optax.adamw(0.05))
    state = fddp.whole(trained(step, 2), group=group(n))
    assert max(bucket.rounds for bucket in step.plan.buckets) == LAYERS
    close((state.params, state.opt_state), plain(net(ALONE[inner]), optax.adamw(0.05), 2))


@pytest.mark.parametrize(
    "inner",
    ["by copies", *(pytest.param(x, marks=pytest.mark.slow) for x in ALONE if x != "by copies")],
)
def test_each_loop_gathers_and_no_array_of_the_program_is_as_large_as_the_stack(
    group: Groups, inner: str
):
    step = shared(group(4), ALONE[inner], optax.adam(0.05))
    module = program(step)
    # The gradients of two loops over the same layers are stacked, and added behind the second one.
    assert (largest(module) < STACK) == (inner != "twice")
    # A loop that is rematerialised as a whole runs once more.
    assert gathering_loops(module) == {"twice": 4, "rematerialised whole": 3}.get(inner, 2)


def program(step: fddp.TrainStep) -> Any:
    state = step.init(jax.tree.map(np.float32, weights()))
    return parse(step.lower(state, np.float32(FEW)).compile().as_text() or "")


def test_each_loop_brings_every_layer_once(group: Groups, x64: None):
    step = shared(group(4), ALONE["plainly"], optax.sgd(0.05))
    _, info = step(step.init(weights()), FEW)
    (at,) = (k for k, bucket in enumerate(step.plan.buckets) if bucket.rounds > 1)
    part = -(-WIDTH * WIDTH // 4) * 8  # of a layer in 64 bits
    assert (
        int(info.sent[at]) == 3 * 3 * LAYERS * part
    )  # two gathers and a scatter, each to three others


def deep(x: Any, p: Any) -> Any:
    """Loops of loops: the outer one has the rows."""
    pairs = jax.tree.map(lambda w: jnp.reshape(w, (LAYERS, 1, *w.shape[1:])), p["layers"])
    return jax.lax.scan(lambda x, two: (jax.lax.scan(layer, x, two)[0], None), x, pairs)[0]


def also_read(x: Any, p: Any) -> Any:
    return INNER["plainly"](x, p) + jnp.mean(p["layers"]["kernel"] ** 2)


def every_other(x: Any, p: Any) -> Any:
    return jax.lax.scan(layer, x, jax.tree.map(lambda w: w[::2], p["layers"]))[0]


@pytest.mark.parametrize(
    ("inner", "loops"),
    [
        (also_read, 0),
        *(pytest.param(*x, marks=pytest.mark.slow) for x in ((deep, 2), (every_other, 0))),
    ],
)
def test_a_stack_that_more_reads_than_a_loop_over_its_layers_comes_whole(
    group: Groups, x64: None, inner: Any, loops: int
):
    state = fddp.whole(trained(shared(group(3), inner, optax.adamw(0.05)), 2), group=group(3))
    close(state.params, plain(net(inner), optax.adamw(0.05), 2)[0])
    assert gathering_loops(program(shared(group(3), inner, optax.adamw(0.05)))) == loops


def test_a_step_with_other_options_gathers_as_they_say(group: Groups, x64: None):
    def bytes_sent(step: fddp.TrainStep) -> int:
        _, info = step(step.init(weights()), FEW)
        return int(info.sent.sum())

    def resharded(reshard: bool) -> fddp.TrainStep:
        return shared(group(2), ALONE["plainly"], optax.sgd(0.05), reshard_after_forward=reshard)

    once = bytes_sent(resharded(False))
    twice = bytes_sent(resharded(True))
    assert once < twice
    assert bytes_sent(resharded(True).with_options(reshard_after_forward=False)) == once
    assert bytes_sent(resharded(False).with_options(reshard_after_forward=True)) == twice


MORE = [
    {"find_unused_parameters": True},
    {"skip_nonfinite": True},
    {"hook": fddp.hooks.bf16()},
    {"donate": False},
]


@pytest.mark.parametrize(
    ("schedule", "options"),
    [
        ("fused", {"accumulation_steps": 2}),
        *(
            pytest.param("staged", more_options, marks=pytest.mark.slow)
            for more_options in ({"accumulation_steps": 2}, *MORE)
        ),
        *(pytest.param("fused", more_options, marks=pytest.mark.slow) for more_options in MORE),
    ],
    ids=str,
)
def test_options_do_what_they_do_without(
    group: Groups, x64: None, schedule: str, options: dict[str, Any]
):
    results = []
    for reshard in (True, False):
        clipped = optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(0.05))
        step = shared(
            group(2), ALONE["plainly"], clipped, schedule, reshard_after_forward=reshard, **options
        )
        results.append(fddp.whole(trained(step, 2)))
    close(*results)


@pytest.mark.parametrize(
    ("n", "inner"),
    [
        (2, "plainly"),
        *(pytest.param(n, inner, marks=pytest.mark.slow) for n in (3, 8) for inner in ALONE),
    ],
)
def test_a_schedule_that_cuts_the_loop_gathers_slices(group: Groups, x64: None, n: int, inner: str):
    step = shared(group(n), ALONE[inner], optax.adamw(0.05), "staged")
    state = fddp.whole(trained(step, 2), group=group(n))
    assert sorted(slices(step)) == SLICES
    close((state.params, state.opt_state), plain(net(ALONE[inner]), optax.adamw(0.05), 2))


def test_a_slice_is_gathered_behind_the_one_before_it_for_each_pass(group: Groups, x64: None):
    step = shared(group(2), ALONE["plainly"], optax.sgd(0.05), "staged")
    state, info = step(step.init(weights()), FEW)
    nbytes = {
        bucket.names: int(n) for bucket, n in zip(step.plan.buckets, info.sent) if bucket.slice
    }
    layer = -(-WIDTH * WIDTH // 2) * 8
    # The last slice stays, as it is read last and first.
    assert nbytes == {(SLICES[2],): 2 * layer, (SLICES[1],): 6 * layer, (SLICES[0],): 6 * layer}
    names = [task.name for task in step.tasks(state, FEW).tasks]
    assert sum(name.startswith("all_gather") for name in names) == 6
    assert names.index("bucket 0") < names.index("all_gather 5")
