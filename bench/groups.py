"""Is a step faster with several communicators in turn (paper, figure 12), or with sums over each
host first (hierarchical all-reduce in Horovod)?

    sudo .venv/bin/python bench/groups.py [--only round_robin] [--backends Gloo MPI] [--quick]

Two hosts joined by 1 Gbit/s (bench/two_hosts.py), one core each, buckets of 4 MiB; all variants are
alive at once and in turn. `round_robin` has one rank on each host, and `fddp.round_robin([group] *
k)` for k = 1, 3, 5: over Gloo at most as many lanes as processes. `hierarchical` has two ranks on
each host, and compares `group.hierarchical(local=2)` with the plain group.
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
EACH = {"round_robin": 1, "hierarchical": 2}  # ranks of a host


def main() -> None:
    parser = on_two_hosts(__doc__, ["mlp640", "gpt"], rounds=12)
    parser.add_argument("--only", nargs="+", default=list(EACH), choices=list(EACH))
    args = parser.parse_args()
    for question in args.only:
        results = take_turns(__file__, args, each=EACH[question])
        if not args.quick:
            print(save(question, {"bucket_cap_mb": CAP_MB, "groups": results}))


def ways(task: Problem, group: fddp.Group) -> dict[str, Callable[[], Any]]:
    """A step with each group, the plain one first."""
    if group.size == 2:
        groups = {f"{count}": fddp.round_robin([group] * count) for count in (1, 3, 5)}
    else:
        groups = {"at once": group, "in two levels": group.hierarchical(local=2)}
    return {way: training(task, of_way, CAP_MB) for way, of_way in groups.items()}


if __name__ == "__main__":
    main()
