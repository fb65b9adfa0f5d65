"""A GPT in stages trains as on one device; its devices hold a stage each, and hand activations to
their neighbours."""

from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from device_groups import device_groups
from truth import by_plain_jax
from workers.trainings import Result, relative_error

import fddp
from models import gpt, pipeline
from models.tensor_parallel import size_mib, two_axes

pytestmark = pytest.mark.steps

ROOT = Path(__file__).parents[1]
MODEL = gpt.PRESETS["tiny"].clone(
    layers=4, width=16, hidden=24, context=8, dtype=jnp.float64, param_dtype=jnp.float64
)
ROWS = 12
OPTIMIZER = optax.adamw(1e-2)
BATCHES = [gpt.batch(MODEL, ROWS, seed=number) for number in range(3)]


def forms(model: gpt.GPT) -> Any:
    return jax.eval_shape(lambda key: gpt.init(model, key, BATCHES[0])[0], jax.random.key(0))


@cache
def start() -> Any:
    random = np.random.default_rng(0)
    return jax.tree.map(lambda x: random.normal(scale=0.3, size=x.shape), forms(MODEL))


def in_stages(replicas: int, stages: int, micro_batches: int) -> tuple[Any, Any]:
    """A step, and its first state."""
    mesh = two_axes(replicas, stages, "stage")
    loss = pipeline.loss_fn(MODEL, micro_batches)
    step = fddp.train_step(loss, OPTIMIZER, group=fddp.mesh_group(mesh), has_aux=True, donate=False)
    return step, step.init(pipeline.placed(pipeline.in_stages(start(), stages), mesh))


@cache
def trained(replicas: int, stages: int, micro_batches: int) -> tuple[Any, Any, Any]:
    """A step, its state after some calls, and their losses."""
    step, state = in_stages(replicas, stages, micro_batches)
    losses = []
    for batch in BATCHES:
        state, info = step(state, batch)
        losses.append(info.loss)
    return step, state, jax.device_get(losses)


### The training


@cache
def by_one_device() -> Result:
    """The result of plain JAX, on one device and without stages."""
    loss = gpt.loss_fn(MODEL)
    result = by_plain_jax(lambda params, batch: loss(params, batch)[0], OPTIMIZER, start(), BATCHES)
    return jax.device_get(Result(result.params, None, result.losses))


def by_layers(params: Any) -> Any:
    """Stages taken apart: layer i is number i of all, stage after stage."""
    params = jax.device_get(params)
    flat = jax.tree.map(lambda x: x.reshape(MODEL.layers, *x.shape[2:]), params["stages"])
    layers = {f"layer_{i}": jax.tree.map(lambda x, i=i: x[i], flat) for i in range(MODEL.layers)}
    return {"embed": params["embed"], "norm": params["norm"], **layers}


@pytest.mark.quick("2-2-3")
@pytest.mark.parametrize(
    ("replicas", "stages", "micro_batches"),
    [(2, 2, 3), (1, 4, 2), pytest.param(4, 1, 3, marks=pytest.mark.slow)],
)
def test_replicas_in_stages_end_where_one_device_does(x64, replicas, stages, micro_batches):
    _, state, losses = trained(replicas, stages, micro_batches)
    assert relative_error(Result(by_layers(state.params), None, losses), by_one_device()) <= 1e-9


### The program


@cache
def audited() -> fddp.Audit:
    """The program of two replicas in two stages."""
    step, state, _ = trained(2, 2, 3)
    return fddp.audit(step, state, BATCHES[0])


def test_each_device_holds_the_layers_of_its_stage_and_their_moments(x64):
    _, state, _ = trained(2, 2, 3)
    moments = state.opt_state[0]
    for tree in (state.params, moments.mu, moments.nu):
        for x in jax.tree.leaves(tree["stages"]):
            stage_of = {part.device.id: part.index[0] for part in x.addressable_shards}
            assert stage_of == {0: slice(0, 1), 1: slice(1, 2), 2: slice(0, 1), 3: slice(1, 2)}
            assert {part.data.shape for part in x.addressable_shards} == {(1, 2, *x.shape[2:])}
    total_mib, local_mib = size_mib(state.params)
    assert local_mib < 0.51 * total_mib


def test_a_tick_sends_one_micro_batch_from_each_stage_to_the_next_and_nothing_else(x64):
    in_ticks = [x for x in audited().collectives if x.loops]
    assert {x.kind for x in in_ticks} == {"collective-permute"}
    forward = ((0, 1), (2, 3))
    backward = ((1, 0), (3, 2))
    assert sorted(device_groups(x.groups) for x in in_ticks) == [forward, backward]
    rows = ROWS // 2 // 3
    assert {array.dims for x in in_ticks for array in x.arrays} == {
        (1, rows, MODEL.context, MODEL.width)
    }


def test_gradients_are_summed_over_the_devices_that_hold_the_same_stage(x64):
    _, state, _ = trained(2, 2, 3)
    among_replicas = [
        x for x in audited().collectives if device_groups(x.groups) == ((0, 2), (1, 3))
    ]
    loss_accuracy_and_weight = 3
    local_size = sum(x.addressable_shards[0].data.size for x in jax.tree.leaves(state.params))
    assert [array.dims for x in among_replicas for array in x.arrays] == [
        (local_size + loss_accuracy_and_weight,)
    ]


@pytest.mark.parametrize(("stages", "micro_batches"), [(1, 1), (1, 5), (2, 1), (4, 8), (3, 2)])
def test_the_bubble_is_what_is_left_when_every_stage_has_seen_every_micro_batch(
    stages, micro_batches
):
    table = np.zeros((micro_batches + stages - 1, stages), bool)
    for number in range(micro_batches):
        for stage in range(stages):
            table[number + stage, stage] = True
    assert table.any(1).all()
    assert pipeline.bubble(stages, micro_batches) == pytest.approx(1 - table.mean(), abs=1e-12)


### Errors


@pytest.mark.parametrize(
    ("stages", "vocabulary", "message"),
    [
        (
            3,
            255,
            "stages=3, and 4 layers cannot be dealt out equally to so many: take a divisor of 4",
        ),
        (
            4,
            254,
            "stages=4, and 254 tokens of the vocabulary cannot be dealt out .*: take a divisor of "
            "254",
        ),
        (0, 256, "stages=0, and 4 layers cannot"),
    ],
)
def test_layers_and_tokens_that_stages_do_not_divide_are_an_error(x64, stages, vocabulary, message):
    with pytest.raises(ValueError, match=message):
        pipeline.in_stages(forms(MODEL.clone(vocabulary=vocabulary)), stages)


@pytest.mark.parametrize("micro_batches", [4, 0])
def test_rows_that_micro_batches_do_not_divide_are_an_error(x64, micro_batches):
    step, state = in_stages(2, 2, micro_batches)
    message = (
        rf"micro_batches={micro_batches}, and 6 rows of a replica cannot be cut .* take a divisor "
        rf"of the rows"
    )
    with pytest.raises(ValueError, match=message):
        step(state, BATCHES[0])
