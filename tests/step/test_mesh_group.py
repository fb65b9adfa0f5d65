"""Replicas can be anything JAX has devices for: parts of a mesh that has other axes too.

A replica of several devices holds its parameters in parts (tensor parallelism); every claim is held
against plain JAX on the joined batch, and messages are read off the compiled program.
"""

import re
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from device_groups import Devices, device_groups
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from processes import launch
from trees import close
from truth import by_plain_jax
from workers import trainings
from workers.train_all import Run, train

import fddp
from models import gpt, tensor_parallel

pytestmark = pytest.mark.steps

ROOT = Path(__file__).parents[2]
ON_REPLICAS = ((0, 2, 4, 6), (1, 3, 5, 7))
ON_PARTS = ((0, 1), (2, 3), (4, 5), (6, 7))


@cache
def mesh() -> Mesh:
    return tensor_parallel.two_axes(4, 2)


def in_halves(tree: Any) -> set[str]:
    """Names of the leaves that every device holds half of."""
    named = jax.tree_util.tree_leaves_with_path(tree)
    keys = {jax.tree_util.keystr(path, simple=True, separator="/"): x for path, x in named}
    return {
        key
        for key, x in keys.items()
        if {2 * part.data.size for part in x.addressable_shards} == {x.size}
    }


### A replica of two devices

MATRICES = {"query", "key", "value", "out", "gate", "up", "down", "embed"}


@pytest.mark.quick("gpt-adamw-after")
@pytest.mark.parametrize(
    "run", [Run("gpt", "adamw", "overlap", 2), Run("gpt", "adamw", "after")], ids=str
)
def test_four_replicas_of_two_devices_end_where_one_device_does(run: Run):
    with trainings.precision(run.rule):
        params = tensor_parallel.placed(trainings.start(run.model, run.rule)[0], mesh())
        result = train(fddp.mesh_group(mesh()), run, (params, None))
        expected = trainings.on_one_device(run.model, run.rule)
        assert (
            trainings.relative_error(jax.device_get(result), expected)
            <= trainings.RULES[run.rule].tolerance
        )
        assert {name.split("/")[-2] for name in in_halves(result.params)} == MATRICES


@cache
def trained() -> Any:
    """A step of the GPT, and its state and batch after one call."""
    _, model = trainings.MODELS["gpt"]
    params, _ = gpt.init(model, jax.random.key(0), gpt.batch(model, 1))
    options: dict[str, Any] = {
        "bucket_cap_mb": 1 / 16,
        "first_bucket_mb": 1 / 64,
        "last_bucket_mb": 1 / 64,
    }
    step = fddp.train_step(
        gpt.loss_fn(model),
        optax.adamw(1e-3),
        group=fddp.mesh_group(mesh()),
        has_aux=True,
        donate=False,
        **options,
    )
    batch = gpt.batch(model, 8)
    state, _ = step(step.init(tensor_parallel.placed(params, mesh())), batch)
    return step, state, batch


def test_each_device_holds_its_part_of_parameters_and_moments():
    _, state, _ = trained()
    halves = in_halves(state.params)
    assert {name.split("/")[-2] for name in halves} == MATRICES
    moments = state.opt_state[0]
    assert in_halves(moments.mu) == in_halves(moments.nu) == halves
    total_mib, local_mib = tensor_parallel.size_mib(state.params)
    assert local_mib < 0.51 * total_mib


def all_reduces(text: str) -> list[tuple[int, Devices]]:
    """Elements and groups of devices of every all-reduce in a compiled program."""
    matches = re.findall(
        r"= \w+\[([\d,]*)\]\S* all-reduce\(.*?replica_groups=(.+?), use_global", text
    )
    return [
        (int(np.prod([int(n) for n in shape.split(",") if n])), device_groups(groups))
        for shape, groups in matches
    ]


