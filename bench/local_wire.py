r"""Sending a fragment under `fddp.local_steps`: how much longer is the step than one without?

    sudo .venv/bin/python bench/local_wire.py [--problems mlp640 gpt] [--backends gloo mpi] \
        [--quick]

Two hosts joined by 1 Gbit/s (bench/two_hosts.py), one core each, 16 steps between two
synchronizations: all parameters at once behind the step that makes them (delay 0) or during the
next one (delay 1), or a quarter or an eighth of them so. A step counts as long as the slower host
takes.

Source: Douillard et al., "Streaming DiLoCo with overlapping communication" (2025).
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
from bench.record import save, summary
from bench.two_hosts import BACKENDS, ask

EVERY = 16
# Fragments, delay.
WAYS = {
    "all at once, delay 0": (1, 0),
    "all at once, delay 1": (1, 1),
    "a quarter, delay 1": (4, 1),
    "an eighth, delay 1": (8, 1),
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
    parser.add_argument("--rounds", type=int, default=3, help="of 16 steps each")
    parser.add_argument("--quick", action="store_true", help="two rounds, nothing is saved")
    parser.add_argument(
        "--rank", nargs=3, help=argparse.SUPPRESS
    )  # backend, problem, path: this is one of the hosts
    args = parser.parse_args()
    rounds = 2 if args.quick else args.rounds
    if args.rank:
        backend, name, path = args.rank
        return one_host(backend, name, path, rounds)
    results: dict[str, Any] = {}
    for name in args.problems:
        for backend in args.backends:
            result = ask(backend, args.rate, __file__, "--rounds", rounds, "--rank", backend, name)
            results[f"{name}, {backend}"] = result
            for way, row in result.items():
                times = (
                    f"{row['sends']['median_ms']:7.1f} ms, {row['alone']['median_ms']:7.1f} ms "
                    f"without"
                )
                print(
                    f"{name}, {backend}, {way:20} {times}: {row['ratio']:.3f}; {row['mib']:.1f} "
                    f"MiB a fragment"
                )
    if not args.quick:
        print(save("local_wire", results))
    return None


def one_host(backend: str, name: str, path: str, rounds: int) -> None:
    """One host's part."""
    group = fddp.init(backend)
    task = problem(name, seed=group.rank)
    ways = {way: training(task, group, *options) for way, options in WAYS.items()}
    turns_of_way: dict[str, list[tuple[float, int]]] = {way: [] for way in ways}
    for turn in range(-2, rounds):  # with a delay the first fragment leaves in the second
        for way, run in ways.items():
            for _ in range(EVERY):
                group.barrier()
                seconds_and_bytes = run()
                turns_of_way[way] += [seconds_and_bytes] if turn >= 0 else []
    report = {}
    for way, turns in turns_of_way.items():
        seconds = np.array([seconds_and_bytes[0] for seconds_and_bytes in turns])
        nbytes = np.array([seconds_and_bytes[1] for seconds_and_bytes in turns])
        slower = group.all_reduce(seconds, op="max")
        sending = slower[nbytes > 0]
        silent = slower[nbytes == 0]
        report[way] = {
            "sends": summary(sending),
            "alone": summary(silent),
            "ratio": round(float(np.median(sending) / np.median(silent)), 4),
            "mib": round(nbytes.max() / 2**20, 2),
        }
    if group.rank == 0:
        Path(path).write_text(json.dumps(report))


def training(task: Problem, group: fddp.Group, fragments: int, delay: int) -> Any:
    """A function that takes a step, and returns its seconds and the bytes sent."""
    optimizer = fddp.local_steps(optax.sgd(0.01), every=EVERY, fragments=fragments, delay=delay)
    step = fddp.train_step(
        task.loss_fn,
        optimizer,
        group=group,
        has_aux=True,
        schedule="staged",
        bucket_cap_mb=2,
        last_bucket_mb=2,
    )
    state = step.init(task.params, model_state=task.model_state)

    def run() -> tuple[float, int]:
        nonlocal state
        begin = time.perf_counter()
        state, info = jax.block_until_ready(step(state, task.batch))
        return time.perf_counter() - begin, int(np.sum(np.asarray(info.sent), dtype=np.int64))

    return run


if __name__ == "__main__":
    main()
