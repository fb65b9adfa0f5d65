"""The closures of a loss, and its use of meshes, change nothing for a replica of one device."""

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax.linen.spmd import with_logical_constraint
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from tiers import crossed
from truth import by_plain_jax

import fddp

pytestmark = pytest.mark.steps

PARAMS = {"w": np.sin(np.arange(12, dtype=np.float32)).reshape(3, 4), "v": np.ones(4, np.float32)}
TEACHER = {
    "w": np.cos(np.arange(12, dtype=np.float32)).reshape(3, 4),
    "v": np.full(4, 0.5, np.float32),
}
ROWS = np.sin(np.arange(96, dtype=np.float32)).reshape(32, 3)
WAYS: list[dict[str, Any]] = [
    *({"schedule": schedule} for schedule in ("overlap", "after")),
    *({"shard": shard} for shard in ("optimizer", "state")),
    {"accumulation_steps": 2},
    {"virtual_replicas": 8},
    {"find_unused_parameters": True},
]


def net(params: Any, x: Any) -> Any:
    return jnp.tanh(x @ params["w"]) @ params["v"]


def distilled(teacher: Any) -> Callable[..., Any]:
    """The loss, a loop, a branch and an inner jit read the teacher."""

    def loss(params: Any, x: Any) -> Any:
        offset = jax.lax.fori_loop(0, 2, lambda _, total: total + teacher["v"][0], jnp.float32(0))
        offset += jax.lax.cond(params["v"][0] > 0, lambda: teacher["v"][1], lambda: jnp.float32(0))
        inner = jax.checkpoint(
            lambda params: net(params, x) - jax.jit(lambda x: net(teacher, x))(x)
        )
        return jnp.mean((inner(params) - offset) ** 2)

    return loss


def pulled_to(teacher: Any) -> optax.GradientTransformation:
    pull = lambda g, p: jax.tree.map(lambda g, p, t: g + 0.1 * (p - t), g, p, teacher)  # noqa: E731
    return optax.chain(optax.stateless(pull), optax.adam(0.05))


def trained(
    loss: Callable[..., Any], optimizer: optax.GradientTransformation, **options: Any
) -> Any:
    step = fddp.train_step(
        loss, optimizer, group=fddp.mesh_group(mesh_of(4, AxisType.Auto, "replica")), **options
    )
    state = step.init(PARAMS)
    for _ in range(2):
        state, _ = step(state, ROWS)
    return fddp.whole(state.params)


def mesh_of(count: int, kind: AxisType, axis: str = "data") -> Mesh:
    return Mesh(np.array(jax.devices()[:count]), (axis,), axis_types=(kind,))


def on(mesh: Mesh, spec: PartitionSpec = PartitionSpec()) -> Any:  # noqa: B008
    return jax.device_put(TEACHER, NamedSharding(mesh, spec))


def another_state() -> Any:
    step = fddp.train_step(lambda p, x: jnp.mean(net(p, x)), optax.sgd(0.0))
    return step.init(TEACHER).params


def close(result: Any, expected: Any) -> None:
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(np.asarray(a), b, rtol=2e-5, atol=2e-6),
        result,
        expected,
    )


PLACES = {
    "another state": another_state,
    "whole on an Explicit mesh": lambda: on(mesh_of(4, AxisType.Explicit)),
    "whole on an Auto mesh": lambda: on(mesh_of(8, AxisType.Auto)),
    "on an Explicit mesh of one device": lambda: on(mesh_of(1, AxisType.Explicit)),
}


@crossed(options=WAYS, place=PLACES)
def test_a_loss_and_an_optimizer_may_close_over_arrays_of_any_mesh(
    options: dict[str, Any], place: Callable[[], Any]
):
    expected = by_plain_jax(distilled(TEACHER), pulled_to(TEACHER), PARAMS, [ROWS] * 2).params
    teacher = place()
    close(trained(distilled(teacher), pulled_to(teacher), **options), expected)


def test_a_metric_and_gradients_may_close_over_arrays_of_any_mesh():
    loss = distilled(on(mesh_of(4, AxisType.Explicit)))
    close(fddp.evaluate(loss, PARAMS, [ROWS]), np.asarray(distilled(TEACHER)(PARAMS, ROWS)))
    close(
        fddp.value_and_grad(loss)(PARAMS, ROWS),
        jax.value_and_grad(distilled(TEACHER))(PARAMS, ROWS),
    )


@pytest.mark.parametrize("options", WAYS[:2])
@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_arrays_in_parts_are_refused(options: dict[str, Any], kind: str):
    teacher = on(mesh_of(4, AxisType[kind]), PartitionSpec())
    teacher["v"] = jax.device_put(
        TEACHER["v"], NamedSharding(mesh_of(4, AxisType[kind]), PartitionSpec("data"))
    )
    with pytest.raises(ValueError, match=r"whole array"):
        trained(distilled(teacher), optax.sgd(0.1), **options)