def test_a_device_sends_the_parts_that_it_holds_to_those_that_hold_the_same():
    step, state, batch = trained()
    text = step.lower(state, batch).compile().as_text()
    sums = all_reduces(text)
    assert len(sums) == len(re.findall(r" all-reduce(-start)?\(", text))
    assert all(groups in (ON_REPLICAS, ON_PARTS) for _, groups in sums)
    assert any(groups == ON_PARTS for _, groups in sums)
    among_replicas = [size for size, groups in sums if groups == ON_REPLICAS]
    loss_accuracy_and_weight = 3
    sizes = [bucket.size for bucket in step.plan.buckets]
    assert len(sizes) >= 3
    assert sorted(among_replicas) == sorted([sizes[0] + loss_accuracy_and_weight, *sizes[1:]])
    part_sizes = [
        part.data.size for part in (x.addressable_shards[0] for x in jax.tree.leaves(state.params))
    ]
    assert sum(sizes) == sum(part_sizes)
    # Nothing else moves but the accuracy's largest logits: each part finds one for every
    # token.
    gathered = re.findall(r"\[([\d,]*)\]\S* all-gather\(", text)
    assert set(gathered) == {"2,8,2"}
    assert not re.search(r" (all-to-all|collective-permute|reduce-scatter)(-start)?\(", text)


def test_a_second_step_finds_everything_where_the_first_did():
    step, state, batch = trained()
    next_state, _ = step(state, batch)
    where = partial(jax.tree.map, lambda x: x.sharding)
    assert where(next_state.params) == where(state.params)
    assert where(next_state.opt_state) == where(state.opt_state)


### Other forms of the same


def loss(params: Any, x: Any) -> jax.Array:
    """A loss that constrains its own partitioning."""
    hidden = jax.lax.with_sharding_constraint(
        jnp.tanh(x @ params["first"]), PartitionSpec(None, "part")
    )
    return jnp.mean((hidden @ params["second"] + params["bias"]) ** 2)


def plain(params: Any, x: Any) -> jax.Array:
    return jnp.mean((jnp.tanh(x @ params["first"]) @ params["second"] + params["bias"]) ** 2)


RNG = np.random.default_rng(3)
PARAMS = {
    "first": RNG.normal(size=(3, 4)),
    "second": RNG.normal(size=(4, 2)),
    "bias": RNG.normal(size=2),
}
X = RNG.normal(size=(16, 3))


def in_parts(on: Mesh) -> Any:
    where = {
        "first": PartitionSpec(None, "part"),
        "second": PartitionSpec("part"),
        "bias": PartitionSpec(),
    }
    return {name: jax.device_put(PARAMS[name], NamedSharding(on, where[name])) for name in PARAMS}


@pytest.mark.parametrize(
    "on", [mesh, lambda: jax.make_mesh((4, 2), ("replica", "part"))], ids=["auto", "explicit"]
)
def test_gradients_lie_as_the_parameters(x64, on):
    f = fddp.value_and_grad(loss, group=fddp.mesh_group(on()), find_unused_parameters=True)
    value, grads = f(in_parts(on()), X)
    expected = jax.value_and_grad(plain)(PARAMS, X)
    close((value, grads), expected, rtol=1e-12, atol=0)
    assert in_halves(grads) == {"first", "second"}


def test_a_loss_may_use_a_parameter_in_parts_in_a_loop(x64):
    def looped(w: Any, x: Any) -> jax.Array:
        return jnp.mean(jax.lax.scan(lambda x, _: (jnp.tanh(x @ w), None), x, length=3)[0] ** 2)

    w = X[:4] @ X[:4].T / 4
    x = X @ X[:4].T
    f = fddp.value_and_grad(looped, group=fddp.mesh_group(mesh()))
    results = f(jax.device_put(w, NamedSharding(mesh(), PartitionSpec("part"))), x)
    close(results, jax.value_and_grad(looped)(w, x), rtol=1e-12, atol=0)


