"""A settled step is a part of the user's own program, under `jax.jit` and in
`jax.lax.scan`."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType

import fddp

pytestmark = pytest.mark.steps
STEPS = 4
ADAM = optax.adamw(0.01)
BATCHES = np.random.default_rng(0).normal(size=(STEPS, 16, 5)).astype(np.float32)


def weights() -> dict[str, np.ndarray]:
    draw = np.random.default_rng(1)
    return {
        "bias": draw.normal(size=4).astype(np.float32),
        "kernel": draw.normal(size=(5, 4)).astype(np.float32),
    }


def loss(params: Any, rows: Any) -> Any:
    return jnp.mean(jnp.tanh(rows @ params["kernel"] + params["bias"]) ** 2)


def noisy(params: Any, rows: Any, *, model_state: Any, rng: Any) -> Any:
    """Draws noise, and returns buffers and a metric."""
    value = loss(params, rows + jax.random.normal(rng, rows.shape) / 9)
    return value, ({"mean": 0.9 * model_state["mean"] + 0.1 * rows.mean(0)}, value + 1)


def bits(tree: Any) -> list[bytes]:
    def numbers(x: Any) -> Any:
        return jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x

    return [np.asarray(numbers(x)).tobytes() for x in jax.tree.leaves(tree)]


def in_a_loop(
    step: fddp.TrainStep, state: fddp.TrainState
) -> tuple[fddp.TrainState, fddp.StepInfo]:
    infos = []
    for batch in BATCHES:
        state, info = step(state, batch)
        infos.append(info)
    return state, jax.tree.map(lambda *x: jnp.stack(x), *infos)


def in_a_scan(
    step: fddp.TrainStep, state: fddp.TrainState
) -> tuple[fddp.TrainState, fddp.StepInfo]:
    return jax.jit(lambda state, batches: jax.lax.scan(step, state, batches))(state, BATCHES)


CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "one replica": (1, {}),
    "four replicas": (4, {}),
    "micro-batches": (2, {"accumulation_steps": 2}),
    "a hook that remembers": (4, {"hook": fddp.hooks.topk(0.5)}),
    "sharded optimizer": (4, {"shard": "optimizer"}),
    "sharded state": (4, {"shard": "state"}),
    "unused parameters": (4, {"find_unused_parameters": True, "skip_nonfinite": True}),
}


@pytest.mark.parametrize("case", CASES)
def test_a_scan_of_steps_gives_the_bits_of_a_loop(group: Callable[[int], fddp.Group], case: str):
    replicas, options = CASES[case]
    step = fddp.train_step(
        loss, ADAM, group=group(replicas), bucket_cap_mb=0.0001, donate=False, **options
    )
    first = step.init(weights())
    state, infos = in_a_loop(step, first)
    scanned, scanned_infos = in_a_scan(step, first)
    assert bits(scanned) == bits(state)
    assert bits(scanned_infos) == bits(infos)
    assert step.steps == STEPS  # the host counts outside of the program
    copied, _ = step(
        scanned, BATCHES[0]
    )  # the result of a user's program is a state like any other
    assert bits(copied) == bits(step(state, BATCHES[0])[0])


def test_buffers_and_random_numbers_are_those_of_a_loop(group: Callable[[int], fddp.Group]):
    step = fddp.train_step(noisy, ADAM, group=group(4), donate=False)
    first = step.init(
        weights(), model_state={"mean": np.zeros(5, np.float32)}, rng=jax.random.key(3)
    )
    looped = in_a_loop(step, first)
    assert bits(in_a_scan(step, first)) == bits(looped)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_a_step_is_a_part_of_a_program_inside_a_context_mesh(kind: AxisType):
    mesh = jax.make_mesh((4,), ("replica",), axis_types=(kind,), devices=jax.devices()[:4])
    with jax.set_mesh(mesh):
        step = fddp.train_step(loss, ADAM, group=fddp.mesh_group(mesh), donate=False)
        first = step.init(weights())
        state, _ = step(first, BATCHES[0])
        inside, _ = jax.jit(step)(first, BATCHES[0])
        assert bits(inside) == bits(state)


def test_a_step_that_cannot_be_a_part_of_a_program_says_why(group: Callable[[int], fddp.Group]):
    def refused(step: fddp.TrainStep, call: Callable[..., Any], message: str) -> None:
        with pytest.raises(
            TypeError, match=f"cannot be called under jax.jit, grad or vmap: .*{message}"
        ):
            call(step)(step.init(weights()), BATCHES[0])

    def settled_step(**options: Any) -> fddp.TrainStep:
        step = fddp.train_step(loss, ADAM, group=group(2), donate=False, **options)
        step(step.init(weights()), BATCHES[0])
        return step

    refused(fddp.train_step(loss, ADAM, group=group(2)), jax.jit, "its first batch settles it")
    refused(
        settled_step(),
        lambda step: lambda state, x: jax.grad(lambda x: step(state, x)[1].loss)(x),
        "only of jax.jit and jax.lax.scan",
    )
    refused(
        settled_step(),
        lambda step: lambda state, x: jax.vmap(lambda x: step(state, x)[1].loss)(x[None]),
        "all replicas",
    )
    step = settled_step()
    with pytest.raises(ValueError, match="15 rows cannot be divided into 2"):
        jax.jit(step)(step.init(weights()), BATCHES[0][:15])
    with pytest.raises(TypeError, match=r"state must be a fddp\.TrainState"):
        jax.jit(step)(weights(), BATCHES[0])


def test_init_and_messages_of_the_host_are_refused_inside_of_jit(
    group: Callable[[int], fddp.Group],
):
    step = fddp.train_step(loss, ADAM, group=group(2))
    for transform in (jax.jit, jax.vmap):
        for call in (lambda w: step.init({"kernel": w}).params, group(2).all_reduce):
            with pytest.raises(TypeError, match=r"cannot be called under jax\.jit, grad or vmap"):
                transform(call)(jnp.ones((5, 4)))
