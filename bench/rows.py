"""A table of words that travels as the rows of a batch: how much time does it save?

    sudo .venv/bin/python bench/rows.py [--backends Gloo MPI] [--quick]

A table of 32,768 × 64 and a network of 5 MiB behind it, 512 tokens a rank, on
two hosts joined by 1 Gbit/s (bench/two_hosts.py), one core each. The table travels as rows, or
whole, as it does in a group of its own.

Source: Kim et al., "Parallax" (EuroSys 2019).
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
import fddp
from bench.problems import Problem
from bench.record import ratio, save, summary
from bench.turns import BACKENDS, take_turns, training

CAP_MB = 4.0
ROWS = "rows"
WHOLE = "whole"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--backends", nargs="+", default=list(BACKENDS), choices=list(BACKENDS))
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--quick", action="store_true", help="two rounds, nothing is saved")
    args = parser.parse_args()
    results: dict[str, Any] = {}
    for backend in args.backends:
        seconds = take_turns(__file__, backend, "words", rounds=2 if args.quick else args.rounds)
        results[backend] = {way: summary(durations) for way, durations in seconds.items()}
        results[backend]["ratio"] = quartiles = ratio(seconds[ROWS], seconds[WHOLE])
        times = ", ".join(
            f"{way} {results[backend][way]['median_ms']:.1f} ms" for way in (ROWS, WHOLE)
        )
        print(
            f"{backend}: {times}: {quartiles['median']:.3f} ({quartiles['quartile_1']:.3f} to "
            f"{quartiles['quartile_3']:.3f})"
        )
    if not args.quick:
        print(save("rows", results))


def ways(task: Problem, group: fddp.Group) -> dict[str, Callable[[], Any]]:
    """The table as rows, and whole."""

    return {
        ROWS: training(task, group, CAP_MB),
        WHOLE: training(task, group, CAP_MB, hook=fddp.hooks.allreduce()),
    }


if __name__ == "__main__":
    main()
