"""A function makes a first state, each rank its own part of it."""

import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from on_ranks.claims import claim, error_of, same_on_all_ranks

import fddp

MIB = 2**20
LEAVES = 16
BESIDE_MIB = 64  # a leaf and XLA's copies of it, programs, and memory that the heap retains


def make() -> dict[str, jax.Array]:
    keys = jax.random.split(jax.random.key(7), 3)
    return {
        "bias": jnp.zeros(5),
        "kernel": 0.02 * jax.random.normal(keys[0], (33, 5)),
        "stack": jax.random.truncated_normal(keys[1], -2, 2, (4, 16, 40)),
        "table": jnp.arange(6),
    }


def loss_fn(params: Any, x: jax.Array) -> jax.Array:
    return sum((jnp.sum(w) for w in jax.tree.leaves(params)), jnp.mean(x))


def step_of(group: fddp.Group, **options: Any) -> fddp.TrainStep:
    return fddp.train_step(loss_fn, optax.adam(0.1), group=group, **options)


def local_bits(state: Any) -> list[bytes]:
    """The bytes of this rank's part of each array."""
    return [np.asarray(x.addressable_data(0)).tobytes() for x in jax.tree.leaves(state)]


@claim(quick=("mpi",))
def a_state_that_a_function_makes_is_that_of_its_arrays(group: fddp.Group):
    for shard in (None, "optimizer", "state"):
        step = step_of(group, shard=shard)
        state = step.init(make, model_state=lambda: {"mean": jnp.full(3, 0.5)})
        expected = step.init(jax.jit(make)(), model_state={"mean": np.full(3, 0.5, np.float32)})
        assert jax.tree.structure(state) == jax.tree.structure(expected)
        assert local_bits(state) == local_bits(expected)
        assert same_on_all_ranks(group, fddp.whole(state.params))


@claim()
def ranks_whose_functions_make_different_values_say_so(group: fddp.Group):
    step = step_of(group, shard="state")
    key = jax.random.key(group.rank)
    for function in (
        lambda: jax.random.normal(key, (8, 4)),
        lambda: jax.random.normal(jax.random.key(time.time_ns() % 2**31), (8, 4)),
        lambda: jnp.full((8, 4), 0.5 + group.rank),
    ):
        assert "made by a function of digest" in error_of(
            lambda function=function: step.init(function)
        )
    rows = jnp.full((8, 4), float(group.rank))  # only the structure of the parameters
    assert step.init(lambda: jnp.zeros_like(rows)).params.shape == (8, 4)


@claim()
def a_function_that_fails_on_one_rank_fails_on_all(group: fddp.Group):
    def function() -> jax.Array:
        w = jnp.ones((8, 4))
        return w * float(jnp.sum(w)) if group.rank == 1 else w

    assert "is traced" in error_of(lambda: step_of(group).init(function), TypeError)


@claim(quick=("mpi",))
def a_rank_never_holds_the_model_whose_state_it_makes(group: fddp.Group):
    def layers(width: int) -> dict[str, jax.Array]:
        return {
            f"w{k}": jnp.sin(jnp.arange(float(width**2)) + k).reshape(width, width)
            for k in range(LEAVES)
        }

    step = step_of(group, shard="state")
    jax.block_until_ready(step.init(lambda: layers(32)))  # all code is loaded
    whole_mib = 3 * 4 * LEAVES * 1024**2 / MIB
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = resident_mib("VmRSS")
    state = jax.block_until_ready(step.init(lambda: layers(1024)))
    grown = resident_mib("VmHWM") - before
    assert grown < whole_mib / group.size + BESIDE_MIB, f"{grown} MiB of {whole_mib}"
    assert state.params["w3"].shape == (1024, 1024)


def resident_mib(name: str) -> float:
    (line,) = [
        x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(f"{name}:")
    ]
    return int(line.split()[1]) / 1024
