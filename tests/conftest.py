"""Every test sees eight CPU devices in one process, float32 by default, and the same random examples each time."""

import os
from collections.abc import Callable, Iterator
from functools import cache

import hypothesis
import jax
import numpy as np
import pytest
from jax.sharding import Mesh
from processes import UNOPTIMIZED

import fddp

collect_ignore = ["workers", "on_ranks", "step/typed_calls.py"]  # scripts, whose examples pytest would look for

# Before any test asks for a device: JAX's backends start once and then keep what they were told.
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
os.environ |= UNOPTIMIZED  # also of what a test starts
jax.config.update("jax_disable_most_optimizations", True)

# XLA compiles for each new shape, so an example takes as long as it takes.
hypothesis.settings.register_profile("fddp", deadline=None, derandomize=True, max_examples=40)
hypothesis.settings.load_profile("fddp")


@cache
def first_replicas(count: int) -> fddp.Group:
    return fddp.mesh_group(Mesh(np.array(jax.devices()[:count]), "replica"))


@pytest.fixture
def group() -> Callable[[int], fddp.Group]:
    """`group(n)`: replicas on the first n devices."""
    return first_replicas


@pytest.fixture
def x64() -> Iterator[None]:
    """Float64 inside this test only."""
    with jax.enable_x64(True):
        yield


@pytest.fixture
def optimized() -> Iterator[None]:
    """XLA's usual optimizations: for claims about what it makes of a program."""
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", True)


@pytest.fixture(autouse=True)
def no_leaks() -> Iterator[None]:
    """A test leaves the precision as it found it."""
    yield
    assert not jax.config.read("jax_enable_x64")
