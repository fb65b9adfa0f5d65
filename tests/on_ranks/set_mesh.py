"""A mesh that ranks have set changes nothing, and arrays on a mesh of all ranks are accepted:
against plain JAX."""

import io
from collections.abc import Sequence
from contextlib import redirect_stderr
from itertools import cycle
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from on_ranks.checkpoints import shared_folder
from on_ranks.claims import claim
from problems import first_column
from truth import by_plain_jax

import fddp
from fddp.comm import world_group

OPTIMIZER = optax.adam(0.1)
PARAMS = {
    "w": np.sin(np.arange(36, dtype=np.float32)).reshape(3, 12),
    "b": np.full(12, 0.5, np.float32),
    "head": np.cos(np.arange(12, dtype=np.float32)),
}
WAYS: list[dict[str, Any]] = [
    *({"schedule": schedule} for schedule in ("overlap", "after")),
    *({"shard": shard} for shard in ("optimizer", "state")),
]


def all_rows(group: fddp.Group) -> np.ndarray:
    return np.sin(np.arange(12.0 * group.size, dtype=np.float32)).reshape(-1, 3)


def local_rows(group: fddp.Group) -> np.ndarray:
    return np.split(all_rows(group), group.processes)[group.rank]


def mesh_of(devices: Sequence[Any], kind: AxisType) -> Mesh:
    return Mesh(np.array(devices), ("data",), axis_types=(kind,))


def meshes() -> list[Mesh]:
    """A mesh of all devices, and one of this process's."""
    kinds = (AxisType.Explicit, AxisType.Auto)
    return [
        mesh_of(devices, kind) for kind in kinds for devices in (jax.devices(), jax.local_devices())
    ]


def over(mesh: Mesh, x: np.ndarray, spec: PartitionSpec) -> jax.Array:
    """An array over a mesh, of this process's part."""
    return jax.make_array_from_process_local_data(NamedSharding(mesh, spec), x)


def close(result: Any, expected: Any) -> None:
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(np.asarray(a), b, rtol=2e-5, atol=2e-6),
        result,
        expected,
    )


@claim(quick=("gloo",))
def rows_of_an_array_that_every_process_has_are_divided_once(group: fddp.Group):
    rows, mesh = all_rows(group), mesh_of(jax.devices(), AxisType.Auto)
    for x in (rows, over(mesh, rows, PartitionSpec())):
        (part,) = group.rows([x])
        np.testing.assert_array_equal(part, rows[group.rank :: group.processes])
    assert int(group.all_reduce(len(part))) == len(rows)
    if jax.process_count() > 1:
        divided = over(mesh, local_rows(group), PartitionSpec("data"))
        with pytest.raises(ValueError, match=r"\['x'\] is already divided among processes"):
            group.rows({"x": divided})


@claim(quick=("gloo",))
def under_a_mesh_that_is_set_steps_end_where_plain_jax_does(group: fddp.Group):
    expected = by_plain_jax(first_column, OPTIMIZER, PARAMS, [all_rows(group)] * 2).params
    for options, mesh in zip(WAYS, cycle(meshes())):
        step = fddp.train_step(first_column, OPTIMIZER, group=group, **options)
        with jax.set_mesh(mesh):
            state = step.init(PARAMS)
            for _ in range(2):
                state, _ = step(state, local_rows(group))
            params = fddp.whole(state.params)
        close(params, expected)


@claim(quick=("mpi",))
def under_a_mesh_that_is_set_all_else_is_as_without(group: fddp.Group):
    value = jax.value_and_grad(first_column)(PARAMS, all_rows(group))
    for mesh in meshes()[::3]:
        step = fddp.train_step(first_column, OPTIMIZER, group=group, shard="state")
        with shared_folder(group) as folder, jax.set_mesh(mesh):
            assert group.all_reduce(np.int32(1)) == group.processes
            assert group.broadcast({"key": jax.random.key(group.rank), "x": jnp.ones(2)})[
                "x"
            ].tolist() == [1, 1]
            assert group.broadcast_object(group.rank, root=1) == 1
            assert (
                fddp.gather_rows(jnp.full(2, group.rank), group=group).size == 2 * group.processes
            )
            close(fddp.value_and_grad(first_column, group=group)(PARAMS, local_rows(group)), value)
            state, _ = step(step.init(PARAMS), local_rows(group))
            loss = fddp.evaluate(first_column, state, [local_rows(group)], group=group)
            with fddp.Checkpoints(folder, step, every=1) as checkpoints:
                assert checkpoints.save(state)
            with fddp.Checkpoints(folder, step) as checkpoints, redirect_stderr(io.StringIO()):
                restored, _ = checkpoints.restore(step.init(PARAMS))
            params = fddp.whole(state.params)
            restored_params = fddp.whole(restored.params)
        close(params, by_plain_jax(first_column, OPTIMIZER, PARAMS, [all_rows(group)] * 1).params)
        close(loss, first_column(jax.device_get(params), all_rows(group)))
        jax.tree.map(
            lambda a, b: np.testing.assert_array_equal(np.asarray(a), np.asarray(b)),
            params,
            restored_params,
        )


