"""Ways of training that take turns on two hosts joined by a wire: shared by several questions.

A question is a module of bench/ with a function `ways(task, group)` that names its ways. Both ranks
make the same ways and run them in turn; a round counts as long as the slower rank took.
"""

import importlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax

import fddp

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
from bench.problems import Problem, problem
from bench.record import interleave
from bench.two_hosts import ask

BACKENDS = ("Gloo", "MPI")


def main(question: str, backend: str, name: str, rounds: int, path: Path) -> None:
    """One rank."""
    group = fddp.init(backend.lower())
    task = problem(name, seed=group.rank)
    runs = importlib.import_module(question).ways(task, group)
    seconds = interleave(runs, rounds=rounds, warm_up=1, pause=group.barrier)
    slower = {way: group.all_reduce(values, op="max").tolist() for way, values in seconds.items()}
    if group.rank == 0:
        path.write_text(json.dumps(slower))


def take_turns(
    question: str, backend: str, name: str, *, rounds: int, rate: str = "1gbit", each: int = 1
) -> dict[str, np.ndarray]:
    """Runs the ways of a question on two hosts; the first round compiles and does not count.

    Args:
      question: the file of the question, `__file__`.
      backend: "Gloo" or "MPI".
      name: of the problem.
      rounds: number of timings of each way.
      rate: of the wire, as tc writes it.
      each: ranks of a host.

    Returns:
      Seconds of each round, by way.
    """
    words = (f"bench.{Path(question).stem}", backend, name, rounds)
    seconds = ask(backend.lower(), rate, __file__, *words, each=each)
    return {way: np.array(values) for way, values in seconds.items()}


def training(
    task: Problem,
    group: fddp.Group,
    cap_mb: float,
    *,
    pending_calls: int = 0,
    cycles: int = 1,
    **more: Any,
) -> Callable[[], Any]:
    """A training of some steps, its small first and last buckets no larger than the cap.

    Args:
      task: the problem.
      group: the replicas.
      cap_mb: of a bucket, MiB.
      pending_calls: batches that each step only adds up before the one whose gradients travel.
      cycles: steps of a run.
      **more: options of `fddp.train_step`.

    Returns:
      A function that trains on.
    """
    options: Any = {"bucket_cap_mb": cap_mb, **more}
    step = fddp.train_step(task.loss_fn, optax.sgd(1e-3), group=group, has_aux=True, **options)
    state = step.init(task.params, model_state=task.model_state)

    def run() -> Any:
        nonlocal state
        for _ in range(cycles):
            for _ in range(pending_calls):
                state, _ = step.no_sync(state, task.batch)
            state, _ = step(state, task.batch)
        return jax.block_until_ready(state.params)

    return run


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]), Path(sys.argv[5]))
