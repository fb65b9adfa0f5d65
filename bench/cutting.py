"""Cutting the backward pass into stages: how much does it cost, when there is no traffic to hide?

    python bench/cutting.py [--cores 1 --name cutting_one_core] [--quick]

One process, one replica: schedule "staged" against the one program of "fused". Time is measured in
turns in one process; compile time and peak memory in a fresh process each. Then the same problem in
1, 2, 4, … 64 buckets. With `--cores 1` as a host of bench/two_hosts.py does it: two threads of XLA
on one core.
"""

import argparse
import ctypes
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax

import fddp

sys.path.insert(0, str(Path(__file__).parents[1]))
from bench.problems import problem
from bench.record import interleave, ratio, save, summary

PROBLEMS = ("mlp", "resnet50", "gpt")
BUCKETS = (1, 2, 4, 8, 16, 32, 64)
OPTIMIZER = optax.sgd(1e-3)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--cores", type=int, default=None, help="on how many (default: all that there are)"
    )
    parser.add_argument("--name", default="cutting", help="of the file in bench/results")
    parser.add_argument("--quick", action="store_true", help="few rounds, nothing is saved")
    parser.add_argument("--alone", nargs=2, metavar=("PROBLEM", "SCHEDULE"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.alone:
        print(json.dumps(first_step(*args.alone)))
        return
    cores = sorted(os.sched_getaffinity(0))[: args.cores]
    os.sched_setaffinity(0, cores)
    os.environ["NPROC"] = str(max(2, len(cores)))  # XLA reads it when it starts
    rounds = 3 if args.quick else 15
    results: dict[str, Any] = {name: measure(name, rounds) for name in PROBLEMS}
    for name, result in results.items():
        print(
            f"{name:9} {result['buckets']} buckets: time {result['staged / fused']['median']:.3f}, "
            f"compile time {result['compile time']:.2f}, peak memory {result['peak memory']:.2f} "
            f"of one program's"
        )
    results["per bucket"] = per_bucket(rounds)
    for count, row in results["per bucket"].items():
        print(
            f"{count:>3} buckets {row['median_ms']:8.2f} ms, {row['ms a bucket more']:+.3f} ms a "
            f"bucket"
        )
    if not args.quick:
        print(save(args.name, results))


def measure(name: str, rounds: int) -> dict[str, Any]:
    """Time in turns, compile time and memory in processes of their own."""
    runs = {schedule: _run(name, schedule) for schedule in ("fused", "staged")}
    seconds = interleave({schedule: run for schedule, (run, _) in runs.items()}, rounds=rounds)
    fresh = {schedule: _fresh(name, schedule) for schedule in runs}
    return {
        "buckets": len(runs["staged"][1].plan.buckets),
        **{schedule: summary(values) for schedule, values in seconds.items()},
        "staged / fused": ratio(seconds["staged"], seconds["fused"]),
        "compile time": fresh["staged"]["first_step_s"] / fresh["fused"]["first_step_s"],
        "peak memory": fresh["staged"]["peak_mb"] / fresh["fused"]["peak_mb"],
        "fresh": fresh,
    }


def per_bucket(rounds: int) -> dict[int, dict[str, float]]:
    """Step time of a 64-layer network whose leaves are gathered in more and more buckets."""
    width = 64
    layers = 64
    params = [np.full((width, width), 1 / width, np.float32) for _ in range(layers)]
    batch = np.ones((64, width), np.float32)

    def loss_fn(params: Any, x: Any) -> Any:
        for w in params:
            x = jax.numpy.tanh(x @ w)
        return jax.numpy.mean(x**2)

    runs = {}
    for count in BUCKETS:
        cap = layers // count * width * width * 4 / 2**20
        caps: Any = {"bucket_cap_mb": cap, "first_bucket_mb": cap, "last_bucket_mb": cap}
        step = fddp.train_step(loss_fn, OPTIMIZER, schedule="staged", **caps)
        runs[count] = _runner(step, step.init(params), batch)
    seconds = interleave({str(count): run for count, run in runs.items()}, rounds=10 * rounds)
    base = np.median(seconds["1"])
    return {
        count: {
            **summary(seconds[str(count)]),
            "ms a bucket more": round(
                1e3 * float(np.median(seconds[str(count)]) - base) / max(1, count - 1), 4
            ),
        }
        for count in BUCKETS
    }


def first_step(name: str, schedule: str) -> dict[str, float]:
    """First step and peak memory of this process."""
    start = time.perf_counter()
    run, _ = _run(name, schedule)
    built = time.perf_counter()
    jax.block_until_ready(run())
    first = time.perf_counter() - built
    jax.block_until_ready(run())
    # The memory of compiling goes back to the system, and its peak is reset.
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    idle = _resident("VmRSS")
    for _ in range(3):
        jax.block_until_ready(run())
    return {
        "first_step_s": first,
        "start_s": built - start,
        "idle_mb": idle,
        "peak_mb": _resident("VmHWM"),
    }


def _resident(name: str) -> float:
    (line,) = (
        line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name)
    )
    return int(line.split()[1]) / 1024


def _fresh(name: str, schedule: str) -> dict[str, float]:
    # Freed memory goes back to the system at once, so that only live memory is measured.
    env = os.environ | {"MALLOC_MMAP_THRESHOLD_": str(2**20)}
    command = [sys.executable, __file__, "--alone", name, schedule]
    process = subprocess.run(command, capture_output=True, text=True, check=True, env=env)
    return json.loads(process.stdout.splitlines()[-1])


def _run(name: str, schedule: Any) -> tuple[Any, fddp.TrainStep]:
    task = problem(name, seed=0)
    step = fddp.train_step(
        task.loss_fn, OPTIMIZER, has_aux=True, schedule=schedule, bucket_cap_mb=4
    )
    return _runner(step, step.init(task.params, model_state=task.model_state), task.batch), step


def _runner(step: fddp.TrainStep, state: fddp.TrainState, batch: Any) -> Any:
    def run() -> Any:
        nonlocal state
        state, info = step(state, batch)
        return state, info

    return run


if __name__ == "__main__":
    main()
