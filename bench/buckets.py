"""Buckets of different sizes: how long does a step take, on a real wire? (Paper, figures 7 and 8.)

    sudo .venv/bin/python bench/buckets.py [--problems mlp gpt] [--backends Gloo MPI] [--quick]

Two hosts joined by 1 Gbit/s (bench/two_hosts.py), one core each; all caps are alive at once and in
turn. Cap 0 is a bucket for every gradient. The first and the last bucket hold 1 MiB, or the cap
where that is smaller, but for "one", a single bucket with everything. Of caps that give the same
buckets the smallest stands for all. Each is compared with the default of 25 MiB.
"""

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
import fddp
from bench.problems import Problem
from bench.record import RESULTS, save
from bench.turns import on_two_hosts, take_turns, training

DEFAULT = 25  # PyTorch's and fddp's
CAPS_MB = (DEFAULT, 0, 1, 2, 4, 8, 16, 50)
MOST_MB = 1000


def main() -> None:
    args = on_two_hosts(__doc__, ["mlp", "gpt"], rounds=6).parse_args()
    results = take_turns(__file__, args)
    if not args.quick:
        print(save("buckets", results))
        print(picture(results))


def ways(task: Problem, group: fddp.Group) -> dict[str, Callable[[], Any]]:
    """A step with the default, and with each cap that gives other buckets than smaller ones."""
    plans = {cap: fddp.make_plan(task.params, bucket_cap_mb=cap) for cap in CAPS_MB}
    smallest = {plans[cap].digest: cap for cap in sorted(CAPS_MB, reverse=True)}
    named = {
        f"{cap:g} MiB, {len(plans[cap].buckets)}": training(task, group, cap)
        for cap in CAPS_MB
        if cap in (DEFAULT, *smallest.values())
    }
    everything = dict.fromkeys(("first_bucket_mb", "last_bucket_mb"), MOST_MB)
    return named | {"one": training(task, group, MOST_MB, **everything)}


def picture(results: Mapping[str, Mapping[str, Any]]) -> Path:
    """Draws the median and the quartiles of every cap."""
    from matplotlib.figure import Figure

    sheet = Figure(figsize=(9, 3 * len(results)), layout="constrained")
    for axis, (title, rows) in zip(
        sheet.subplots(len(results), 1, squeeze=False)[:, 0], results.items()
    ):
        caps = sorted(rows, key=lambda way: float("inf" if way == "one" else way.split()[0]))
        low, middle, high = (
            [rows[cap][name] for cap in caps]
            for name in ("quartile_1_ms", "median_ms", "quartile_3_ms")
        )
        axis.vlines(caps, low, high, linewidth=9, alpha=0.35)
        axis.plot(caps, middle, "o", color="tab:orange")
        axis.set_title(
            f"{title}: ms a step over the bucket cap and the number of buckets", loc="left"
        )
        axis.set_ylim(bottom=0)
        axis.spines[["top", "right"]].set_visible(False)
    sheet.savefig(path := RESULTS / "buckets.png", dpi=80)
    return path


if __name__ == "__main__":
    main()
