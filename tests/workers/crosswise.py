"""A job of some backend saves states, and another restores them: `crosswise.py FOLDERS WORD ...`.

`save:SHARD` saves a state after one, two or three steps in FOLDER/SHARD, `restore:SHARD:OTHER`
restores it as OTHER; SHARD is "None", "optimizer" or "state". Colons separate FOLDERS. For each of
them and each word rank 0 prints the name of the folder and the digest of the whole state.
"""

import hashlib
import os
import sys
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import fddp

SHARDS = ("None", "optimizer", "state")
ROWS = np.sin(np.arange(24 * 3, dtype=np.float32)).reshape(24, 3)


@cache
def make(group: fddp.Group, shard: str) -> tuple[fddp.TrainStep, fddp.TrainState]:
    """A step with leaves of several dtypes, cut with padding, layer by layer, or into fewer parts
    than replicas.

    It leaves its first state as it is.
    """

    def loss(p: Any, x: Any, *, rng: Any) -> jax.Array:
        x = x + 0.1 * jax.random.normal(rng, x.shape)
        h, _ = jax.lax.scan(
            lambda h, w: (jnp.tanh(h @ w), None), x @ p["w"] + p["b"].astype(x.dtype), p["stack"]
        )
        return jnp.mean(h**2) + p["pair"][1] ** 2

    options: Any = {"shard": None if shard == "None" else shard, "donate": False}
    step = fddp.train_step(loss, optax.adam(0.1), group=group, **options)
    params = {
        "w": np.cos(np.arange(60, dtype=np.float32)).reshape(3, 20),
        "b": jnp.ones(20, jnp.bfloat16),
        "stack": np.sin(np.arange(3 * 20 * 20, dtype=np.float32)).reshape(3, 20, 20),
        "pair": np.ones(2, np.float32),
        "empty": np.zeros((0, 2), np.float32),
    }
    return step, step.init(params, rng=jax.random.key(3))


def digest(group: fddp.Group, state: fddp.TrainState) -> str:
    bits = hashlib.sha256()
    gathered = fddp.whole(state, group=group)
    for x in jax.tree.leaves(gathered._replace(rng=jax.random.key_data(gathered.rng))):
        bits.update(f"{x.dtype}{x.shape}".encode() + np.asarray(x).tobytes())
    return bits.hexdigest()


def does(group: fddp.Group, folder: Path, word: str) -> str:
    """Saves or restores; the digest."""
    act, saved, *targets = word.split(":")
    step, state = make(group, targets[0] if targets else saved)
    with fddp.Checkpoints(folder / saved, step) as checkpoints:
        if act == "save":
            for _ in range(1 + SHARDS.index(saved)):
                state, _ = step(state, np.split(ROWS, group.processes)[group.rank])
            checkpoints.save(state, now=True)
        else:
            state, _ = checkpoints.restore(state)
    return digest(group, state)


def main(folders: str, *words: str) -> None:
    group = fddp.init()
    for folder in map(Path, folders.split(os.pathsep)):
        for word in words:
            group.print(folder.name, word, does(group, folder, word))


if __name__ == "__main__":
    main(*sys.argv[1:])
