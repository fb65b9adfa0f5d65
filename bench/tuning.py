r"""Does `fddp.tune` find the best bucket cap, and how close are its predictions? On a real wire,
with every cap run for real.

    sudo .venv/bin/python bench/tuning.py [--problems mlp resnet18 gpt] [--backends gloo mpi] \
        [--quick]

Two hosts joined by 1 Gbit/s (bench/two_hosts.py), one core each. `tune` measures and predicts; then
steps with every cap take turns, and the median over rounds of the slower rank counts.

  deviation   predicted / measured - 1, of each cap
  regret      the measured step with the cap that tune chose / the best measured step - 1
"""

import argparse
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
from bench.record import save, save_picture
from bench.two_hosts import BACKENDS, ask
from fddp.analysis.tuning.link import Link
from fddp.measuring.plots import figure
from fddp.schedules.timeline import Pace


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--problems", nargs="+", default=["mlp", "resnet18", "gpt"])
    parser.add_argument("--backends", nargs="+", default=list(BACKENDS), choices=BACKENDS)
    parser.add_argument("--rate", default="1gbit")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--quick", action="store_true", help="4 rounds, nothing is saved")
    args = parser.parse_args()
    results = {}
    for name in args.problems:
        for backend in args.backends:
            results[f"{name}, {backend}"] = result = measure(
                name, backend, args.rate, 4 if args.quick else args.rounds
            )
            print(f"\n{name}, {backend}\n{table(result)}", flush=True)
    if not args.quick:
        print(save("tuning", results))
        print(picture(results))


def measure(name: str, backend: str, rate: str, rounds: int) -> dict[str, Any]:
    """Tunes a problem on two hosts and then runs every cap."""
    result = ask(backend, rate, str(ROOT / "bench" / "tuning_worker.py"), backend, name, rounds)
    best = min(row["measured_ms"] for row in result["caps"])
    for row in result["caps"]:
        row["deviation"] = row["predicted_ms"] / row["measured_ms"] - 1
    (chosen,) = (row for row in result["caps"] if row["cap_mb"] == result["chosen_mb"])
    return result | {"regret": chosen["measured_ms"] / best - 1}


def table(result: dict[str, Any]) -> str:
    rows = [
        f"{row['cap_mb']:7g}  {len(row['nbytes']):7}  {row['predicted_ms']:9.1f}  "
        f"{row['measured_ms']:8.1f}  "
        f"{row['deviation']:+9.1%}{'  chosen' if row['cap_mb'] == result['chosen_mb'] else ''}"
        for row in result["caps"]
    ]
    return "\n".join(
        [
            f"an all-reduce takes {Link(**result['link'])}; {Pace(**result['pace'])}; tuned in "
            f"{result['tune_s']:.0f} s",
            "cap MiB  buckets  predicted  measured  deviation",
            *rows,
            f"regret {result['regret']:.1%}; tune's own check {result['deviation']:+.1%}",
        ]
    )


def picture(results: dict[str, Any]) -> Path:
    """Draws predicted and measured steps over the cap."""
    sheet, axes = figure(len(results))
    for axis, (name, result) in zip(axes, results.items()):
        caps = [f"{row['cap_mb']:g}" for row in result["caps"]]
        axis.plot(
            caps,
            [row["predicted_ms"] for row in result["caps"]],
            "--",
            color="tab:orange",
            label="predicted",
        )
        axis.plot(
            caps,
            [row["measured_ms"] for row in result["caps"]],
            "o-",
            color="tab:blue",
            label="measured",
        )
        axis.axvline(f"{result['chosen_mb']:g}", color="gray", linewidth=1, label="chosen")
        axis.set_title(f"{name}: ms a step over the bucket cap, MiB", loc="left")
        axis.set_ylim(bottom=0)
        axis.legend(frameon=False, loc="lower right")
    return save_picture("tuning", sheet, dpi=80)


if __name__ == "__main__":
    main()