@pytest.mark.parametrize("schedule", ["overlap", "after"])
def test_what_waits_for_a_synchronization_lies_in_parts_too(x64, schedule):
    step = fddp.train_step(loss, optax.sgd(1.0), group=fddp.mesh_group(mesh()), schedule=schedule)
    state, _ = step.no_sync(step.init(in_parts(mesh())), X[:8])
    shapes = [x.addressable_shards[0].data.shape for x in jax.tree.leaves(state.accumulated)]
    assert shapes[:3] == [(1, 2), (1, 3, 2), (1, 2, 2)]
    state, _ = step(state, X[8:])
    grads = jax.grad(plain)(PARAMS, X)
    jax.tree.map(
        lambda p, q, g: np.testing.assert_allclose(p, q - g, rtol=1e-12),
        state.params,
        PARAMS,
        grads,
    )


def test_buffers_keys_and_used_sets_go_along(x64):
    def noted(params: Any, x: Any, *, model_state: Any, rng: Any) -> Any:
        hidden = jax.lax.with_sharding_constraint(
            jnp.tanh(x @ params["first"]), PartitionSpec(None, "part")
        )
        total = jax.lax.psum(jnp.sum(x), "replica")
        value = jnp.mean((hidden @ params["second"]) ** 2) + 0 * jax.random.uniform(rng)
        return value, ({"sum": model_state["sum"] + total}, None)

    options: dict[str, Any] = {"accumulation_steps": 2, "find_unused_parameters": True}
    step = fddp.train_step(noted, optax.adamw(0.1), group=fddp.mesh_group(mesh()), **options)
    state = step.init(in_parts(mesh()), model_state={"sum": np.zeros(())}, rng=jax.random.key(0))
    state, info = step(state, X)
    state, info = step(state, X)
    assert jax.tree.map(int, info.used) == {"first": 4, "second": 4, "bias": 0}
    np.testing.assert_array_equal(state.params["bias"], PARAMS["bias"])
    np.testing.assert_allclose(state.model_state["sum"], 2 * X.sum(), rtol=1e-12)
    loss0 = lambda p, x: jnp.mean((jnp.tanh(x @ p["first"]) @ p["second"]) ** 2)  # noqa: E731
    params = {name: PARAMS[name] for name in ("first", "second")}
    params = by_plain_jax(loss0, optax.adamw(0.1), params, [X, X]).params
    for name in params:
        np.testing.assert_allclose(state.params[name], params[name], rtol=1e-10)
    assert in_halves(state.params) == {"first", "second"}


def test_keys_in_parts_begin_as_the_first_replicas():
    step = fddp.train_step(
        lambda p, x, rng: jnp.mean(p * x), optax.sgd(0.1), group=fddp.mesh_group(mesh())
    )
    keys = jax.random.split(jax.random.key(0), 4)
    state = step.init(
        np.float32(1), rng=jax.device_put(keys, NamedSharding(mesh(), PartitionSpec("part")))
    )
    np.testing.assert_array_equal(jax.random.key_data(state.rng), jax.random.key_data(keys))


def test_an_optimizers_factors_need_not_have_the_shape_of_a_parameter(x64):
    optimizer = optax.chain(optax.scale_by_factored_rms(min_dim_size_to_factor=2), optax.sgd(0.1))
    step = fddp.train_step(
        loss, optimizer, group=fddp.mesh_group(mesh()), ignore=lambda name: name == "bias"
    )
    state, _ = step(step.init(in_parts(mesh())), X)
    trained = {name: PARAMS[name] for name in ("first", "second")}
    bias = PARAMS["bias"].copy()
    # A copy: JAX remembers a constant of a program by its object, in 64 bits here and in 32 in
    # other tests.
    expected = by_plain_jax(
        lambda p, x: plain({**p, "bias": bias}, x), optimizer, trained, [X]
    ).params
    close(state.params, {**PARAMS, **expected}, rtol=1e-10, atol=0)


