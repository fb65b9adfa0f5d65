"""Trains a GPT of bytes on hosts that a slow network joins: each trains alone, and they meet every
so many steps.

mpiexec -n 2 python models/diloco.py                          two processes of this host

mpiexec -hosts node1,node2 -ppn 1 python models/diloco.py     two hosts, over MPI

The same two by hand, over Gloo, one line on each host:

FDDP_RANK=0 FDDP_SIZE=2 FDDP_COORDINATOR=node1:4711 python models/diloco.py

FDDP_RANK=1 FDDP_SIZE=2 FDDP_COORDINATOR=node1:4711 python models/diloco.py

When they meet, the changes of the replicas' parameters since the last meeting are averaged: the
gradient of an outer optimizer. So each sends as much as DDP does in one step, once in `every`
steps. The outer optimizer takes no more steps than that, here ten, after which DDP's loss is still
the lower one.

Source: Douillard et al., "DiLoCo" (2023), whose outer optimizer this is.
"""

import math
import sys
from pathlib import Path

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
    every: int = 32, steps: int = 320, batch: int = 16, seed: int = 0, quick: bool = False
) -> None:
    """Trains on Python's own sources; every tenth file is held out.

    Args:
      every: steps that a replica trains alone.
      steps: updates of each replica's parameters.
      batch: rows a step, over all replicas.
      seed: decides the first parameters and the order of rows.
      quick: few steps of a tiny model, which meets every 8 of them, as the tests run it.
    """
    every, steps = (8, 32) if quick else (every, steps)
    model = gpt.PRESETS["tiny" if quick else "bytes"]
    group = fddp.init()
    loss_fn = gpt.loss_fn(model)
    inner = optax.adamw(3e-3)
    outer = optax.sgd(0.7, momentum=0.9, nesterov=True)
    optimizer = fddp.local_steps(inner, outer=outer, every=every)
    step = fddp.train_step(loss_fn, optimizer, group=group, has_aux=True)
    params, _ = gpt.init(model, jax.random.key(seed), gpt.batch(model, 1))
    state = step.init(params)

    text, held_out = data.read_text(None, model.context)
    nbytes = 0
    rows = fddp.samples(len(text), batch, rank=group.rank, size=group.processes, seed=seed)
    for number, chosen in zip(range(1, steps + 1), rows):
        state, info = step(state, {"tokens": text[chosen].astype(np.int32)})
        nbytes += int(np.sum(info.sent))
        if number % every == 0:
            group.print(
                f"step {number}, loss {info.loss:.3f} on the rows of rank 0, {nbytes:,} bytes sent"
            )

    # One real step of DDP, to compare with.
    ddp = fddp.train_step(loss_fn, inner, group=group, has_aux=True)
    _, info = ddp(ddp.init(params), {"tokens": text[next(rows)].astype(np.int32)})
    of_ddp = steps * int(np.sum(info.sent))
    test_rows = group.rows(held_out[:: len(held_out) // 256 + 1]).astype(np.int32)
    loss, _ = fddp.evaluate(
        loss_fn, state, [{"tokens": test_rows}], group=group
    )  # of the shared parameters
    group.print(
        f"{group.size} replicas, {loss / math.log(2):.2f} bits per byte of the held-out files"
    )
    group.print(f"each replica sent {nbytes:,} bytes, DDP sends {of_ddp:,} in {steps} steps")


if __name__ == "__main__":
    tyro.cli(main)
