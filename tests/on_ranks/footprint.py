"""The predicted memory of a step, against the memory of the process."""

import ctypes
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from on_ranks.claims import claim, sampled

import fddp
from fddp.buckets import MiB

WIDTH = 1024
LEAVES = 8
CARRYING_MIB = 32  # other memory of MPI and the heap
M_MMAP_THRESHOLD = (
    -3
)  # of glibc's mallopt: larger blocks go back to the system as soon as they are free
WAYS: tuple[dict[str, Any], ...] = (
    {},
    {"shard": "optimizer"},
    {"shard": "state"},
    {"schedule": "eager"},
)


def loss_fn(params: Any, x: jax.Array) -> jax.Array:
    for w in params.values():
        x = jnp.tanh(x @ w)
    return jnp.mean(x**2)


@claim(backends=("mpi",), sizes=(2, 3), quick=("mpi",))
def a_step_takes_about_the_memory_that_is_told(group: fddp.Group):
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 2**16)
    rows = np.ones((2, WIDTH), np.float32)
    for way in sampled(group, WAYS):
        options: dict[str, Any] = {"schedule": "staged", "bucket_cap_mb": 0} | way
        step = fddp.train_step(loss_fn, optax.adam(0.1), group=group, **options)
        state = step.init({f"w{k}": jnp.full((WIDTH, WIDTH), 0.01) for k in range(LEAVES)})
        predicted = fddp.audit(step, state, rows).memory
        assert predicted is not None
        for _ in range(2):
            state = jax.block_until_ready(step(state, rows)[0])
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak
        before = resident_mib("VmRSS")
        state = jax.block_until_ready(step(state, rows)[0])
        peak = predicted.given / MiB + resident_mib("VmHWM") - before
        summary = f"{way}: {peak:.1f} MiB, {predicted.peak / MiB:.1f} told"
        # XLA plans buffers that it does not always touch.
        assert 0.75 * predicted.peak / MiB < peak < predicted.peak / MiB + CARRYING_MIB, summary


def resident_mib(name: str) -> float:
    (line,) = [
        x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(f"{name}:")
    ]
    return int(line.split()[1]) / 1024
