"""Projections from two replicas to more: how accurate are they? Up to 4,096, checked on four.

    python bench/scaling.py [--problem mlp] [--backend gloo] [--cap 4] [--quick]

Two and four processes on this machine, over loopback. The hop of the ring comes from the
all-reduces of the two. Four processes on fewer cores also compute more slowly, which is not an
effect of the link; so the projection to four is made twice: with the stages of the two, and with
those of the four, each measured alone.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
from bench.jobs import ending, start
from bench.record import save
from fddp.analysis.tuning.link import Link
from fddp.analysis.tuning.scaling import REPLICAS, Algorithm, hop_of, project, ring, tree
from fddp.schedules.timeline import Pace


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--problem", default="mlp")
    parser.add_argument("--backend", default="gloo", choices=["gloo", "mpi"])
    parser.add_argument("--cap", type=float, default=4.0)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--quick", action="store_true", help="3 rounds, nothing is saved")
    args = parser.parse_args()
    rounds = 3 if args.quick else args.rounds
    two, four = (run(args.backend, args.problem, size, rounds, args.cap) for size in (2, 4))
    results = {
        "problem": f"{args.problem}, {args.backend}, cap {args.cap:g} MiB",
        "two": two,
        "four": four,
        "checks": checks(two, four),
        "projections": {way.__name__: projections(two, way) for way in (ring, tree)},
    }
    print(table(results))
    if not args.quick:
        print(save("scaling", results))


def run(backend: str, name: str, size: int, rounds: int, cap_mb: float) -> dict[str, Any]:
    """Tunes with a single cap on so many processes of this machine."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "found.json"
        worker = [
            sys.executable,
            str(ROOT / "bench" / "tuning_worker.py"),
            backend,
            name,
            str(rounds),
            str(path),
        ]
        env = {"PYTHONPATH": str(ROOT), "NPROC": "2"}
        with ending(start(backend, size, [*worker, str(cap_mb)], env)) as jobs:
            if any(job.wait(600) for job in jobs):
                raise RuntimeError(f"{name} on {size} processes failed; its error is above.")
        return json.loads(path.read_text())


def checks(two: dict[str, Any], four: dict[str, Any]) -> dict[str, float]:
    """Projected over measured on four, minus 1: an all-reduce of the largest bucket, and the
    step."""
    hop = hop_of(Link(**two["link"]), 2)
    (cap,) = four["caps"]
    largest = max(cap["nbytes"])
    measured = cap["measured_ms"] / 1e3

    def step(stages: dict[str, Any]) -> float:
        return projected(stages, hop, two, (4,), ring)[0].step_s / measured - 1

    return {
        "all_reduce": ring(hop, largest, 4) / Link(**four["link"]).seconds(largest) - 1,
        "step_with_the_stages_of_two": step(two),
        "step_with_the_stages_of_four": step(four),
    }


def projections(two: dict[str, Any], algorithm: Algorithm) -> list[dict[str, float]]:
    hop = hop_of(Link(**two["link"]), 2, algorithm)
    return [vars(step) for step in projected(two, hop, two, REPLICAS, algorithm)]


def projected(
    measurement: dict[str, Any],
    hop: Link,
    paced: dict[str, Any],
    replicas: Any,
    algorithm: Algorithm,
) -> Any:
    """Projects the results of bench/tuning_worker.py for a single cap to other numbers of replicas.

    Args:
      measurement: its stages.
      hop: a message between neighbours.
      paced: a measurement in which computing and traffic slowed each other down.
      replicas: their numbers.
      algorithm: of the all-reduces.
    """
    (cap,) = measurement["caps"]
    *updates, last = cap["updates_ms"]
    return project(
        [stage / 1e3 for stage in cap["stages_ms"]],
        cap["nbytes"],
        hop,
        updates=[*(update / 1e3 for update in updates), (last + measurement["idle_ms"]) / 1e3],
        pace=Pace(**paced["pace"]),
        replicas=replicas,
        algorithm=algorithm,
    )


def table(results: dict[str, Any]) -> str:
    rows = [
        f"{a['replicas']:8}  {1e3 * a['step_s']:9.1f}  {a['efficiency']:10.0%}  "
        f"{1e3 * b['step_s']:9.1f}  "
        f"{b['efficiency']:10.0%}"
        for a, b in zip(results["projections"]["ring"], results["projections"]["tree"])
    ]
    remarks = [
        f"{name.replace('_', ' ')}: projected {off:+.1%} of measured"
        for name, off in results["checks"].items()
    ]
    return "\n".join(
        [
            results["problem"],
            "replicas    ring ms  efficiency    tree ms  efficiency",
            *rows,
            "on four:",
            *remarks,
        ]
    )


if __name__ == "__main__":
    main()
