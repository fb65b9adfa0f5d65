"""Ways of training that take turns on two hosts joined by a wire: shared by several questions.

A question is a module of bench/ with a function `ways(task, group)` that names its ways. Both ranks
make the same ways and run them in turn; a round counts as long as the slower rank took.
"""

import argparse
import importlib
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax

import fddp

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
from bench.problems import Problem, problem
from bench.record import interleave, question, ratio, summary
from bench.two_hosts import ask

BACKENDS = ("Gloo", "MPI")


def main(module: str, backend: str, name: str, rounds: int, path: Path) -> None:
    """One rank."""
    group = fddp.init(backend.lower())
    task = problem(name, seed=group.rank)
    runs = importlib.import_module(module).ways(task, group)
    seconds = interleave(runs, rounds=rounds, warm_up=1, pause=group.barrier)
    slower = {way: group.all_reduce(values, op="max").tolist() for way, values in seconds.items()}
    if group.rank == 0:
        path.write_text(json.dumps(slower))


def on_two_hosts(
    description: str | None, problems: Sequence[str], rounds: int
) -> argparse.ArgumentParser:
    """Makes the arguments of a question; `--quick` takes the first problem and backend."""
    parser = question(description, "1 round of the first problem, over the first backend")
    parser.add_argument("--problems", nargs="+", default=problems, help="of bench/problems.py")
    parser.add_argument("--backends", nargs="+", default=list(BACKENDS), choices=BACKENDS)
    parser.add_argument("--rounds", type=int, default=rounds)
    return parser


def take_turns(
    file: str,
    args: argparse.Namespace,
    *,
    steps: int = 1,
    references: Mapping[str, str] | None = None,
    each: int = 1,
) -> dict[str, Any]:
    """Runs the ways of a question on two hosts, `each` ranks of a host, and prints a table.

    A run has some `steps`. Returns the quartiles of each way's step for each problem and backend,
    and of its ratio to its reference, which is the first way if `references` names none.
    """
    results = dict[str, Any]()
    few = 1 if args.quick else None
    for name in args.problems[:few]:
        for backend in args.backends[:few]:
            words = (f"bench.{Path(file).stem}", backend, name, few or args.rounds)
            found = ask(backend.lower(), "1gbit", __file__, *words, each=each)
            seconds = {way: np.array(values) for way, values in found.items()}
            first = next(iter(seconds))
            results[f"{name}, {backend}"] = rows = {
                way: summary(values / steps)
                | {"ratio": ratio(values, seconds[(references or {}).get(way, first)])}
                for way, values in seconds.items()
            }
            print(f"\n{name}, {backend}")
            print("\n".join(map(line, rows, rows.values())), flush=True)
    return results


def line(way: str, row: Mapping[str, Any]) -> str:
    times = "{median_ms:8.1f} ms ({quartile_1_ms:.1f} to {quartile_3_ms:.1f})".format(**row)
    return f"{way:30} {times}, " + "{median:.3f} ({quartile_1:.3f} to {quartile_3:.3f})".format(
        **row["ratio"]
    )


def training(
    task: Problem,
    group: fddp.Group,
    cap_mb: float,
    *,
    optimizer: optax.GradientTransformation | None = None,
    pending_calls: int = 0,
    steps: int = 1,
    **more: Any,
) -> Callable[[], Any]:
    """Makes a function that trains on by some steps, each of which adds up `pending_calls` batches
    without traffic before its own; the optimizer is SGD by default."""
    options: Any = {"bucket_cap_mb": cap_mb, **more}
    rule = optimizer or optax.sgd(1e-3)
    step = fddp.train_step(task.loss_fn, rule, group=group, has_aux=True, **options)
    state = step.init(task.params, model_state=task.model_state)

    def run() -> Any:
        nonlocal state
        for _ in range(steps):
            for _ in range(pending_calls):
                state, _ = step.no_sync(state, task.batch)
            state, _ = step(state, task.batch)
        return jax.block_until_ready(state.params)

    return run


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]), Path(sys.argv[5]))
