"""Sharing the optimizer's state: how much time does it cost, and how much memory does it save?

    sudo .venv/bin/python bench/sharding.py [--problems mlp640 gpt] [--backends gloo mpi] [--ways …]
    [--quick]

Two hosts joined by 1 Gbit/s (bench/two_hosts.py), one core each, AdamW. Whole and shared state take
turns of four steps, the first of which finds traffic of another training under way and does not
count. Memory is counted from the arrays that a state holds, on rank 0.

Source: ZeRO (Rajbhandari et al., SC 2020), stage 1.
"""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
import fddp
from bench.problems import Problem, problem
from bench.record import ratio, save, summary
from bench.two_hosts import BACKENDS, ask
from fddp.buckets import MiB

STEPS = 4  # of a turn
WAYS: dict[str, dict[str, Any]] = {
    "whole, overlap": {"schedule": "overlap"},
    "optimizer, overlap": {"schedule": "overlap", "shard": "optimizer"},
    "state, overlap": {"schedule": "overlap", "shard": "state"},
    "whole, after": {"schedule": "after"},
    "optimizer, after": {"schedule": "after", "shard": "optimizer"},
    "state, after": {"schedule": "after", "shard": "state"},
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--problems", nargs="+", default=["mlp640", "gpt"], help="of bench/problems.py"
    )
    parser.add_argument("--backends", nargs="+", default=list(BACKENDS), choices=BACKENDS)
    ways_help = "ways to hold a state; each is compared with a whole state under its schedule"
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=WAYS, help=ways_help)
    parser.add_argument("--rate", default="1gbit")
    parser.add_argument("--cap", type=float, default=4.0, help="of all buckets, MiB")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--name", default="sharding", help="of the file in bench/results")
    parser.add_argument("--quick", action="store_true", help="two rounds, nothing is saved")
    parser.add_argument(
        "--rank", nargs=3, help=argparse.SUPPRESS
    )  # backend, problem, path: this is one of the hosts
    args = parser.parse_args()
    rounds = 2 if args.quick else args.rounds
    if args.rank:
        backend, name, path = args.rank
        return one_host(backend, name, path, rounds, args.cap, args.ways)
    results: dict[str, Any] = {}
    for name in args.problems:
        for backend in args.backends:
            words = [
                "--rounds",
                rounds,
                "--cap",
                args.cap,
                "--ways",
                *args.ways,
                "--rank",
                backend,
                name,
            ]
            results[f"{name}, {backend}"] = result = ask(backend, args.rate, __file__, *words)
            for way, entry in result.items():
                times = (
                    f"{entry['step']['median_ms']:7.1f} ms, {entry['to_whole']['median']:.3f} of "
                    f"whole"
                )
                memory = (
                    f"optimizer {entry['optimizer_mib']:.1f} MiB, parameters "
                    f"{entry['parameters_mib']:.1f} MiB"
                )
                print(f"{name}, {backend}, {way:17} {times}; {memory}")
    if not args.quick:
        print(save(args.name, results))
    return None


def one_host(
    backend: str, name: str, path: str, rounds: int, cap_mb: float, chosen: list[str]
) -> None:
    """One host's part."""
    group = fddp.init(backend)
    task = problem(name, seed=group.rank)
    ways = {way: Training(task, group, cap_mb, **WAYS[way]) for way in chosen}
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for turn in range(-1, rounds):
        for way, training in ways.items():
            group.barrier()
            # The first step meets pending traffic of another training.
            duration = [training.step_seconds() for _ in range(STEPS)][1:]
            jax.block_until_ready(
                training.state
            )  # nor shall the next training meet that of this one
            seconds[way] += duration if turn >= 0 else []
    slower = {
        way: group.all_reduce(np.array(durations), op="max") for way, durations in seconds.items()
    }
    if group.rank == 0:
        report = {
            way: {
                "step": summary(slower[way]),
                "to_whole": ratio(
                    slower[way],
                    slower["whole, after" if way.endswith("after") else "whole, overlap"],
                ),
                "optimizer_mib": round(local_bytes(training.state.opt_state) / MiB, 2),
                "parameters_mib": round(local_bytes(training.state.params) / MiB, 2),
                "sent_mib": round(
                    int(np.sum(np.asarray(training.info.sent), dtype=np.int64)) / MiB, 2
                ),
            }
            for way, training in ways.items()
        }
        Path(path).write_text(json.dumps(report))


class Training:
    """A training that takes a step on demand."""

    def __init__(self, task: Problem, group: fddp.Group, cap_mb: float, **options: Any) -> None:
        caps = dict.fromkeys(("bucket_cap_mb", "first_bucket_mb", "last_bucket_mb"), cap_mb)
        self.step = fddp.train_step(
            task.loss_fn, optax.adamw(1e-4), group=group, has_aux=True, **caps, **options
        )
        self.state = self.step.init(task.params, model_state=task.model_state)
        self.batch = task.batch

    def step_seconds(self) -> float:
        """Takes a step and waits for its report, as a loop that prints it."""
        begin = time.perf_counter()
        self.state, self.info = self.step(self.state, self.batch)
        jax.block_until_ready(self.info)
        return time.perf_counter() - begin


def local_bytes(tree: Any) -> int:
    """Bytes of the arrays of this process."""
    return sum(shard.data.nbytes for x in jax.tree.leaves(tree) for shard in x.addressable_shards)


if __name__ == "__main__":
    main()
