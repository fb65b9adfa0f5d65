"""Sharing the state: how much time does it cost?

    sudo .venv/bin/python bench/sharding.py [--problems mlp640 gpt] [--backends Gloo MPI] [--quick]

Two hosts joined by 1 Gbit/s (bench/two_hosts.py), one core each, AdamW, buckets of 4 MiB. Whole and
shared states take turns of four steps; each is compared with the whole state of its schedule.

Source: ZeRO (Rajbhandari et al., SC 2020), stage 1.
"""

import sys
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import optax

sys.path.insert(0, str(Path(__file__).parents[1]))
import fddp
from bench.problems import Problem
from bench.record import save
from bench.turns import on_two_hosts, take_turns, training

STEPS = 4  # of a turn
CAP_MB = 4.0
# Name → schedule, shard.
WAYS = {
    f"{shard or 'whole'}, {schedule}": (schedule, shard)
    for schedule, shard in product(("overlap", "after"), (None, "optimizer", "state"))
}


def main() -> None:
    args = on_two_hosts(__doc__, ["mlp640", "gpt"], rounds=6).parse_args()
    references = {way: f"whole, {schedule}" for way, (schedule, _) in WAYS.items()}
    results = take_turns(__file__, args, steps=STEPS, references=references)
    if not args.quick:
        print(save("sharding", results))


def ways(task: Problem, group: fddp.Group) -> dict[str, Callable[[], Any]]:
    """A turn with each schedule, and each kind of state."""
    caps: Any = dict.fromkeys(("first_bucket_mb", "last_bucket_mb"), CAP_MB)
    caps |= {"optimizer": optax.adamw(1e-4), "steps": STEPS}
    return {
        way: training(task, group, CAP_MB, schedule=schedule, shard=shard, **caps)
        for way, (schedule, shard) in WAYS.items()
    }


if __name__ == "__main__":
    main()
