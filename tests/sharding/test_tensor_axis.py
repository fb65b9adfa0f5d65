"""Replicas of several devices share a state: each replica holds its share of each device's parts.

Every claim is held against plain JAX on the joined batch, in float64.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from device_groups import device_groups
from jax.sharding import NamedSharding, PartitionSpec
from processes import launch
from trees import close
from truth import by_plain_jax
from workers import parts_in_shards

import fddp
from fddp.analysis.measure import bytes_of
from fddp.hlo import find_collectives, parse
from models.tensor_parallel import two_axes

pytestmark = pytest.mark.steps

DRAW = np.random.default_rng(11)
ROWS = DRAW.normal(size=(16, 3))
PARAMS: dict[str, Any] = {
    "columns": DRAW.normal(size=(3, 8)),
    "rows": DRAW.normal(size=(8, 5)),
    "stack": DRAW.normal(size=(3, 8, 40)) / 6,
    "bias": DRAW.normal(size=7),
    "scale": DRAW.normal(size=()),
    "frozen": np.arange(4),
}
WHERE = {
    "columns": PartitionSpec(None, "part"),
    "rows": PartitionSpec("part"),
    "stack": PartitionSpec(None, "part"),
    "frozen": PartitionSpec("part"),
}
OTHER = {
    "rows": PartitionSpec(),
    "stack": PartitionSpec(None, None, "part"),
    "columns": PartitionSpec(None, "part"),
}
CLIPPED = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(0.05))


def loss_fn(p: Any, x: Any) -> Any:
    x = jnp.tanh(x @ p["columns"])
    for w in p["stack"]:
        x = jnp.tanh(x @ w @ w.T)
    x = x @ p["rows"]
    return p["scale"] * jnp.mean(x**2) + jnp.mean(
        (p["bias"] - jnp.sum(x, axis=1, keepdims=True)) ** 2
    )


def placed(group: fddp.Group, params: Any, where: Any) -> Any:
    mesh = group.placement.place(np.zeros(()), PartitionSpec()).sharding.mesh
    return {
        name: jax.device_put(x, NamedSharding(mesh, where.get(name, PartitionSpec())))
        for name, x in params.items()
    }


def first_step(
    shape: tuple[int, int], optimizer: Any = CLIPPED, where: Any = None, **options: Any
) -> Any:
    """A step over (replicas, devices of each), and its first state."""
    group = fddp.mesh_group(two_axes(*shape))
    step = fddp.train_step(loss_fn, optimizer, group=group, **options)
    return step, step.init(placed(group, PARAMS, WHERE if where is None else where))


def trained(state: Any, call: Callable[..., Any]) -> Any:
    for k in range(3):
        state, _ = call(state, ROWS + k / 10)
    return fddp.whole(state)


def by_one_replica(optimizer: Any = CLIPPED) -> tuple[Any, Any]:
    params = {name: x for name, x in PARAMS.items() if name != "frozen"}
    return by_plain_jax(loss_fn, optimizer, params, [ROWS + k / 10 for k in range(3)])[:2]


def trains_alike(state: Any, expected: tuple[Any, Any]) -> None:
    params, opt_state = expected
    close(
        jax.device_get({name: state.params[name] for name in params}),
        params,
        rtol=1e-10,
        atol=1e-12,
    )
    np.testing.assert_array_equal(state.params["frozen"], PARAMS["frozen"])
    got = [
        x for x in jax.tree.leaves(jax.device_get(state.opt_state)) if x.shape != (4,)
    ]  # those of trained leaves
    close(got, jax.tree.leaves(opt_state), rtol=1e-10, atol=1e-12)


SHAPES = [
    (2, 2),
    *(pytest.param(shape, marks=pytest.mark.slow) for shape in [(4, 2), (2, 4)]),
    (1, 2),
]


@pytest.mark.quick("(2, 2)")
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_replicas_of_several_devices_train_in_shards_as_plain_jax_does(
    x64: None, shape: tuple[int, int]
):
    trains_alike(trained(*reversed(first_step(shape, shard="state"))), by_one_replica())


OPTIONS: dict[str, dict[str, Any]] = {
    "optimizer": {"shard": "optimizer"},
    "after": {"shard": "optimizer", "schedule": "after"},
    "accumulated": {"shard": "optimizer", "accumulation_steps": 2},
    "small buckets": {
        "shard": "state",
        "bucket_cap_mb": 0,
        "skip_nonfinite": True,
        "find_unused_parameters": True,
    },
}


@pytest.mark.quick("accumulated", "optimizer")
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_shards_of_parts_go_with_options(x64: None, options: dict[str, Any]):
    trains_alike(trained(*reversed(first_step((2, 2), **options))), by_one_replica())


@pytest.mark.quick("(2, 2)")
@pytest.mark.parametrize("shape", [(2, 2), (1, 2)], ids=str)
def test_leaves_that_an_optimizer_needs_whole_are_gathered_by_each_replica(
    x64: None, shape: tuple[int, int]
):
    muon = optax.contrib.muon(0.02)
    trains_alike(trained(*reversed(first_step(shape, muon, shard="state"))), by_one_replica(muon))


def test_gradients_that_wait_are_added_before_they_are_scattered(x64: None):
    step, state = first_step((2, 2), shard="state")

    def call(state: Any, rows: Any) -> Any:
        state, _ = step.no_sync(state, rows[:8])
        return step(state, rows[8:])

    trains_alike(trained(state, call), by_one_replica())


def test_each_device_holds_its_share_of_its_part_and_no_more():
    step, first = first_step((2, 2), shard="state", donate=False)
    for state in (first, step(first, ROWS)[0]):
        for tree in (state.params, state.opt_state[1][0].mu, state.opt_state[1][0].nu):
            by_leaf = {
                name: tree[name].parts.addressable_shards for name in PARAMS if name != "frozen"
            }
            elements = {
                name: {part.data.size for part in shards} for name, shards in by_leaf.items()
            }
            # Half of a half, and half of the numbers on all devices of a replica: one of padding is
            # the rest of 7.
            assert elements == {
                "columns": {6},
                "rows": {10},
                "stack": {240},
                "bias": {4},
                "scale": {1},
            }
    assert bytes_of(step.held)["params"] == 4 * (6 + 10 + 240 + 4 + 1 + 2)


def test_parts_travel_among_devices_that_hold_the_same(optimized: None):
    step, state = first_step((4, 2), shard="state", bucket_cap_mb=0)
    collectives = find_collectives(parse(step.lower(state, ROWS).compile().as_text()))
    on_replicas = ((0, 2, 4, 6), (1, 3, 5, 7))
    for kind in ("all-gather", "all-to-all"):  # on CPUs an exchange, and then a sum
        sizes = [int(np.prod(x.arrays[0].dims)) for x in collectives if x.kind == kind]
        # A quarter of half of each leaf, and of the numbers on a replica's devices; the last gather
        # is of norms.
        assert sorted(sizes)[-5:] == [1, 2, 3, 5, 120]
        assert {device_groups(x.groups) for x in collectives if x.kind == kind} == {on_replicas}
    # Among the devices of a replica nothing moves but sums of activations, and of norms.
    among_parts = [x for x in collectives if device_groups(x.groups) != on_replicas]
    assert {x.kind for x in among_parts} == {"all-reduce"}
    assert {x.arrays[0].dims for x in among_parts} == {(4, 40), (4, 5), ()}


def test_leaves_of_several_dtypes_lie_in_parts(x64: None):
    params = {
        "wide": DRAW.normal(size=(3, 8)),
        "narrow": jnp.asarray(DRAW.normal(size=(8, 5)), jnp.bfloat16),
        "complex": DRAW.normal(size=(5, 2)) + 1j,
    }
    where = {
        "wide": PartitionSpec(None, "part"),
        "narrow": PartitionSpec("part"),
        "complex": PartitionSpec(None, "part"),
    }

    def loss(p: Any, x: Any) -> Any:
        return jnp.mean(
            jnp.abs(jnp.tanh(x @ p["wide"]) @ p["narrow"].astype(jnp.float64) @ p["complex"]) ** 2
        )

    results = []
    for shard in (None, "state"):
        group = fddp.mesh_group(two_axes(2, 2))
        step = fddp.train_step(loss, optax.adam(0.05), group=group, shard=shard)
        results.append(trained(step.init(placed(group, params, where)), step).params)
    for name in params:
        assert results[0][name].dtype == results[1][name].dtype == jnp.asarray(params[name]).dtype
        eps = float(jnp.finfo(results[0][name].dtype).eps)
        a, b = (np.asarray(end[name], np.complex128) for end in results)
        np.testing.assert_allclose(a, b, rtol=8 * eps, atol=8 * eps)


def test_a_last_batch_with_fewer_rows_counts_as_many(x64: None):
    batches = [ROWS, ROWS[:6]]
    results = []
    for shard in (None, "state"):
        step, state = first_step((2, 2), shard=shard)
        for batch in fddp.join(batches, step.group):
            state, _ = step(state, batch)
        results.append(jax.device_get(fddp.whole(state).params))
    close(results[1], results[0], rtol=1e-10, atol=1e-12)


def test_a_state_is_put_together_where_its_parts_lie():
    _, state = first_step((2, 2), shard="state")
    gathered = fddp.whole(state.params)
    for name, spec in WHERE.items():
        if name != "frozen":
            assert gathered[name].sharding.spec == spec
    for params in (gathered, jax.jit(fddp.whole)(state.params)):
        for name, x in PARAMS.items():
            np.testing.assert_array_equal(params[name], x.astype(params[name].dtype))


def test_parameters_that_lie_in_another_way_need_a_step_of_their_own():
    step, state = first_step((2, 2), shard="state")
    _, other_step = first_step((2, 2), where=OTHER, shard="state")
    step(state, ROWS)
    with pytest.raises(ValueError, match=r"Shard of float32\[8, 5\] of the state lies along P"):
        step(other_step, ROWS)


### Over processes


@pytest.mark.ranks
def test_processes_share_a_state_whose_parts_their_devices_hold(tmp_path: Path):
    outcome = launch("gloo", 2, "parts_in_shards.py", folder=tmp_path, JAX_NUM_CPU_DEVICES="2")
    assert outcome.succeeded
    start = parts_in_shards.START
    rows = parts_in_shards.ROWS
    params = by_plain_jax(parts_in_shards.loss, optax.adam(0.1), start, [rows, rows]).params
    for text in outcome.outputs:
        end, sizes, *_ = text.splitlines()
        close(
            {name: np.array(x, np.float32) for name, x in json.loads(end).items()},
            params,
            rtol=1e-4,
            atol=1e-5,
        )
        assert sizes == "{'bias': 2, 'first': 6, 'second': 2}"