def test_a_shard_is_refused_by_name():
    shards = fddp.train_step(lambda p, x: jnp.mean(net(p, x)), optax.sgd(0.0), shard="state").init(
        TEACHER
    )
    with pytest.raises(TypeError, match=r"a Shard of float32\[3, 4\] is not an array.*fddp\.whole"):
        trained(lambda p, x: jnp.mean((net(p, x) - net(shards.params, x)) ** 2), optax.sgd(0.1))


### Losses that use meshes


def auto() -> NamedSharding:
    return NamedSharding(mesh_of(4, AxisType.Auto), PartitionSpec("data"))


def marked(mark: Callable[[Any], Any]) -> Callable[..., Any]:
    return lambda p, x: jnp.mean((mark(jnp.tanh(mark(x) @ p["w"])) @ p["v"] - 1) ** 2)


MARKS: dict[str, Callable[[Any], Any]] = {
    "with_sharding_constraint": lambda x: jax.lax.with_sharding_constraint(x, auto()),
    "logical constraint": lambda x: with_logical_constraint(
        x, ("batch", None), rules=(("batch", "data"),), mesh=mesh_of(4, AxisType.Auto)
    ),
    "device_put": lambda x: jax.device_put(x, auto()),
    "out_shardings": lambda x: jax.jit(lambda x: x, out_shardings=auto())(x),
    "reshard": lambda x: jax.sharding.reshard(
        x, NamedSharding(mesh_of(2, AxisType.Explicit), PartitionSpec())
    ),
}


@crossed(options=WAYS, mark=MARKS)
def test_constraints_that_are_left_in_a_loss_are_ignored(
    options: dict[str, Any], mark: Callable[[Any], Any]
):
    expected = by_plain_jax(marked(lambda x: x), optax.sgd(0.1), PARAMS, [ROWS] * 2).params
    close(trained(marked(mark), optax.sgd(0.1), **options), expected)


REFUSED: dict[str, Callable[[Any], Any]] = {
    "shard_map": lambda x: jax.shard_map(
        lambda x: x,
        mesh=auto().mesh,
        in_specs=PartitionSpec("data"),
        out_specs=PartitionSpec("data"),
    )(x),
    "a spec without a mesh": lambda x: jax.lax.with_sharding_constraint(x, PartitionSpec("data")),
    "device_put to a spec": lambda x: jax.device_put(x, PartitionSpec("data")),
}


@pytest.mark.parametrize("options", WAYS[:2])
@pytest.mark.parametrize("mark", REFUSED)
def test_lines_that_need_a_mesh_are_refused_by_their_place(options: dict[str, Any], mark: str):
    with pytest.raises(
        ValueError, match=re.escape(__file__) + r":\d+.*a replica is one device without a mesh"
    ):
        trained(marked(REFUSED[mark]), optax.sgd(0.1), **options)


def test_boxes_of_partitioned_modules_train_as_the_module_without_them():
    def module(boxed: bool) -> nn.Module:
        init = nn.initializers.lecun_normal()
        return nn.Dense(
            4, kernel_init=nn.with_partitioning(init, ("embed", "mlp")) if boxed else init
        )

    results = list[Any]()
    for boxed in (False, True):
        net = fddp.from_linen(module(boxed), lambda model, x: jnp.mean((model(x) - 1) ** 2))
        params, _ = net.init(jax.random.key(0), ROWS)
        step = fddp.train_step(net.loss_fn, optax.sgd(0.1))
        state, _ = step(step.init(params), ROWS)
        results.append(jax.tree.leaves(state.params))
    close(results[1], results[0])


@pytest.mark.parametrize("shard", ["optimizer", "state"])
def test_a_collective_in_an_optimizer_is_refused_where_replicas_update_parts(shard: Any):
    optimizer = optax.chain(
        optax.stateless(lambda g, _: jax.lax.pmean(g, "replica")), optax.sgd(0.1)
    )
    expected = by_plain_jax(marked(lambda x: x), optax.sgd(0.1), PARAMS, [ROWS] * 2).params
    close(trained(marked(lambda x: x), optimizer), expected)
    with pytest.raises(ValueError, match=r"the optimizer has a collective: leave it out"):
        trained(marked(lambda x: x), optimizer, shard=shard)


### Refs


def by_a_ref(params: Any, x: Any) -> Any:
    ref = jax.new_ref(jnp.zeros(()))
    ref[...] = jnp.mean((net(params, x) - 1) ** 2)
    return ref[...]


@crossed(options=WAYS)
def test_a_loss_may_write_to_a_ref_that_it_makes(options: dict[str, Any]):
    expected = by_plain_jax(marked(lambda x: x), optax.sgd(0.1), PARAMS, [ROWS] * 2).params
    close(trained(by_a_ref, optax.sgd(0.1), **options), expected)


def test_a_ref_that_a_loss_closes_over_is_refused():
    ref = jax.new_ref(jnp.zeros(()))

    def loss(params: Any, x: Any) -> Any:
        ref[...] = jnp.mean(x)
        return jnp.mean(net(params, x))

    with pytest.raises(ValueError, match=r"closes over a Ref.*model_state or aux"):
        trained(loss, optax.sgd(0.1))
