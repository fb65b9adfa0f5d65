"""Small messages: how long does an all-reduce of 32 MiB take in calls of 1,000 to 8 million
numbers?

    sudo .venv/bin/python bench/allreduce.py [--backends gloo mpi] [--quick]

Two hosts joined by 1 Gbit/s (bench/two_hosts.py), one core each. One call after another, as the
lane of a step sends them, and nothing is computed meanwhile. All sizes take turns. A turn
has at most 400 calls of the smallest messages; their total is extrapolated to the 8 million
numbers.

Source: Li et al. (VLDB 2020), Fig. 2, which sends 60 million.
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
from bench.record import interleave, ratio, save, summary
from bench.two_hosts import BACKENDS, ask
from fddp.comm import REPLICATED

NUMBERS = 8_000_000
SMALL = (1_000, 2_000, 5_000, 10_000, 20_000, 50_000, 100_000, 200_000, 500_000)
SIZES = (*SMALL, 1_000_000, 2_000_000, 4_000_000, NUMBERS)
MOST_CALLS = 400


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--backends", nargs="+", default=list(BACKENDS), choices=BACKENDS)
    parser.add_argument("--rate", default="1gbit")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--quick", action="store_true", help="3 rounds, nothing is saved")
    parser.add_argument(
        "--rank", nargs=2, help=argparse.SUPPRESS
    )  # backend, path: this process is one of the hosts
    args = parser.parse_args()
    if args.rank:
        backend, path = args.rank
        return send(backend, path, args.rounds)
    rounds = 3 if args.quick else args.rounds
    results = {
        backend: ask(backend, args.rate, __file__, "--rounds", rounds, "--rank", backend)
        for backend in args.backends
    }
    Console(width=100).print(table(results))
    if not args.quick:
        print(save("allreduce", results))
    return None


def send(backend: str, path: str, rounds: int) -> None:
    """The part of one host."""
    group = fddp.init(backend)
    in_lanes: Any = group.transport.in_lanes
    placement, communicator = in_lanes(1, group.journal)
    per_replica = placement.per_replica
    add = placement.program(communicator.all_reduce, (per_replica,), REPLICATED)

    def calls(size: int) -> Callable[[], None]:
        wire = placement.place(np.ones(size, np.float32), per_replica)

        def run() -> None:
            for _ in range(min(NUMBERS // size, MOST_CALLS)):
                jax.block_until_ready(add(wire))

        return run

    turns = interleave(
        {str(n): calls(n) for n in SIZES}, rounds=rounds, warm_up=1, pause=group.barrier
    )
    slower = {n: group.all_reduce(turns[str(n)], op="max") for n in SIZES}
    call_seconds = {n: seconds / min(NUMBERS // n, MOST_CALLS) for n, seconds in slower.items()}
    totals = {n: seconds * NUMBERS / n for n, seconds in call_seconds.items()}
    if group.rank == 0:
        report = {
            "numbers": NUMBERS,
            "sizes": [
                {
                    "numbers_per_call": n,
                    "calls": NUMBERS // n,
                    "total": summary(totals[n]),
                    "call": summary(call_seconds[n]),
                    "to_one_call": ratio(totals[n], totals[NUMBERS]),
                }
                for n in SIZES
            ],
        }
        Path(path).write_text(json.dumps(report))


def table(results: dict[str, Any]) -> Table:
    sheet = Table(
        title="all-reduce of 8 million float32: ms (quartiles), and as a multiple of one call"
    )
    for head in (
        "numbers a call",
        "calls",
        *(f"{backend}{what}" for backend in results for what in (" ms", " ×")),
    ):
        sheet.add_column(head, justify="right")
    for rows in zip(*(result["sizes"] for result in results.values())):
        cells = [f"{rows[0]['numbers_per_call']:,}", f"{rows[0]['calls']:,}"]
        for row in rows:
            total = row["total"]
            quartiles = f"{total['quartile_1_ms']:.0f}–{total['quartile_3_ms']:.0f}"
            cells += [
                f"{total['median_ms']:.0f} ({quartiles})",
                f"{row['to_one_call']['median']:.2f}",
            ]
        sheet.add_row(*cells)
    return sheet


if __name__ == "__main__":
    main()
