"""A function makes a first state leaf by leaf: `step.init(make)`."""

from collections.abc import Callable
from functools import partial
from typing import Any

import equinox
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tiers import crossed
from trees import same_arrays, same_bits

import fddp
from models import gpt

pytestmark = pytest.mark.steps

Groups = Callable[[int], fddp.Group]
SHARDS = pytest.mark.parametrize("shard", [None, "optimizer", "state"])
OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "adam": lambda: optax.adam(0.1),
    "a copy of the parameters": lambda: optax.contrib.schedule_free_adamw(0.1),
    "a number of all leaves": lambda: optax.chain(of_all_leaves(), optax.sgd(0.1, momentum=0.9)),
}


def of_all_leaves() -> optax.GradientTransformation:
    """Keeps the norm of the first parameters."""
    return optax.GradientTransformation(
        lambda params: optax.tree.norm(params), lambda updates, state, params=None: (updates, state)
    )


def make(seed: int = 0) -> dict[str, Any]:
    """Leaves of several kinds, of sizes that 3 and 8 replicas do not divide."""
    *keys, last = jax.random.split(jax.random.key(seed), 4)
    return {
        "layers": [{"w": 0.02 * jax.random.normal(key, (7, 5)), "b": jnp.zeros(5)} for key in keys],
        "stack": jax.nn.initializers.truncated_normal(0.1)(last, (4, 16, 64)),
        "half": jax.random.normal(jax.random.fold_in(last, 1), (9,), jnp.bfloat16),
        "table": jnp.arange(7),
        "number": 0.5,
        "empty": jnp.zeros((3, 0)),
    }


def loss_fn(params: Any, x: Any, **more: Any) -> Any:
    floats = [w for w in jax.tree.leaves(params) if jnp.issubdtype(w.dtype, jnp.inexact)]
    loss = sum((jnp.sum(w.astype(jnp.float32) ** 2) for w in floats), jnp.mean(x))
    return (loss, (more["model_state"], None)) if more else loss


def step_of(group: fddp.Group, optimizer: Any = None, **options: Any) -> fddp.TrainStep:
    return fddp.train_step(loss_fn, optimizer or optax.adam(0.1), group=group, **options)


@pytest.mark.quick("3-state", "1-None")
@crossed(n=[8, 1, 2, 3], shard=["state", None, "optimizer"])
def test_a_function_makes_the_state_of_its_arrays_bit_for_bit(group: Groups, n: int, shard: Any):
    step = step_of(group(n), shard=shard)
    same_arrays(step.init(make), step.init(jax.jit(make)()))


@pytest.mark.quick("a number of all leaves-state", "adam-None")
@crossed(name=list(OPTIMIZERS), shard=[None, "optimizer", "state"])
def test_an_optimizer_that_looks_at_parameters_sees_those_of_the_function(
    group: Groups, name: str, shard: Any
):
    step = step_of(group(3), OPTIMIZERS[name](), shard=shard)
    state = step.init(make)
    same_arrays(state, step.init(jax.jit(make)()))
    step(state, np.ones(3, np.float32))  # and every array can be donated


def test_replicas_that_train_alone_begin_with_copies_of_what_the_function_makes(group: Groups):
    step = step_of(group(3), fddp.local_steps(optax.adam(0.1), every=2))
    same_arrays(step.init(make), step.init(jax.jit(make)()))


@pytest.mark.slow
def test_a_function_makes_the_model_of_a_library_bit_for_bit(group: Groups, optimized: None):
    model = gpt.PRESETS["tiny"]
    init = partial(gpt.init, model, jax.random.key(1), gpt.batch(model, 2))
    step = fddp.train_step(
        gpt.loss_fn(model), optax.adamw(1e-3), group=group(2), has_aux=True, shard="state"
    )
    same_arrays(step.init(lambda: init()[0]), step.init(jax.jit(init)()[0]))


@pytest.mark.quick("state")
@SHARDS
def test_buffers_are_made_by_a_function_too_and_beside_given_parameters(group: Groups, shard: Any):
    def buffers() -> dict[str, Any]:
        return {"mean": jnp.full(5, 0.25), "count": jnp.int32(3)}

    step = step_of(group(2), shard=shard)
    expected = step.init(jax.jit(make)(), model_state=jax.jit(buffers)(), rng=jax.random.key(5))
    for params in (make, jax.jit(make)()):
        same_arrays(step.init(params, model_state=buffers, rng=jax.random.key(5)), expected)
    same_arrays(step.init(make, model_state=jax.jit(buffers)(), rng=jax.random.key(5)), expected)
    step(expected, np.ones(2, np.float32))