@claim()
def a_loss_may_close_over_whole_arrays_of_any_mesh(group: fddp.Group):
    def pulled(target: Any) -> Any:
        return lambda params, x: first_column(params, x) + jnp.sum((params["head"] - target) ** 2)

    expected = by_plain_jax(pulled(PARAMS["b"]), OPTIMIZER, PARAMS, [all_rows(group)]).params
    for options, mesh in zip(WAYS, cycle(meshes())):
        step = fddp.train_step(
            pulled(over(mesh, PARAMS["b"], PartitionSpec())), OPTIMIZER, group=group, **options
        )
        state, _ = step(step.init(PARAMS), local_rows(group))
        close(fddp.whole(state.params), expected)


@claim(backends=("gloo",))
def arrays_over_all_ranks_are_taken_as_rows_and_as_parameters(group: fddp.Group):
    expected = by_plain_jax(first_column, OPTIMIZER, PARAMS, [all_rows(group)] * 2).params
    for options, kind in (
        (WAYS[0], AxisType.Auto),
        (WAYS[1], AxisType.Explicit),
        (WAYS[-1], AxisType.Explicit),
    ):
        mesh = mesh_of(jax.devices(), kind)
        params = {
            "w": over(mesh, PARAMS["w"], PartitionSpec()),
            "b": over(
                mesh, np.split(PARAMS["b"], group.processes)[group.rank], PartitionSpec("data")
            ),
            "head": PARAMS["head"],
        }
        rows = over(mesh, local_rows(group), PartitionSpec("data"))
        assert rows.shape == all_rows(group).shape
        step = fddp.train_step(first_column, OPTIMIZER, group=group, **options)
        with jax.set_mesh(mesh if kind == AxisType.Explicit else None):
            state = step.init(params)
            for _ in range(2):
                state, _ = step(state, rows)
            close(fddp.whole(state.params), expected)
    with jax.set_mesh(mesh):
        loss, _ = fddp.value_and_grad(first_column, group=group)(params, rows)
        close(fddp.evaluate(first_column, PARAMS, [rows], group=group), np.asarray(loss))
        assert np.array_equal(fddp.gather_rows(rows, group=group), all_rows(group))
        assert [np.size(batch.share) for batch in fddp.join([rows], group)] == [
            len(local_rows(group))
        ]


@claim(backends=("gloo",))
def a_group_of_the_mesh_that_is_set_gives_results_that_its_programs_take(group: fddp.Group):
    mesh = mesh_of(jax.devices(), AxisType.Explicit)
    with jax.set_mesh(mesh):
        world = world_group(jax.devices())
        assert (world.axis_name, world.rank, world.size) == ("data", group.rank, group.size)
        w = over(mesh, PARAMS["w"], PartitionSpec())
        for options in WAYS[::2]:
            step = fddp.train_step(first_column, OPTIMIZER, group=world, **options)
            state, info = step(step.init(PARAMS), local_rows(group))
            params = fddp.whole(state.params)
            difference = jax.jit(lambda w, params, loss: loss * (params["w"] - w))(
                w, params, info.loss
            )
            assert jax.typeof(difference) == jax.typeof(w)
    with jax.set_mesh(mesh_of(jax.devices()[::-1], AxisType.Auto)):
        world = world_group(jax.devices())
        assert (world.axis_name, world.rank, world.size) == ("data", group.rank, group.size)


@claim(backends=("gloo",))
def the_module_of_a_state_lies_on_a_mesh_of_all_ranks_that_is_set(group: fddp.Group):
    from flax import nnx

    net = fddp.from_nnx(
        nnx.Linear(3, 1, rngs=nnx.Rngs(0)), lambda model, x: jnp.mean(model(x) ** 2)
    )
    step = fddp.train_step(net.loss_fn, OPTIMIZER, group=group)
    state = step.init(net.params)
    for mesh in meshes():
        with jax.set_mesh(mesh):
            module: Any = net.module(state)
            kernel = module.kernel[...]
            assert kernel.sharding.device_set == set(mesh.devices.flat)
            close(kernel.addressable_data(0), state.params["kernel"].addressable_data(0))
