"""Virtual replicas: how much time do they cost?

    sudo .venv/bin/python bench/virtual.py [--problems mlp640 gpt] [--backends Gloo MPI] [--quick]

Two hosts joined by 1 Gbit/s (bench/two_hosts.py), one core each, SGD. One virtual replica on each
host is compared with the ordinary step, and eight on each with eight micro-batches.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))
import fddp
from bench.problems import Problem
from bench.record import save
from bench.turns import on_two_hosts, take_turns, training

EIGHT = 8
CAP_MB = 2.0
IN_EIGHT = "ordinary, eight micro-batches"
WAYS: dict[str, dict[str, Any]] = {
    "ordinary": {},
    "virtual": {"virtual_replicas": 2},
    IN_EIGHT: {"accumulation_steps": EIGHT},
    "virtual, eight each": {"virtual_replicas": 2 * EIGHT},
}


def main() -> None:
    args = on_two_hosts(__doc__, ["mlp640", "gpt"], rounds=20).parse_args()
    results = take_turns(__file__, args, references=dict.fromkeys(list(WAYS)[2:], IN_EIGHT))
    if not args.quick:
        print(save("virtual", results))


def ways(task: Problem, group: fddp.Group) -> dict[str, Callable[[], Any]]:
    """A step of each way, on a multiple of eight rows."""
    rows = len(jax.tree.leaves(task.batch)[0])
    more = lambda x: np.resize(x, (-(-rows // EIGHT) * EIGHT, *x.shape[1:]))  # noqa: E731
    task = task._replace(batch=jax.tree.map(more, task.batch))
    options: Any = {"last_bucket_mb": CAP_MB}
    return {way: training(task, group, CAP_MB, **options, **more) for way, more in WAYS.items()}


if __name__ == "__main__":
    main()