def test_the_callers_parameters_outlive_donation():
    params = in_parts(mesh())
    step = fddp.train_step(loss, optax.sgd(1.0), group=fddp.mesh_group(mesh()))
    step(step.init(params), X)
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b.astype(a.dtype)), params, PARAMS)


# The rounding error of each, relative to the largest gradient.
HOOKS = [(fddp.hooks.allreduce(), 1e-12), (fddp.hooks.bf16(), 2**-7), (fddp.hooks.fp16(), 2**-10)]


@pytest.mark.parametrize(("hook", "rounding"), HOOKS, ids=["allreduce", "bf16", "fp16"])
def test_a_hook_of_single_elements_sums_the_parts_of_each_device(
    x64: None, hook: Any, rounding: float
):
    step = fddp.train_step(plain, optax.sgd(1.0), group=fddp.mesh_group(mesh()), hook=hook)
    state, _ = step(step.init(in_parts(mesh())), X)
    grads = jax.grad(plain)(PARAMS, X)
    atol = rounding * max(np.max(np.abs(g)) for g in jax.tree.leaves(grads))
    close(
        fddp.whole(state.params), jax.tree.map(lambda p, g: p - g, PARAMS, grads), rtol=0, atol=atol
    )


def test_a_hook_cannot_have_whole_leaves_of_a_replica_in_parts():
    message = "several devices, along 'part': each device sends the parts"
    hook = fddp.hooks.quantize(error_feedback=False)
    part_group = fddp.mesh_group(mesh())
    plain_group = fddp.mesh_group(jax.make_mesh((8,), ("replica",)))
    for call in (
        partial(fddp.train_step, loss, optax.sgd(1.0)),
        partial(fddp.value_and_grad, loss),
    ):
        with pytest.raises(ValueError, match=message):
            call(group=part_group, hook=hook)
    step = fddp.train_step(loss, optax.sgd(1.0), group=plain_group, hook=hook)
    with pytest.raises(ValueError, match=message):
        step.on(part_group)


def test_a_subgroup_keeps_the_axes_of_its_mesh():
    sub = fddp.mesh_group(mesh()).subgroup([0])
    assert (sub.size, sub.axis_name) == (4, "replica")
    assert sub.placement.spec(in_parts(mesh())["first"]) == PartitionSpec(None, "part")


### Over processes


@pytest.mark.ranks
def test_processes_hold_their_replicas_in_parts(tmp_path):
    outcome = launch("gloo", 2, "parts.py", folder=tmp_path, JAX_NUM_CPU_DEVICES="2")
    assert outcome.succeeded
    results, spread, subgroups, refused = zip(*(text.splitlines() for text in outcome.outputs))
    # By hand: of rows [1, 1] and [2, 2], and weights that start at 0.5, 0.25 and 1.
    params = {"first": np.full((2, 4), 0.5), "second": np.full((4, 2), 0.25), "bias": np.ones(2)}
    x = np.ones((4, 2))
    x = np.concatenate([x, 2 * x])
    linear = lambda p: jnp.mean(((x @ p["first"]) @ p["second"] + p["bias"]) ** 2)  # noqa: E731
    params = jax.tree.map(lambda p, g: p - 0.125 * g, params, jax.grad(linear)(params))
    value, grads = jax.value_and_grad(linear)(params)
    params = jax.tree.map(lambda p, g: p - 0.125 * g, params, grads)
    for end in results:
        numbers = [float(n) for n in re.findall(r"-?\d+\.\d+(?:e-?\d+)?", end)]
        expected = [params["first"][0, 0], params["second"][0, 0], params["bias"][0], value]
        np.testing.assert_allclose(sorted(numbers), sorted(expected), rtol=1e-5)
        assert "'first': (2, 2)" in end and "'second': (2, 2)" in end
    assert all(
        "replica 0 of the axis 'replica' is spread over processes [0, 1]" in text for text in spread
    )
    assert subgroups == ("alone 1 backwards 1", "alone 1 backwards 0")
    assert refused == ("True", "True")