def test_the_memory_of_a_hook_is_that_of_the_functions_parameters(group: Groups):
    step = step_of(group(2), hook=fddp.hooks.quantize())
    same_arrays(step.init(make), step.init(jax.jit(make)()))


@SHARDS
def test_shapes_of_a_function_are_those_of_its_state(group: Groups, shard: Any):
    step = step_of(group(3), shard=shard)
    assert jax.tree.map(form, step.shapes(make)) == jax.tree.map(form, step.init(make))


def form(x: Any) -> tuple[Any, ...]:
    return x.shape, x.dtype


def test_arrays_that_a_function_only_returns_are_copied(group: Groups):
    params = {"w": jnp.ones((4, 3))}
    step = step_of(group(2))
    state = step.init(lambda: params)
    step(state, np.ones(2, np.float32))
    assert params["w"].tolist() == [[1.0] * 3] * 4


def test_leaves_that_come_of_one_large_value_are_made_together(group: Groups):
    def function() -> dict[str, Any]:
        flat = jax.random.normal(jax.random.key(0), (64, 40))
        return {f"w{k}": flat[k] for k in range(64)}

    step = step_of(group(2), shard="state")
    same_arrays(step.init(function), step.init(jax.jit(function)()))


def test_a_loop_over_layers_makes_each_stack_by_itself(group: Groups):
    def function() -> Any:
        def layer(key: Any, _: None) -> tuple[Any, Any]:
            key, first_key, two = jax.random.split(key, 3)
            return key, {
                "w": jax.random.normal(first_key, (6, 5)),
                "v": jax.random.uniform(two, (5, 3)),
            }

        return jax.lax.scan(layer, jax.random.key(2), length=4)[1]

    step = step_of(group(3), shard="state")
    same_arrays(step.init(function), step.init(jax.jit(function)()))


def test_a_module_that_is_a_pytree_is_no_function_even_if_it_can_be_called(group: Groups):
    module = equinox.nn.Linear(3, 2, key=jax.random.key(0))
    step = step_of(group(2), shard="state")
    state = step.init(module)
    assert isinstance(state.params, equinox.nn.Linear)
    same_bits(fddp.whole(state.params), module)
    same_arrays(step.init(lambda: equinox.nn.Linear(3, 2, key=jax.random.key(0))), state)


### Refused arguments


def numbers() -> Any:
    return jnp.ones(3) * float(jnp.sum(jnp.ones(3)))


@pytest.mark.parametrize(
    "function, words",
    [
        (lambda key: jax.random.normal(key, (3,)), "called without arguments, and .* needs"),
        (numbers, "needs concrete numbers during tracing: use jax.numpy"),
        (lambda: {"w": "a string"}, "must be an array, got str"),
        (
            lambda: {"w": jnp.ones(3), "key": jax.random.key(0)},
            "random key, which nothing can train",
        ),
    ],
    ids=["it wants arguments", "it needs concrete numbers", "it makes no array", "it makes a key"],
)
def test_a_function_that_makes_no_parameters_is_refused(group: Groups, function: Any, words: str):
    step = step_of(group(2))
    for call in (step.init, step.shapes):
        with pytest.raises(TypeError, match=words):
            call(function)


@pytest.mark.parametrize(
    "function, words",
    [(lambda: None, "holds no arrays"), (lambda: jnp.arange(3), "nothing to train")],
)
def test_a_function_that_makes_nothing_to_train_is_refused(
    group: Groups, function: Any, words: str
):
    with pytest.raises(ValueError, match=words):
        step_of(group(2)).init(function)


def test_a_function_may_have_arguments_with_defaults_or_bound_ones(group: Groups):
    step = step_of(group(2))
    same_arrays(step.init(partial(make, seed=0)), step.init(make))


### A state of other replicas


@pytest.mark.quick("state")
@pytest.mark.parametrize("shard", ["optimizer", "state"])
def test_a_step_is_told_of_shards_that_other_devices_hold(group: Groups, shard: Any):
    step = step_of(group(2), shard=shard)
    state = step.init(make)
    batch = np.ones(2, np.float32)
    for devices in ([2, 3], [1, 0]):
        moved = step.on(
            fddp.mesh_group(jax.sharding.Mesh(np.array(jax.devices())[devices], "replica"))
        )
        with pytest.raises(
            ValueError, match=r"shards that devices \[0, 1\] hold, and .* are devices"
        ):
            moved(state, batch)
        moved_state, _ = moved(moved.init(make), batch)
        with pytest.raises(ValueError, match=r"shards that devices \[0, 1\] hold"):
            moved(state, batch)
        moved(moved_state, batch)
    step(state, batch)
