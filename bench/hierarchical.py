r"""A sum over each host first, and then between the hosts: is it faster than a sum at once?

    sudo .venv/bin/python bench/hierarchical.py [--problems mlp640 gpt] [--backends gloo mpi] \
        [--quick]

`group.hierarchical(local=2)` on two hosts joined by 1 Gbit/s (bench/two_hosts.py), two ranks on the
one core of each: all-reduces between programs, inside a program, and staged steps with buckets of 4
MiB. Both ways are alive at once and take turns; a round counts as long as its slowest rank took.
The bytes on the wire are read off its counters.

Source: hierarchical all-reduce in Horovod.
"""

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
import fddp
from bench.problems import problem
from bench.record import interleave, ratio, save, summary
from bench.turns import staged
from bench.two_hosts import BACKENDS, ask
from fddp.comm import REPLICATED

LOCAL = 2
CAP_MB = 4.0
SUMS_MB = (1, 4, 16)
AT_ONCE = "at once"
IN_LEVELS = "in two levels"
SENT = Path("/sys/class/net/wire/statistics/tx_bytes")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--problems", nargs="*", default=["mlp640", "gpt"], help="of bench/problems.py"
    )
    parser.add_argument("--backends", nargs="+", default=list(BACKENDS), choices=BACKENDS)
    parser.add_argument("--rate", default="1gbit")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--quick", action="store_true", help="2 rounds, nothing is saved")
    parser.add_argument(
        "--rank", nargs=2, help=argparse.SUPPRESS
    )  # backend, path: this is one of the ranks
    args = parser.parse_args()
    rounds = 2 if args.quick else args.rounds
    if args.rank:
        backend, path = args.rank
        return one_rank(backend, path, args.problems, rounds)
    results: dict[str, Any] = {}
    columns = (
        "backend",
        "what",
        "ms at once",
        "ms in two levels",
        "ratio (quartiles)",
        "MiB on the wire: once, levels",
    )
    sheet = Table(*columns)
    for backend in args.backends:
        words = ["--rounds", rounds, "--problems", *args.problems, "--rank", backend]
        results[backend] = ask(backend, args.rate, __file__, *words, each=LOCAL)
        for what, row in results[backend].items():
            times = [f"{row[way]['median_ms']:.1f}" for way in (AT_ONCE, IN_LEVELS)]
            spread = row["ratio"]
            share = (
                f"{spread['median']:.3f} ({spread['quartile_1']:.3f}–{spread['quartile_3']:.3f})"
            )
            sheet.add_row(
                backend,
                what,
                *times,
                share,
                ", ".join(f"{row[way]['wire_mib']:.1f}" for way in row["ways"]),
            )
    Console(width=120).print(sheet)
    if not args.quick:
        print(save("hierarchical", {"local": LOCAL, "bucket_cap_mb": CAP_MB, "backends": results}))
    return None


def one_rank(backend: str, path: str, problems: list[str], rounds: int) -> None:
    """One rank's part: each question in turn."""
    group = fddp.init(backend)
    groups = {AT_ONCE: group, IN_LEVELS: group.hierarchical(local=LOCAL)}
    questions: dict[str, Callable[[fddp.Group], Callable[[], Any]]] = {
        f"{mb} MiB {where}": _summing(mb, inside)
        for mb in SUMS_MB
        for where, inside in (("between programs", False), ("in a program", True))
    }
    questions |= {f"a step of {name}": _training(name, group.rank) for name in problems}
    report = {
        what: compared(
            group, {way: make(group_of_way) for way, group_of_way in groups.items()}, rounds
        )
        for what, make in questions.items()
    }
    if group.rank == 0:
        Path(path).write_text(json.dumps(report))


def compared(group: fddp.Group, runs: dict[str, Callable[[], Any]], rounds: int) -> dict[str, Any]:
    """Seconds of both ways, and their bytes on the wire in both directions."""
    seconds = interleave(runs, rounds=rounds, warm_up=1, pause=group.barrier)
    slowest = {way: group.all_reduce(durations, op="max") for way, durations in seconds.items()}
    rows = {
        way: summary(durations) | {"wire_mib": wire_mib(group, runs[way])}
        for way, durations in slowest.items()
    }
    return {"ways": list(rows), **rows, "ratio": ratio(slowest[IN_LEVELS], slowest[AT_ONCE])}


def wire_mib(group: fddp.Group, run: Callable[[], Any]) -> float:
    """MiB that both hosts put on the wire in a run."""
    group.barrier()
    before = int(SENT.read_text())
    jax.block_until_ready(run())
    group.barrier()
    hosts = group.all_gather(int(SENT.read_text()) - before)[::LOCAL]
    return round(float(np.sum(hosts)) / 2**20, 2)


def _summing(mb: int, inside: bool) -> Callable[[fddp.Group], Callable[[], Any]]:
    """A sum of so many MiB, as a staged step sends it or as a fused one."""

    def make(group: fddp.Group) -> Callable[[], Any]:
        per_replica = group.placement.per_replica
        x = group.placement.place(np.ones(mb * 2**18, np.float32), per_replica)
        program = group.placement.program(group.communicator.all_reduce, (per_replica,), REPLICATED)
        return lambda: program(x) if inside else group.transport.all_reduce(x)

    return make


def _training(name: str, seed: int) -> Callable[[fddp.Group], Callable[[], Any]]:
    return lambda group: staged(problem(name, seed), group, CAP_MB)


if __name__ == "__main__":
    main()
