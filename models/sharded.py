"""Trains a GPT of bytes whose parameters and moments no replica holds whole.

JAX_NUM_CPU_DEVICES=4 python models/sharded.py     four devices of one process

mpiexec -n 2 python models/sharded.py              two processes over MPI

With `shard="state"` each replica keeps its part of the parameters and of AdamW's two moments, and
with a function in place of parameters it never has more. A step gathers the parameters, layer after
layer as a pass comes to them, drops them behind it, and scatters the gradients. Model, loss and
optimizer are those of one device; clipping by the norm over all parameters is one more sum.

Source: Rajbhandari et al., "ZeRO" (2020), stage 3.
"""

import math
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import tyro

import fddp

sys.path.append(
    str(Path(__file__).parents[1])
)  # where models is, with fddp installed and run from anywhere
from models import data, gpt


def main(
    steps: int = 200, batch: int = 16, save: Path | None = None, seed: int = 0, quick: bool = False
) -> None:
    """Trains on Python's own sources; every tenth file is held out.

    Args:
      steps: updates of the parameters.
      batch: rows a step, over all replicas.
      save: a folder that all ranks see, for a checkpoint of the end, which goes on on any number of
        replicas, with `shard` or without.
      seed: decides the first parameters and the order of rows.
      quick: few steps of a tiny model, as the tests run it.
    """
    steps, model = (20, gpt.PRESETS["tiny"]) if quick else (steps, gpt.PRESETS["bytes"])
    group = fddp.init()
    loss_fn = gpt.loss_fn(model)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(3e-3))
    shards: Any = {"shard": "state", "bucket_cap_mb": 1}
    step = fddp.train_step(loss_fn, optimizer, group=group, has_aux=True, **shards)

    params, _ = gpt.init(model, jax.random.key(seed), gpt.batch(model, 1))
    state = step.init(params)
    full_mib = mib((params, jax.eval_shape(optimizer.init, params)))
    part_mib = mib(
        jax.tree.map(lambda x: x.addressable_shards[0].data, (state.params, state.opt_state))
    )
    group.print(
        f"each of {group.size} replicas holds {part_mib:.3f} MiB, the state has {full_mib:.3f} MiB"
    )

    text, held_out = data.read_text(None, model.context)
    rows = fddp.samples(len(text), batch, rank=group.rank, size=group.processes, seed=seed)
    for number, chosen in zip(range(1, steps + 1), rows):
        state, info = step(state, {"tokens": text[chosen].astype(np.int32)})
        if number == 1 or number % max(1, steps // 4) == 0:
            group.print(f"step {number}, loss {info.loss:.3f}")

    # fddp.evaluate puts a state together by itself, and fddp.whole(state) does it for the rest.
    test_rows = group.rows(held_out[:: len(held_out) // 256 + 1]).astype(np.int32)
    loss, _ = fddp.evaluate(loss_fn, state, [{"tokens": test_rows}], group=group)
    group.print(f"{loss / math.log(2):.4f} bits per byte of the held-out files")
    if save is not None:
        with fddp.Checkpoints(save, step) as checkpoints:
            checkpoints.save(state, now=True)


def mib(tree: Any) -> float:
    """The size of arrays, or of their forms."""
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree)) / 2**20


if __name__ == "__main__":
    tyro.cli(main)
