"""All ranks start from rank 0's values."""

import resource

import jax
import jax.numpy as jnp
import numpy as np
import optax
from on_ranks.claims import claim, same_on_all_ranks
from problems import rows, towards_the_mean

import fddp
from fddp.jax_internals import processes


@claim(backends=("gloo",), sizes=(2,))
def gloo_listens_where_the_ranks_of_a_host_have_come_in(group: fddp.Group):
    """Not at the address that the host's name has, if it has one."""
    assert processes._jax.make_gloo_tcp_collectives.keywords == {"hostname": "127.0.0.1"}


@claim()
def a_step_starts_from_rank_0s_values_bit_for_bit(group: fddp.Group):
    nan = np.array([0x7FC12345, 0x80000000], np.uint32).view(
        np.float32
    )  # a NaN with a payload, and -0.0
    root_params = {
        "bf16": np.full((2, 1), 1.5, jnp.bfloat16),
        "empty": np.zeros((0, 2), np.float32),
        "float64": np.array([1 / 3], np.float64),
        "int": np.array([2**31 - 1], np.int32),
        "nan": nan,
        "scalar": np.float32(0.1),
    }
    local = root_params if group.rank == 0 else jax.tree.map(np.zeros_like, root_params)
    jax.config.update("jax_enable_x64", True)
    try:
        step = fddp.train_step(lambda p, x: jnp.mean(x), optax.sgd(0.1), group=group)
        state = step.init(
            local, model_state={"key": jax.random.key(group.rank)}, rng=jax.random.key(group.rank)
        )
    finally:
        jax.config.update("jax_enable_x64", False)
    for name, value in root_params.items():
        assert state.params[name].dtype == value.dtype, name
        assert np.asarray(state.params[name]).tobytes() == value.tobytes(), name
    for key in (state.rng, state.model_state["key"]):
        assert np.array_equal(jax.random.key_data(key), jax.random.key_data(jax.random.key(0)))


@claim()
def init_leaves_the_callers_arrays_alone(group: fddp.Group):
    local = jnp.full(2, group.rank, jnp.float32)
    step = towards_the_mean(group)
    state, _ = step(step.init(local), rows(1.0))
    assert local.tolist() == [group.rank] * 2
    assert same_on_all_ranks(group, state.params)


@claim(backends=("mpi", "gloo"), sizes=(2,))
def a_program_finds_the_memory_that_its_last_call_has_freed(group: fddp.Group):
    """Otherwise the kernel maps its pages again in each call, and each page is a fault.

    A small array may stay where a large one was, and the heap then grows once: 2 of 345 calls on a
    busy machine.
    """
    x = jnp.ones((3072, 4096), jnp.float32)  # 48 MiB, 12,288 pages
    program = jax.jit(lambda x: (2 * x) @ x[0])

    def faults() -> int:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        program(x).block_until_ready()
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

    for _ in range(40):  # small arrays between large ones find their places
        faults()
    assert sorted(faults() for _ in range(9))[-2] < 3072
