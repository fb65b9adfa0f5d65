"""Ways of training that take turns on two hosts joined by a wire: what several questions of bench/ share.

A question is a module of bench/ with a function `ways(task, group)` that names its ways. Both ranks make the same ways
and run them in turn; a round counts as long as the slower rank took.
"""

import importlib
import json
import sys
import tempfile
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
from bench.two_hosts import start_gloo, start_mpi, two_hosts

BACKENDS = {"Gloo": start_gloo, "MPI": start_mpi}


def main(question: str, backend: str, name: str, rounds: int, path: Path) -> None:
    """One rank."""
    group = fddp.init(backend.lower())
    task = problem(name, seed=group.rank)
    runs = importlib.import_module(question).ways(task, group)
    seconds = interleave(runs, rounds=rounds, warm_up=1, pause=group.barrier)
    slower = {way: group.all_reduce(values, op="max").tolist() for way, values in seconds.items()}
    if group.rank == 0:
        path.write_text(json.dumps(slower))


def take_turns(question: str, backend: str, name: str, *, rounds: int, rate: str = "1gbit") -> dict[str, np.ndarray]:
    """Runs the ways of a question on two hosts; the first round compiles and does not count.

    Args:
      question: the file that asks, `__file__`.
      backend: "Gloo" or "MPI".
      name: of the problem.
      rounds: how often each way is timed.
      rate: of the wire, as tc writes it.

    Returns:
      Seconds of each round, by way.

    Raises:
      RuntimeError: a rank failed.
    """
    with two_hosts(rate), tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "seconds.json"
        words = [f"bench.{Path(question).stem}", backend, name, str(rounds), str(path)]
        jobs = BACKENDS[backend]([sys.executable, __file__, *words], {"PYTHONPATH": str(ROOT)})
        try:
            if any(job.wait(900) for job in jobs):
                raise RuntimeError(f"{name} over {backend} failed; its error is above.")
        finally:
            for job in jobs:
                job.terminate()
        return {way: np.array(values) for way, values in json.loads(path.read_text()).items()}


def staged(task: Problem, group: fddp.Group, cap_mb: float, *, held: int = 0, cycles: int = 1) -> Callable[[], Any]:
    """A staged training of some steps, its small first and last buckets no larger than the cap.

    Args:
      task: what is trained.
      group: the replicas.
      cap_mb: of a bucket, MiB.
      held: batches that each step only adds up before the one whose gradients travel.
      cycles: steps of a run.

    Returns:
      A function that trains on.
    """
    small = min(cap_mb, 1.0)
    caps = {"bucket_cap_mb": cap_mb, "first_bucket_mb": small, "last_bucket_mb": small}
    step = fddp.train_step(task.loss_fn, optax.sgd(1e-3), group=group, has_aux=True, schedule="staged", **caps)
    state = step.init(task.params, model_state=task.model_state)

    def run() -> Any:
        nonlocal state
        for _ in range(cycles):
            for _ in range(held):
                state, _ = step.no_sync(state, task.batch)
            state, _ = step(state, task.batch)
        return jax.block_until_ready(state.params)

    return run


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]), Path(sys.argv[5]))
