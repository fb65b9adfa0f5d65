"""Ranks save and restore together; rank 0 alone sees the folder."""

import io
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from on_ranks.claims import claim, error_of

import fddp

ROWS = np.random.default_rng(3).normal(size=(12, 24, 3)).astype(np.float32)


@contextmanager
def folder(group: fddp.Group) -> Iterator[Path]:
    """An empty folder of rank 0's; the others are given a place that does not exist."""
    path = Path(tempfile.mkdtemp()) if group.rank == 0 else Path("/nowhere/at/all")
    yield path
    group.barrier()
    if group.rank == 0:
        shutil.rmtree(path)


def make(group: fddp.Group) -> tuple[fddp.TrainStep, fddp.TrainState]:
    """A step whose hook remembers something else on each rank."""
    loss = lambda p, x, *, rng: jnp.mean((x * jax.random.normal(rng, x.shape) @ p["w"] + p["b"]) ** 2)  # noqa: E731
    step = fddp.train_step(loss, optax.adam(0.1), group=group, hook=fddp.hooks.topk(0.4), bucket_cap_mb=0)
    params = {"w": np.ones((3, 4), np.float32), "b": np.zeros(4, np.float32)}
    return step, step.init(params, rng=jax.random.key(2))


def train(group: fddp.Group, step: fddp.TrainStep, state: fddp.TrainState, until: int) -> fddp.TrainState:
    for number in range(int(state.step), until):
        state, _ = step(state, np.split(ROWS[number], group.processes)[group.rank])
    return state


def own(state: fddp.TrainState) -> list[bytes]:
    """The bits of all that this process has of a state."""
    words = lambda x: jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x  # noqa: E731
    leaves: list[Any] = [words(x) for x in jax.tree.leaves(state)]
    return [np.asarray(shard.data).tobytes() for x in leaves for shard in x.addressable_shards]


@claim()
def a_training_goes_on_from_a_checkpoint_bit_for_bit(group: fddp.Group):
    calm = train(group, *make(group), 9)
    with folder(group) as path:
        step, state = make(group)
        with fddp.Checkpoints(path, step, every=5) as checkpoints:
            state = train(group, step, state, 5)
            assert checkpoints.save(state, {"shard": 3})
        step, fresh = make(group)
        with fddp.Checkpoints(path, step, every=5) as checkpoints, redirect_stderr(io.StringIO()) as told:
            state, place = checkpoints.restore(fresh)
        assert ("training goes on from step 5" in told.getvalue()) == (group.rank == 0)
        assert place == {"shard": 3}
        assert int(state.step) == 5
        assert own(train(group, step, state, 9)) == own(calm)


@claim()
def what_rank_0_cannot_open_is_an_error_on_every_rank(group: fddp.Group):
    step, _ = make(group)
    with tempfile.NamedTemporaryFile() as file:
        message = error_of(lambda: fddp.Checkpoints(file.name, step), RuntimeError)
    assert "checkpoints in" in message and "rank 0: FileExistsError" in message, message
