r"""Is a step faster with several communicators in turn (paper, figure 12), or with sums over each
host first (hierarchical all-reduce in Horovod)?

    sudo .venv/bin/python bench/groups.py [--only round_robin] [--backends Gloo MPI] [--quick]

Two hosts joined by 1 Gbit/s (bench/two_hosts.py), one core each, buckets of 4
MiB; all variants are alive at once and in turn. `round_robin` has one rank on each host, and
`fddp.round_robin([group] * k)` for k = 1, 3, 5: over Gloo at most as many lanes as processes.
`hierarchical` has two ranks on each host, and compares `group.hierarchical(local=2)` with the plain
group.
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1]))
import fddp
from bench.problems import Problem
from bench.record import ratio, save, summary
from bench.turns import BACKENDS, take_turns, training

CAP_MB = 4.0
# Question → the ranks of a host, and the problems.
QUESTIONS = {"round_robin": (1, ("mlp", "gpt")), "hierarchical": (2, ("mlp640", "gpt"))}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", default=list(QUESTIONS), choices=list(QUESTIONS))
    parser.add_argument("--backends", nargs="+", default=list(BACKENDS), choices=list(BACKENDS))
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument(
        "--quick", action="store_true", help="2 rounds of a problem, nothing is saved"
    )
    args = parser.parse_args()
    sheet = Table("problem", "backend", "way", "ms a step (quartiles)", "of the first (quartiles)")
    for question in args.only:
        each, problems = QUESTIONS[question]
        results = dict[str, Any]()
        for name in problems[:1] if args.quick else problems:
            for backend in args.backends:
                rounds = 2 if args.quick else args.rounds
                seconds = take_turns(__file__, backend, name, rounds=rounds, each=each)
                first = next(iter(seconds.values()))
                results[f"{name}, {backend}"] = rows = {
                    way: summary(durations) | {"of_the_first": ratio(durations, first)}
                    for way, durations in seconds.items()
                }
                for way, row in rows.items():
                    sheet.add_row(name, backend, way, *in_words(row))
        if not args.quick:
            print(save(question, {"bucket_cap_mb": CAP_MB, "groups": results}))
    Console(width=110).print(sheet)


def ways(task: Problem, group: fddp.Group) -> dict[str, Callable[[], Any]]:
    """A step with each group, the plain one first."""
    if group.size == 2:
        groups = {f"{count}": fddp.round_robin([group] * count) for count in (1, 3, 5)}
    else:
        groups = {"at once": group, "in two levels": group.hierarchical(local=2)}
    return {way: training(task, of_way, CAP_MB) for way, of_way in groups.items()}


def in_words(row: dict[str, Any]) -> tuple[str, str]:
    times = "{median_ms:.0f} ({quartile_1_ms:.0f}–{quartile_3_ms:.0f})"
    ratios = "{median:.3f} ({quartile_1:.3f}–{quartile_3:.3f})"
    return times.format(**row), ratios.format(**row["of_the_first"])


if __name__ == "__main__":
    main()
