r"""The parts of a step: where does its time go, and how much does overlap gain?

    sudo .venv/bin/python bench/breakdown.py [--problems mlp resnet18 gpt] \
        [--backends gloo mpi] [--quick]

Two hosts joined by 1 Gbit/s (bench/two_hosts.py), one core each. The step whose traffic waits for
the backward pass ("after") and the one that overlaps ("staged") have the same buckets and take
turns with a program of the forward pass alone. Shares are those of rank 0, medians over rounds, of
the non-overlapped step.

  forward        the forward pass alone, assumed for "staged" as well
  backward       all other computation before the update; longer with overlap: traffic needs
                 the core too
  communication  all of it in "after"; in "staged" only the exposed part, when nothing is computed
  optimizer      the update
  idle           nothing computed or sent: Python, placing rows

Source: Li et al. (VLDB 2020), Fig. 6.
"""

import argparse
import json
import sys
from pathlib import Path
from time import perf_counter
from typing import Any

import jax
import numpy as np
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
import fddp
from bench.problems import Problem, problem
from bench.record import ratio, save, save_picture, summary
from bench.two_hosts import BACKENDS, ask
from bench.watching import Way, watch, way
from fddp.measuring.measurement import MeasuredStep
from fddp.measuring.plots import figure
from fddp.schedules.timeline import Span, Timeline

CAP_MB = 4.0  # for the first and the last bucket, too
PARTS = {
    "forward": "#9db8d2",
    "backward": "#5b8db8",
    "communication": "#d98b3a",
    "optimizer": "#7a9a5b",
    "idle": "#d0d0d0",
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--problems", nargs="+", default=["mlp", "resnet18", "gpt"])
    parser.add_argument("--backends", nargs="+", default=list(BACKENDS), choices=BACKENDS)
    parser.add_argument("--rate", default="1gbit")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--quick", action="store_true", help="3 rounds, nothing is saved")
    parser.add_argument(
        "--rank", nargs=3, help=argparse.SUPPRESS
    )  # backend, problem, path: this is one of the hosts
    args = parser.parse_args()
    if args.rank:
        backend, name, path = args.rank
        return train(backend, name, path, args.rounds)
    rounds = 3 if args.quick else args.rounds
    results = {
        f"{name}, {backend}": ask(
            backend, args.rate, __file__, "--rounds", rounds, "--rank", backend, name
        )
        for name in args.problems
        for backend in args.backends
    }
    Console(width=150).print(table(results))
    if not args.quick:
        print(save("breakdown", results))
        print(picture(results))
    return None


def train(backend: str, name: str, path: str, rounds: int) -> None:
    """One host's part."""
    group = fddp.init(backend)
    task = problem(name, seed=group.rank)
    caps = {"bucket_cap_mb": CAP_MB, "first_bucket_mb": CAP_MB, "last_bucket_mb": CAP_MB}
    ways = {
        schedule: way(task, group, schedule=schedule, **caps) for schedule in ("after", "staged")
    }
    measured, seconds = watch(ways | {"forward": forward_only(task)}, group, rounds=rounds)
    if group.rank == 0:
        forward = seconds.pop("forward")
        del measured["forward"]
        ahead = float(np.median(forward))
        total_s = float(np.median([step.seconds for step in measured["after"].steps]))
        report = {
            "cap_mb": CAP_MB,
            "all_reduces": len(ways["staged"].all_reduces),
            "step": {schedule: summary(values) for schedule, values in seconds.items()},
            "forward": summary(forward),
            "staged / after": ratio(seconds["staged"], seconds["after"]),
            "overlap_percent": measured["staged"].overlap_percent,
            "parts": {
                schedule: {
                    part: value / total_s
                    for part, value in shares(measurement.steps, ahead).items()
                }
                for schedule, measurement in measured.items()
            },
        }
        Path(path).write_text(json.dumps(report))


def forward_only(task: Problem) -> Way:
    """The loss of this rank's rows, as a program of its own."""
    buffers = {} if task.model_state is None else {"model_state": task.model_state}
    program = jax.jit(lambda params, batch, buffers: task.loss_fn(params, batch, **buffers))
    span = Span("compute", "forward", 0.0, 0.0)

    def run(batch: Any) -> Any:
        nonlocal span
        start = perf_counter()
        result = jax.block_until_ready(program(task.params, batch, buffers))
        span = Span("compute", "forward", start, perf_counter())
        return result

    return Way(run, task.batch, lambda: Timeline((span,)), ())


def shares(steps: tuple[MeasuredStep, ...], forward: float) -> dict[str, float]:
    """Seconds of each part of a step, medians over steps."""

    def update(step: MeasuredStep) -> float:
        return sum(span.seconds for span in step.timeline.updates)

    def middle(values: list[float]) -> float:
        return float(np.median(values))

    return {
        "forward": forward,
        "backward": middle([step.timeline.computing - update(step) for step in steps]) - forward,
        "communication": middle([step.timeline.exposed for step in steps]),
        "optimizer": middle([update(step) for step in steps]),
        "idle": middle([step.idle for step in steps]),
    }


def table(results: dict[str, Any]) -> Table:
    sheet = Table(title="shares of the step without overlap, %")
    for head in (
        "problem",
        "schedule",
        "step ms (quartiles)",
        *PARTS,
        "sum",
        "staged / after",
        "hidden",
    ):
        sheet.add_column(head, justify="left" if head in ("problem", "schedule") else "right")
    for name, result in results.items():
        for schedule, shares in result["parts"].items():
            step = result["step"][schedule]
            gain = result["staged / after"]
            remarks = (
                [f"{gain['median']:.3f}", f"{result['overlap_percent']:.0f} %"]
                if schedule == "staged"
                else ["", ""]
            )
            sheet.add_row(
                name,
                schedule,
                f"{step['median_ms']:.0f} "
                f"({step['quartile_1_ms']:.0f}–{step['quartile_3_ms']:.0f})",
                *(f"{100 * shares[part]:.1f}" for part in PARTS),
                f"{100 * sum(shares.values()):.1f}",
                *remarks,
            )
    return sheet


def picture(results: dict[str, Any]) -> Path:
    """Draws both steps of each problem as bars."""
    drawing, (axis,) = figure(1, height=1 + 0.7 * len(results))
    bars = {
        f"{name}, {kind}": shares
        for name, result in results.items()
        for kind, shares in result["parts"].items()
    }
    offsets = np.zeros(len(bars))
    for part, colour in PARTS.items():
        widths = np.array([shares[part] for shares in bars.values()])
        axis.barh(list(bars), widths, left=offsets, color=colour, label=part)
        offsets += widths
    axis.invert_yaxis()
    axis.set_title("a step, as a share of the one without overlap", loc="left")
    axis.legend(frameon=False, ncols=len(PARTS), loc="upper center", bbox_to_anchor=(0.45, -0.05))
    return save_picture("breakdown", drawing, dpi=100)


if __name__ == "__main__":
    main()
