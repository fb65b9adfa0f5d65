"""Inside of `jax.set_mesh` training ends as outside, for any mesh."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from problems import first_column
from tiers import crossed
from truth import by_plain_jax

import fddp

pytestmark = pytest.mark.steps

PARAMS = {
    "w": np.sin(np.arange(12, dtype=np.float32)).reshape(3, 4),
    "b": np.full(4, 0.5, np.float32),
    "head": np.cos(np.arange(4, dtype=np.float32)),
}
ROWS = np.sin(np.arange(48, dtype=np.float32)).reshape(16, 3)
OPTIMIZER = optax.adam(0.1)

Check = Callable[[fddp.Group, Path], None]


class Context(NamedTuple):
    """The mesh in force, and the replicas that train inside of it."""

    mesh: Mesh
    group: fddp.Group


def mesh_of(count: int, kind: AxisType, axis: str = "data") -> Mesh:
    return Mesh(np.array(jax.devices()[:count]), (axis,), axis_types=(kind,))


@pytest.fixture(params=["Auto", "Explicit"])
def kind(request: pytest.FixtureRequest) -> AxisType:
    return AxisType[request.param]


def context_of(name: str, kind: AxisType) -> Context:
    axis = "data" if name == "of the group" else "replica"
    return Context(
        mesh_of(1 if name == "of one device" else 4, kind),
        fddp.mesh_group(mesh_of(4, kind, axis), axis),
    )


CONTEXTS = {
    f"{kind} {name}": (name, AxisType[kind])
    for name in ("of the group", "of another axis", "of one device")
    for kind in ("Auto", "Explicit")
}


def close(result: Any, expected: Any) -> None:
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(np.asarray(a), b, rtol=2e-5, atol=2e-6),
        result,
        expected,
    )


### Entry points, each against plain JAX


def trained(group: fddp.Group, **options: Any) -> Any:
    step = fddp.train_step(first_column, OPTIMIZER, group=group, **options)
    state = step.init(PARAMS)
    for _ in range(3):
        state, info = step(state, ROWS)
        assert np.isfinite(float(info.loss))
    return fddp.whole(state.params)


def after_steps(**options: Any) -> Callable[[fddp.Group, Path], None]:
    def check(group: fddp.Group, folder: Path) -> None:
        close(
            trained(group, **options),
            by_plain_jax(first_column, OPTIMIZER, PARAMS, [ROWS] * 3).params,
        )

    return check


def gradients(group: fddp.Group, folder: Path) -> None:
    result = fddp.value_and_grad(first_column, group=group)(PARAMS, ROWS)
    with jax.set_mesh(None):
        close(result, jax.value_and_grad(first_column)(PARAMS, ROWS))


def accumulated(group: fddp.Group, folder: Path) -> None:
    step = fddp.train_step(first_column, OPTIMIZER, group=group)
    state, _ = step.no_sync(step.init(PARAMS), ROWS[:8])
    state, _ = step(state, ROWS[8:])
    close(state.params, by_plain_jax(first_column, OPTIMIZER, PARAMS, [ROWS] * 1).params)


def evaluated(group: fddp.Group, folder: Path) -> None:
    for shard in (None, "state"):
        state = fddp.train_step(first_column, OPTIMIZER, group=group, shard=shard).init(PARAMS)
        # A metric cuts rows, which JAX does not do along an Explicit axis.
        metric = lambda p, x: jnp.mean(x.reshape(-1)) + 0 * p["w"][0, 0]  # noqa: E731
        close(
            fddp.evaluate(metric, state, [ROWS, ROWS[:3]], group=group),
            np.mean(np.append(ROWS, ROWS[:3])),
        )


def evaluates_rows_that_are_made_under_the_mesh(group: fddp.Group, folder: Path) -> None:
    rows = (
        jax.device_put(ROWS, PartitionSpec()) for _ in range(2)
    )  # the mesh that is set has to be seen in here
    close(fddp.evaluate(lambda p, x: jnp.mean(x), PARAMS, rows, group=group), np.mean(ROWS))


def group_calls(group: fddp.Group, folder: Path) -> None:
    assert group.all_reduce(np.int32(3)).tolist() == 3 and group.all_gather(4).tolist() == [4]
    received = group.broadcast({"key": jax.random.key(3), "x": jnp.ones(2)})
    assert jax.random.key_data(received["key"]).tolist() == [0, 3] and received["x"].tolist() == [
        1,
        1,
    ]
    assert group.broadcast_object({"a": 1}) == {"a": 1} and group.subgroup([0]).size == group.size
    assert fddp.gather_rows(jnp.arange(3), group=group).tolist() == [0, 1, 2]
    assert group.hierarchical().size == group.size
    group.barrier()


def saved(group: fddp.Group, folder: Path) -> None:
    for shard in (None, "state"):
        step = fddp.train_step(first_column, OPTIMIZER, group=group, shard=shard)
        state, _ = step(step.init(PARAMS), ROWS)
        with fddp.Checkpoints(folder / str(shard), step, every=1) as checkpoints:
            assert checkpoints.save(state)
        with fddp.Checkpoints(folder / str(shard), step) as checkpoints:
            restored, _ = checkpoints.restore(step.init(PARAMS))
        assert int(restored.step) == 1
        for a, b in zip(jax.tree.leaves(restored), jax.tree.leaves(state)):
            assert np.array_equal(np.asarray(a), np.asarray(b))
        step(restored, ROWS)


def audited(group: fddp.Group, folder: Path) -> None:
    step = fddp.train_step(first_column, OPTIMIZER, group=group)
    state = step.init(PARAMS)
    assert len(fddp.audit(step, state, ROWS).collectives) == len(step.plan.buckets)


def measured(group: fddp.Group, folder: Path) -> None:
    step = fddp.train_step(first_column, OPTIMIZER, group=group)
    assert len(fddp.measure(step, step.init(PARAMS), [ROWS, ROWS]).steps) == 2


def tuned(group: fddp.Group, folder: Path) -> None:
    step = fddp.train_step(first_column, OPTIMIZER, group=group)
    tuning = fddp.tune(step, step.init(PARAMS), ROWS, caps_mb=[0.0, 25.0], steps=1)
    assert len(tuning.candidates) == 2


def checked(group: fddp.Group, folder: Path) -> None:
    for rows in (ROWS, jax.device_put(ROWS, PartitionSpec("data"))):
        assert fddp.check(first_column, PARAMS, rows).factor is None
    assert fddp.grad_order(first_column, PARAMS, ROWS) and fddp.make_plan(PARAMS).buckets


def joined(group: fddp.Group, folder: Path) -> None:
    step = fddp.train_step(first_column, OPTIMIZER, group=group)
    state = step.init(PARAMS)
    for batch in fddp.join([ROWS], group):
        state, _ = step(state, batch)
    close(state.params, by_plain_jax(first_column, OPTIMIZER, PARAMS, [ROWS] * 1).params)


def modules(group: fddp.Group, folder: Path) -> None:
    net = fddp.from_nnx(
        nnx.Linear(3, 1, rngs=nnx.Rngs(0)), lambda model, x: jnp.mean(model(x) ** 2)
    )
    step = fddp.train_step(net.loss_fn, OPTIMIZER, group=group)
    state, _ = step(step.init(net.params), ROWS)
    module: Any = net.module(state)
    expected = ROWS @ np.asarray(module.kernel[...]) + np.asarray(module.bias[...])
    close(module(ROWS), expected)
    close(
        fddp.evaluate(lambda model, x: jnp.mean(model(x)), module, [ROWS], group=group),
        np.mean(expected),
    )


def in_local_steps(group: fddp.Group, folder: Path) -> None:
    step = fddp.train_step(first_column, fddp.local_steps(optax.sgd(0.1), every=2), group=group)
    state = step.init(PARAMS)
    for _ in range(2):
        state, _ = step(state, np.tile(ROWS[:1], (8, 1)))
    close(
        fddp.whole(state.params),
        by_plain_jax(first_column, optax.sgd(0.1), PARAMS, [ROWS[:1]] * 2).params,
    )


CHECKS: dict[str, Check] = {
    "overlap": after_steps(),
    "shard=optimizer": after_steps(shard="optimizer"),
    "shard=state": after_steps(shard="state"),
    "virtual_replicas": after_steps(virtual_replicas=8),
    "accumulation_steps": after_steps(accumulation_steps=2),
    "quantize": lambda group, folder: trained(group, hook=fddp.hooks.quantize()),
    "find_unused_parameters": after_steps(find_unused_parameters=True),
    "check_replicas_every": after_steps(check_replicas_every=1),
    **{
        f.__name__: f
        for f in (gradients, accumulated, evaluated, evaluates_rows_that_are_made_under_the_mesh)
    },
    **{
        f.__name__: f
        for f in (
            group_calls,
            saved,
            audited,
            measured,
            tuned,
            checked,
            joined,
        )
    },
    **{f.__name__: f for f in (modules, in_local_steps)},
}


@crossed(check=CHECKS, where=CONTEXTS)
def test_under_a_mesh_that_is_set(check: Check, where: tuple[str, AxisType], tmp_path: Path):
    context = context_of(*where)
    with jax.set_mesh(context.mesh):
        check(context.group, tmp_path)
        assert jax.sharding.get_mesh() == context.mesh


def test_a_thread_of_the_users_sets_a_mesh_of_its_own(tmp_path: Path):
    context = context_of("of the group", AxisType.Explicit)

    def train() -> None:
        with jax.set_mesh(context.mesh):
            after_steps()(context.group, tmp_path)

    with ThreadPoolExecutor(1) as thread:
        thread.submit(train).result()


def test_a_step_is_not_compiled_again_when_a_mesh_is_set(
    kind: AxisType, caplog: pytest.LogCaptureFixture
):
    step = fddp.train_step(first_column, OPTIMIZER, group=fddp.mesh_group(mesh_of(4, kind), "data"))
    state, _ = step(step.init(PARAMS), ROWS)
    state, _ = step(state, ROWS)
    with jax.log_compiles():
        jax.jit(lambda x: x + 1)(1)
        assert caplog.text.count("Compiling jit") == 1
        with jax.set_mesh(mesh_of(2, kind)):
            step(state, ROWS)
    assert caplog.text.count("Compiling jit") == 1


### Arrays on a mesh of the user


def lying(tree: Any, mesh: Mesh, spec: PartitionSpec) -> Any:
    return jax.device_put(tree, NamedSharding(mesh, spec))


@crossed(options=[{}, {"shard": "state"}], inside=[True, False], where=CONTEXTS)
def test_rows_and_parameters_may_lie_in_parts(
    options: dict[str, Any], inside: bool, where: tuple[str, AxisType]
):
    context = context_of(*where)
    mesh = mesh_of(4, AxisType.Explicit)
    step = fddp.train_step(first_column, OPTIMIZER, group=context.group, **options)
    params = PARAMS | {
        name: lying(PARAMS[name], mesh, PartitionSpec("data")) for name in ("b", "head")
    }
    with jax.set_mesh(mesh if inside else None):
        state = step.init(params)
        for _ in range(3):
            state, _ = step(state, lying(ROWS, mesh, PartitionSpec("data")))
        params = fddp.whole(state.params)
    close(params, by_plain_jax(first_column, OPTIMIZER, PARAMS, [ROWS] * 3).params)


@pytest.mark.parametrize("options", [{}, {"shard": "state"}], ids=str)
def test_results_go_on_in_programs_of_the_groups_own_mesh(options: dict[str, Any], kind: AxisType):
    mesh = mesh_of(4, kind)
    group = fddp.mesh_group(mesh, "data")
    with jax.set_mesh(mesh):
        w = lying(PARAMS["w"], mesh, PartitionSpec())
        step = fddp.train_step(first_column, OPTIMIZER, group=group, **options)
        state, info = step(step.init(PARAMS), ROWS)
        params = fddp.whole(state.params)
        difference = jax.jit(lambda params, w, loss: (params["w"] - w) * loss)(params, w, info.loss)
        assert difference.shape == params["w"].shape and jax.typeof(difference) == jax.typeof(w)
        # A user's loop with a separate optimizer, on parameters that the user has placed.
        params = lying(PARAMS, mesh, PartitionSpec())
        opt_state = OPTIMIZER.init(params)
        gradients_of = fddp.value_and_grad(first_column, group=group)
        for _ in range(3):
            _, grads = gradients_of(params, lying(ROWS, mesh, PartitionSpec("data")))
            updates, opt_state = OPTIMIZER.update(grads, opt_state, params)
            params = optax.apply_updates(params, updates)
    close(params, by_plain_jax(first_column, OPTIMIZER, PARAMS, [ROWS] * 3).params)


def test_results_of_another_mesh_go_on_when_they_are_put_on_it(kind: AxisType):
    mesh = mesh_of(4, kind)
    step = fddp.train_step(
        first_column, OPTIMIZER, group=fddp.mesh_group(mesh_of(4, AxisType.Auto, "replica"))
    )
    with jax.set_mesh(mesh):
        state, _ = step(step.init(PARAMS), ROWS)
        params = jax.device_put(state.params, PartitionSpec())
        assert jax.jit(lambda x: x * 2)(params["w"]).sharding.mesh == mesh


def test_shards_are_put_together_inside_of_a_program(kind: AxisType):
    mesh = mesh_of(4, kind)
    step = fddp.train_step(
        first_column, OPTIMIZER, group=fddp.mesh_group(mesh, "data"), shard="state"
    )
    with jax.set_mesh(mesh):
        close(jax.jit(fddp.whole)(step.init(PARAMS).params), PARAMS)


### init


def trained_on_ones(group: fddp.Group) -> fddp.TrainState:
    """A step whose loss names the axis."""
    step = fddp.train_step(
        lambda w, x: jax.lax.pmean(jnp.mean(w * x), group.axis_name), optax.sgd(0.5)
    )
    return step(step.init(jnp.zeros(())), jnp.ones(group.size))[0]


def test_init_takes_the_axis_of_a_mesh_that_has_its_devices(kind: AxisType):
    devices = jax.devices()
    other_meshes = (
        mesh_of(2, kind),
        Mesh(np.array(devices).reshape(2, -1), ("data", "model"), axis_types=(kind,) * 2),
    )
    for mesh, axis in (
        (mesh_of(len(devices), kind), "data"),
        *((other_mesh, "replica") for other_mesh in other_meshes),
    ):
        fddp.shutdown()
        try:
            with jax.set_mesh(mesh):
                group = fddp.init("local")
                assert group.axis_name == axis and f"axis_name={axis!r}" in repr(group)
                assert float(trained_on_ones(group).params) == -0.5
        finally:
            fddp.shutdown()
