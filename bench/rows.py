"""A table of words that travels as the rows of a batch: how much time does it save?

    sudo .venv/bin/python bench/rows.py [--backends Gloo MPI] [--quick]

A table of 32,768 × 64 and a network of 5 MiB behind it, 512 tokens a rank, on two hosts joined by 1
Gbit/s (bench/two_hosts.py), one core each. The table travels whole, or as rows.

Source: Kim et al., "Parallax" (EuroSys 2019).
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
import fddp
from bench.problems import Problem
from bench.record import save
from bench.turns import on_two_hosts, take_turns, training

CAP_MB = 4.0


def main() -> None:
    args = on_two_hosts(__doc__, ["words"], rounds=40).parse_args()
    results = take_turns(__file__, args)
    if not args.quick:
        print(save("rows", results))


def ways(task: Problem, group: fddp.Group) -> dict[str, Callable[[], Any]]:
    """The table whole, as with any hook, and as rows."""
    whole = training(task, group, CAP_MB, hook=fddp.hooks.allreduce())
    return {"whole": whole, "rows": training(task, group, CAP_MB)}


if __name__ == "__main__":
    main()
