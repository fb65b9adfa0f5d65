"""Trains models by rules and schedules: `train_all.py FOLDER RUN ...`, on each of some processes.

Reads FOLDER/starts.pickle, {(model, rule): start}; writes FOLDER/result_RANK.pickle, {name of the
run: result}.
"""

import pickle
import sys
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from workers.trainings import MODELS, RULES, STEPS, Result, batch, loss_fn, precision

import fddp


class Run(NamedTuple):
    """One training on replicas."""

    model: str
    rule: str
    schedule: Any
    accumulation_steps: int = 1

    def __str__(self) -> str:
        text = f"{self.model}-{self.rule}-{self.schedule}"
        return (
            text
            if self.accumulation_steps == 1
            else f"{text}-{self.accumulation_steps}_micro_batches"
        )


RUNS = [
    *(Run(m, r, schedule) for schedule in ("overlap", "after") for m in MODELS for r in RULES),
    Run("gpt", "adamw", "overlap", accumulation_steps=2),
    Run("mlp", "sgd", "overlap", accumulation_steps=2),
]


# A run is a second of compiling on every rank, so the jobs divide the schedules: each has one for
# each rule.
QUICK = {("mpi", 3): ("gpt",), ("gloo", 2): ("resnet-bn",)}
"""The models with runs in the default tier; all are in `slow`."""
SCHEDULES = {
    ("mpi", 3): {"sgd": "overlap", "adamw": "overlap"},
    ("gloo", 2): {"sgd": "overlap", "adamw": "overlap"},
    ("mpi", 2): {"sgd": "after", "adamw": "overlap"},
    ("mpi", 4): {"sgd": "overlap", "adamw": "after"},
    ("gloo", 4): {"sgd": "after", "adamw": "after"},
}


def runs(backend: str, size: int) -> list[Run]:
    """A job's share of the runs: every model by every rule."""
    return [run for run in RUNS if run.schedule == SCHEDULES[backend, size][run.rule]]


def train(group: fddp.Group, run: Run, start: Any) -> Result:
    """A training on the replicas of a group, of which every process reads its part of each
    batch."""
    params, model_state = start
    step = fddp.train_step(
        loss_fn(run.model, run.rule, group.axis_name if run.model == "resnet-bn" else None),
        RULES[run.rule].optimizer,
        group=group,
        has_aux=True,
        schedule=run.schedule,
        accumulation_steps=run.accumulation_steps,
        bucket_cap_mb=1 / 16,  # the models are tiny; several buckets all the same
        first_bucket_mb=1 / 256,
        last_bucket_mb=1 / 256,
    )
    state = step.init(params, model_state=model_state)
    losses = []
    for number in range(STEPS):
        rows = jax.tree.map(
            lambda x: np.split(x, group.processes)[group.rank], batch(run.model, number)
        )
        state, info = step(state, rows)
        losses.append(info.loss)
    return Result(state.params, state.model_state, jnp.stack(losses))


def main(folder: Path, *names: str) -> None:
    group = fddp.init()
    starts = pickle.loads((folder / "starts.pickle").read_bytes())
    results = {}
    for run in [run for run in runs(group.backend, group.processes) if str(run) in names]:
        start = starts[run.model, run.rule]
        if group.rank > 0:  # rank 0's values count
            start = jax.tree.map(np.zeros_like, start)
        with precision(run.rule):
            results[str(run)] = jax.tree.map(np.asarray, train(group, run, start))
    (folder / f"result_{group.rank}.pickle").write_bytes(pickle.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
