"""Overlap: how much of the traffic hides behind the backward pass, on a real wire? fddp, the ways
of JAX, and PyTorch DDP.

    sudo .venv/bin/python bench/overlap.py [--problems mlp resnet18 gpt] [--torch PYTHON] [--quick]

Two hosts joined by 1 Gbit/s (bench/two_hosts.py), one core each. All ways of a problem are alive at
once and take turns, four steps each, so that a slow moment of the machine hits all alike. PyTorch
lives in an environment of its own: give the path of its python.

  exposed    (T - T_alone) / T_traffic: T_alone the fastest step without traffic, fddp's or
             PyTorch's, T_traffic the sum of the all-reduces when nothing else runs
"""

import argparse
import json
import math
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
from bench.jobs import ending
from bench.plots import draw, figure
from bench.record import save, save_picture
from bench.two_hosts import start_gloo, start_mpi, two_hosts
from fddp.schedules.timeline import Span, Timeline

STEPS = 4  # in a turn; the first, whose caches another way has filled, does not count
PROBLEM_S = 480.0  # after these seconds no further round of a problem begins
# Near the best on these hosts: see bench/buckets.py.
CAPS_MB = {"mlp": 4.0, "mlp640": 4.0, "resnet18": 4.0, "gpt": 2.0}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--problems", nargs="+", default=["mlp", "mlp640", "resnet18", "gpt"])
    parser.add_argument(
        "--torch", default=None, help="python of an environment with torch 2.15 (CPU)"
    )
    parser.add_argument("--rate", default="1gbit")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--name", default="overlap", help="of the files in bench/results")
    parser.add_argument("--quick", action="store_true", help="3 rounds, nothing is saved")
    args = parser.parse_args()
    rounds = 3 if args.quick else args.rounds
    results = dict[str, Any]()
    for name in args.problems:
        results[name] = measure(name, args.rate, rounds, args.torch)
        print(f"\n{name}\n{table(results[name])}", flush=True)
        if not args.quick:  # what is measured is saved, even if a later problem fails
            print(save(args.name, {name: _figures(result) for name, result in results.items()}))
            print(picture(args.name, results), flush=True)


def measure(name: str, rate: str, rounds: int, torch: str | None) -> dict[str, Any]:
    """Starts all ways of a problem on two hosts and lets them take turns."""
    with two_hosts(rate), listening() as (control, accept):
        env = {"PYTHONPATH": str(ROOT)}
        worker = [sys.executable, str(ROOT / "bench" / "overlap_worker.py")]
        cap = str(CAPS_MB[name])
        jobs = [
            *start_gloo([*worker, "gloo", control, name, cap], env),
            *start_mpi([*worker, "mpi", control, name, cap], env),
        ]
        if torch:
            jobs += start_gloo([torch, str(ROOT / "bench" / "torch_worker.py"), control, name], env)
        with ending(jobs):
            lines = accept(6 if torch else 4)
            warm_up = lambda way: 6 * STEPS  # noqa: E731
            return evaluate(
                *in_turns(lines, rounds, steps=STEPS, warm_up=warm_up, at_most_s=PROBLEM_S)
            )


def _figures(result: dict[str, Any]) -> dict[str, Any]:
    return {name: figure for name, figure in result.items() if name != "spans"}


@contextmanager
def listening() -> Iterator[tuple[str, Callable[[int], list[socket.socket]]]]:
    """Opens a socket for the reports of several jobs.

    Yields its path, and a function that waits for so many ranks and returns a line to each.
    """
    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as door:
        path = str(Path(folder) / "control")
        door.bind(path)
        door.listen(128)
        door.settimeout(300)
        yield path, lambda count: [door.accept()[0] for _ in range(count)]


