"""Virtual replicas: how much time do they cost?

    sudo .venv/bin/python bench/virtual.py [--problems mlp640 gpt] [--backends gloo mpi] [--quick]

Two hosts joined by 1 Gbit/s (bench/two_hosts.py), one core each, SGD. With one virtual replica on
each host against the ordinary step, and with eight on each against eight micro-batches;
steps take turns.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import optax

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
import fddp
from bench.problems import problem
from bench.record import interleave, ratio, save, summary
from bench.two_hosts import BACKENDS, ask

EIGHT = 8
# Each way, and its reference.
WAYS: dict[str, tuple[dict[str, Any], str]] = {
    "ordinary": ({}, "ordinary"),
    "virtual": ({"virtual_replicas": 2}, "ordinary"),
    "ordinary, eight micro-batches": (
        {"accumulation_steps": EIGHT},
        "ordinary, eight micro-batches",
    ),
    "virtual, eight each": ({"virtual_replicas": 2 * EIGHT}, "ordinary, eight micro-batches"),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--problems", nargs="+", default=["mlp640", "gpt"], help="of bench/problems.py"
    )
    parser.add_argument("--backends", nargs="+", default=list(BACKENDS), choices=BACKENDS)
    parser.add_argument("--rate", default="1gbit")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--quick", action="store_true", help="3 rounds, nothing is saved")
    parser.add_argument(
        "--rank", nargs=3, help=argparse.SUPPRESS
    )  # backend, problem, path: this is one of the hosts
    args = parser.parse_args()
    rounds = 3 if args.quick else args.rounds
    if args.rank:
        backend, name, path = args.rank
        return one_host(backend, name, path, rounds)
    results: dict[str, Any] = {}
    for name in args.problems:
        for backend in args.backends:
            result = ask(backend, args.rate, __file__, "--rounds", rounds, "--rank", backend, name)
            results[f"{name}, {backend}"] = result
            for way, entry in result.items():
                print(
                    f"{name}, {backend}, {way:30} {entry['step']['median_ms']:7.1f} ms, "
                    f"{entry['ratio']['median']:.3f}"
                )
    if not args.quick:
        print(save("virtual", results))
    return None


def one_host(backend: str, name: str, path: str, rounds: int) -> None:
    """One host's part."""
    group = fddp.init(backend)
    rows = problem(name, seed=group.rank)
    row_count = len(next(iter(rows.batch.values())))
    task = rows._replace(
        batch={
            key: np.resize(x, (-(-row_count // EIGHT) * EIGHT, *x.shape[1:]))
            for key, x in rows.batch.items()
        }
    )

    def training(options: dict[str, Any]) -> Any:
        chosen: Any = {"bucket_cap_mb": 2, "last_bucket_mb": 2} | options
        step = fddp.train_step(task.loss_fn, optax.sgd(0.01), group=group, has_aux=True, **chosen)
        state = step.init(task.params, model_state=task.model_state)

        def run() -> Any:
            nonlocal state
            state, info = step(state, task.batch)
            return state, info

        return run

    runs = {way: training(options) for way, (options, _) in WAYS.items()}
    seconds = interleave(runs, rounds=rounds, pause=group.barrier)
    slower = {way: group.all_reduce(durations, op="max") for way, durations in seconds.items()}
    if group.rank == 0:
        report = {
            way: {"step": summary(slower[way]), "ratio": ratio(slower[way], slower[reference])}
            for way, (_, reference) in WAYS.items()
        }
        Path(path).write_text(json.dumps(report))


if __name__ == "__main__":
    main()
