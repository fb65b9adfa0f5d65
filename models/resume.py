"""Trains a GPT of bytes in a job that may be ended at any time: the same command resumes it.

python models/resume.py                                           alone; `kill` it, start it again

python -m fddp run -n 2 --restarts 3 -- python models/resume.py   two processes, restarted

A state is saved now and then. SIGTERM, which schedulers send before they take a machine away, ends
the job after a step, the same on all ranks, once that step's state is saved. The bits at the end
are those of an uninterrupted job.
"""

import hashlib
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
    folder: Path = Path("runs/resume"),
    every: int = 50,
    steps: int = 300,
    batch: int = 16,
    seed: int = 0,
    quick: bool = False,
) -> None:
    """Trains on Python's own sources.

    Args:
      folder: for the checkpoints; rank 0 at least must see it.
      every: steps between two of them.
      steps: updates of the parameters.
      batch: rows a step, over all replicas.
      seed: decides the first parameters, the order of rows, and the dropped units.
      quick: few steps of a tiny model, as the tests run it.
    """
    steps, model = (30, gpt.PRESETS["tiny"]) if quick else (steps, gpt.PRESETS["bytes"])
    group = fddp.init()
    step = fddp.train_step(
        gpt.loss_fn(model.clone(dropout=0.1)), optax.adamw(3e-3), group=group, has_aux=True
    )
    params, _ = gpt.init(model, jax.random.key(seed), gpt.batch(model, 1))
    state = step.init(params, rng=jax.random.key(seed))

    text, _ = data.read_text(None, model.context)
    if (
        fddp.preempted()
    ):  # its first call takes SIGTERM over, which then waits for the end of a step
        return
    with fddp.Checkpoints(folder, step, every=every) as checkpoints:
        state, _ = checkpoints.restore(state)
        start = int(state.step)
        group.print(f"begins after step {start} of {steps}")
        rows = fddp.samples(
            len(text), batch, rank=group.rank, size=group.processes, seed=seed, start_step=start
        )
        for number, chosen in zip(range(start + 1, steps + 1), rows):
            state, info = step(state, {"tokens": text[chosen].astype(np.int32)})
            stops = fddp.preempted()
            checkpoints.save(state, now=stops or number == steps)
            if number % max(1, steps // 10) == 0:
                group.print(f"step {number}, loss {info.loss:.3f}")
            if stops:
                group.print(f"told to end, saved after step {number}")
                return
    group.print(f"parameters {digest(state.params)}")


def digest(params: Any) -> str:
    """A digest of all bits."""
    return hashlib.sha256(
        b"".join(np.asarray(x).tobytes() for x in jax.tree.leaves(params))
    ).hexdigest()[:16]


if __name__ == "__main__":
    tyro.cli(main)