def in_turns(
    lines: Sequence[socket.socket],
    rounds: int,
    *,
    steps: int,
    warm_up: Callable[[str], int],
    at_most_s: float = math.inf,
) -> tuple[dict[str, np.ndarray], dict[str, list[tuple[Timeline, ...]]]]:
    """Lets the ways of several jobs take turns.

    Args:
      lines: one to each rank of each job; closed in the end, and the ranks end with them.
      rounds: turns of each way that count.
      steps: of a turn; the first one does not count.
      warm_up: (way) → its steps before those, which compile and in which eager tries its orders.
      at_most_s: no round begins later than this many seconds after the first step.

    Returns:
      For each way the seconds of each step on its slowest rank, and each step's timelines on all
      ranks.
    """
    talks = [line.makefile("rw") for line in lines]
    ranks: dict[str, list[Any]] = {}
    ways: dict[str, list[str]] = {}
    for talk in talks:
        hello = json.loads(talk.readline())
        ranks.setdefault(hello["job"], []).append(talk)
        ways[hello["job"]] = hello["ways"]
    seconds: dict[str, list[float]] = {way: [] for names in ways.values() for way in names}
    spans: dict[str, list[tuple[Timeline, ...]]] = {way: [] for way in seconds}
    end_s = time.monotonic() + at_most_s
    for turn in range(-1, rounds):
        if turn > 0 and time.monotonic() > end_s:
            break
        for job, names in ways.items():
            for way in names:
                for talk in ranks[job]:
                    talk.write(json.dumps([way, steps if turn >= 0 else warm_up(way)]) + "\n")
                    talk.flush()
                reports = [json.loads(talk.readline()) for talk in ranks[job]]
                if turn >= 0:
                    seconds[way] += [
                        max(of_ranks)
                        for of_ranks in zip(*(report["seconds"][1:] for report in reports))
                    ]
                    spans[way] += zip(
                        *(
                            [_timeline(line) for line in report["timelines"][1:]]
                            for report in reports
                        )
                    )
    for end in (*talks, *lines):
        end.close()
    return {way: np.array(values) for way, values in seconds.items()}, spans


def evaluate(
    seconds: dict[str, np.ndarray], spans: dict[str, list[tuple[Timeline, ...]]]
) -> dict[str, Any]:
    """Medians and exposed shares."""
    times = {way: float(np.median(values)) for way, values in seconds.items()}
    result: dict[str, Any] = {
        "step_ms": {
            way: [round(1e3 * q, 1) for q in np.percentile(s, (25, 50, 75))]
            for way, s in seconds.items()
        },
        "spans": {
            way: sorted((line for line, *_ in steps), key=lambda line: line.seconds)[
                len(steps) // 2
            ]
            for way, steps in spans.items()
        },
    }
    fastest = min(seconds for way, seconds in times.items() if way.startswith("alone"))
    for wire in ("Gloo", "MPI"):
        sends = _medians(spans[f"fddp after ({wire})"], "communication")
        result[wire] = {
            "alone_ms": 1e3 * times[f"alone, staged ({wire})"],
            "traffic_ms": 1e3 * sum(sends),
            "exposed": (times[f"fddp staged ({wire})"] - fastest) / sum(sends),
        }
    if "PyTorch, alone" in times:
        ddp = min((way for way in times if way.startswith("PyTorch DDP")), key=times.__getitem__)
        traffic = result["Gloo"]["traffic_ms"] / 1e3  # the same bytes on the same wire
        result[ddp] = {"exposed": (times[ddp] - times["PyTorch, alone"]) / traffic}
    return result


def _timeline(spans: Sequence[dict[str, Any]]) -> Timeline:
    return Timeline(tuple(Span(**span) for span in spans))


def _medians(steps: Sequence[tuple[Timeline, ...]], kind: str) -> list[float]:
    """The median of each span over steps; of the two ranks, that with the shorter wait for the
    other."""
    rows = [
        [[span.seconds for span in line.spans if span.kind == kind] for line in ranks]
        for ranks in steps
    ]
    return np.median(np.min(np.array(rows), axis=1), axis=0).tolist()


def table(result: dict[str, Any]) -> str:
    fastest = min(result["step_ms"][f"fddp staged ({wire})"][1] for wire in ("Gloo", "MPI"))
    rows = [
        f"{way:28} {low:8.1f} {middle:8.1f} {high:8.1f} ms   {middle / fastest:5.2f} × fddp"
        for way, (low, middle, high) in result["step_ms"].items()
    ]
    for key, value in result.items():
        if key not in ("step_ms", "spans"):
            rows.append(
                f"{key:28} " + "  ".join(f"{name} {number:.2f}" for name, number in value.items())
            )
    return "\n".join(rows)


def picture(name: str, results: dict[str, Any]) -> Path:
    """Draws the timelines of a median step under each other."""
    sheet, axes = figure(len(results))
    for axis, (problem, result) in zip(axes, results.items()):
        draw(
            axis,
            {
                way: line
                for way, line in result["spans"].items()
                if line.spans and way.startswith("fddp")
            },
        )
        axis.set_title(f"{problem}: computing (above) and sending (below)", loc="left")
    return save_picture(name, sheet, dpi=120)


if __name__ == "__main__":
    main()
