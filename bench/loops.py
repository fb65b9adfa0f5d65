"""Layers under `lax.scan`, and BatchNorm over all replicas: how much do they cost between two
hosts?

    sudo .venv/bin/python bench/loops.py [--problems gpt12 resnet18] [--backends Gloo MPI] [--quick]

Two hosts joined by 1 Gbit/s (bench/two_hosts.py), one core each; buckets of 2 MiB. A GPT of 12
layers, written out and under `nn.scan`, staged and eager; ResNet-18 with the statistics of each
replica's rows and with those of all rows. The ways take turns; a round counts as long as the slower
rank took.
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
import fddp
from bench.problems import GPT_12, RESNET_18, Problem
from bench.record import ratio, save, summary
from bench.turns import BACKENDS, staged, take_turns
from models import resnet, scanned

CAP_MB = 2.0
# The reference of each problem's ways.
BASES = {
    "gpt12": {"staged, scanned": "staged, written out", "eager, scanned": "eager, written out"},
    "resnet18": {"staged, statistics of all rows": "staged, own statistics"},
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--problems", nargs="+", default=list(BASES), choices=list(BASES))
    parser.add_argument("--backends", nargs="+", default=list(BACKENDS), choices=BACKENDS)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--quick", action="store_true", help="3 rounds, nothing is saved")
    args = parser.parse_args()
    for backend in args.backends:
        results = dict[str, Any]()
        for name in args.problems:
            seconds = take_turns(__file__, backend, name, rounds=3 if args.quick else args.rounds)
            results[name] = comparison = compared(seconds, BASES[name])
            for way, row in comparison.items():
                ratio_text = f", {row['ratio']['median']:.3f}" if "ratio" in row else ""
                print(
                    f"{name}, {backend}, {way:32} {row['median_ms']:7.1f} ms{ratio_text}",
                    flush=True,
                )
        if not args.quick:
            print(save(f"loops_{backend.lower()}", results))


def compared(seconds: dict[str, np.ndarray], bases: dict[str, str]) -> dict[str, Any]:
    """Milliseconds of each way, and their ratio to its reference."""
    ratios = {way: {"ratio": ratio(seconds[way], seconds[base])} for way, base in bases.items()}
    return {way: summary(durations) | ratios.get(way, {}) for way, durations in seconds.items()}


def ways(task: Problem, group: fddp.Group) -> dict[str, Callable[[], Any]]:
    """The ways of a problem, all of them trained from the same parameters."""
    if task.model_state is None:
        params = scanned.stacked(task.params)
        looped = task._replace(loss_fn=scanned.loss_fn(scanned.scanned(GPT_12)), params=params)
        return {
            f"{schedule}, {how}": staged(problem, group, CAP_MB, schedule=schedule)
            for schedule in ("staged", "eager")
            for how, problem in (("written out", task), ("scanned", looped))
        }
    over_all = resnet.loss_fn(RESNET_18.clone(axis_name=group.axis_name))
    return {
        "staged, own statistics": staged(task, group, CAP_MB),
        "staged, statistics of all rows": staged(task._replace(loss_fn=over_all), group, CAP_MB),
    }


if __name__ == "__main__":
    main()
