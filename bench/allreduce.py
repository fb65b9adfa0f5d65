"""Small messages: how long does an all-reduce of 32 MiB take in calls of 1,000 to 8 million
numbers?

    sudo .venv/bin/python bench/allreduce.py [--backends gloo mpi] [--quick]

Two hosts joined by 1 Gbit/s (bench/two_hosts.py), one core each. One call after another, as the
lane of a step sends them, and nothing is computed meanwhile. All sizes take turns. A turn
has at most 400 calls of the smallest messages; their total is extrapolated to the 8 million
numbers.

Source: Li et al. (VLDB 2020), Fig. 2, which sends 60 million.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
import fddp
from bench.record import interleave, question, ratio, save, summary
from bench.turns import BACKENDS, line
from bench.two_hosts import ask
from fddp.comm import REPLICATED

NUMBERS = 8_000_000
SMALL = (1_000, 2_000, 5_000, 10_000, 20_000, 50_000, 100_000, 200_000, 500_000)
SIZES = (*SMALL, 1_000_000, 2_000_000, 4_000_000, NUMBERS)
MOST_CALLS = 400


def main() -> None:
    args = question(__doc__, "2 rounds over Gloo").parse_args()
    results = dict[str, Any]()
    for backend in BACKENDS[:1] if args.quick else BACKENDS:
        rounds = 2 if args.quick else 9
        results[backend] = rows = ask(backend.lower(), "1gbit", __file__, backend, rounds)
        print(f"{backend}: 8 million float32, and as a multiple of one call")
        for numbers, row in rows.items():
            print(line(f"{int(numbers):,} numbers a call", row), flush=True)
    if not args.quick:
        print(save("allreduce", results))


def send(backend: str, rounds: int, path: Path) -> None:
    """The part of one host."""
    group = fddp.init(backend.lower())
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

    runs = {str(n): calls(n) for n in SIZES}
    turns = interleave(runs, rounds=rounds, warm_up=1, pause=group.barrier)
    totals = {
        n: group.all_reduce(turns[str(n)], op="max")
        * (NUMBERS // n)
        / min(NUMBERS // n, MOST_CALLS)
        for n in SIZES
    }
    if group.rank == 0:
        report = {n: summary(x) | {"ratio": ratio(x, totals[NUMBERS])} for n, x in totals.items()}
        path.write_text(json.dumps(report))


if __name__ == "__main__":
    if sys.argv[1:2] and sys.argv[1] in BACKENDS:
        send(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
    else:
        main()
