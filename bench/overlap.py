"""Overlap: how much of the traffic hides behind the backward pass, on a real wire? fddp, the ways
of JAX, and PyTorch DDP.

    sudo .venv/bin/python bench/overlap.py [--problems mlp resnet18 gpt] [--torch PYTHON] [--quick]

Two hosts joined by 1 Gbit/s (bench/two_hosts.py), one core each. All ways of a problem are alive at
once and take turns, four steps each, so that a slow moment of the machine hits all alike. PyTorch
lives in an environment of its own: give the path of its python.

  exposed    (T - T_alone) / T_traffic: T_alone the fastest step without traffic, fddp's or
             PyTorch's, T_traffic what all sums add behind the backward pass, by "after"
"""

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
from bench.record import question, save
from bench.two_hosts import start_gloo, start_mpi, two_hosts

STEPS = 4  # in a turn; the first, whose caches another way has filled, does not count
PROBLEM_S = 480.0  # after these seconds no further round of a problem begins
# Near the best on these hosts: see bench/buckets.py.
CAPS_MB = {"mlp": 4.0, "mlp640": 4.0, "resnet18": 4.0, "gpt": 2.0, "scanned": 2.0}


def main() -> None:
    parser = question(__doc__, "1 round of the first problem")
    parser.add_argument("--problems", nargs="+", default=["mlp640", "gpt", "mlp", "resnet18"])
    parser.add_argument("--torch", help="python of an environment with torch 2.15 (CPU)")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--name", default="overlap", help="of the file in bench/results")
    args = parser.parse_args()
    results = dict[str, Any]()
    for name in args.problems[:1] if args.quick else args.problems:
        results[name] = measure(name, 1 if args.quick else args.rounds, args.torch)
        print(f"\n{name}\n{table(results[name])}", flush=True)
        if not args.quick:  # what is measured is saved, even if a later problem fails
            print(save(args.name, results), flush=True)


def measure(name: str, rounds: int, torch: str | None) -> dict[str, Any]:
    """Starts all ways of a problem on two hosts and lets them take turns."""
    with two_hosts("1gbit"), listening() as (control, accept):
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
            steps, warm_up = (STEPS, 6 * STEPS) if rounds > 1 else (2, 4)
            seconds = in_turns(lines, rounds, steps=steps, warm_up=warm_up, at_most_s=PROBLEM_S)
            return evaluate(seconds)


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
    lines: Sequence[socket.socket], rounds: int, *, steps: int, warm_up: int, at_most_s=math.inf
) -> dict[str, np.ndarray]:
    """Lets the ways of several jobs take turns, after a warm-up; no round begins after `at_most_s`.

    `lines` has one line to each rank of each job; they are closed in the end. Returns for each way
    the seconds of each step on its slowest rank, without the first step of a turn.
    """
    talks = [line.makefile("rw") for line in lines]
    ranks: dict[str, list[Any]] = {}
    ways: dict[str, list[str]] = {}
    for talk in talks:
        hello = json.loads(talk.readline())
        ranks.setdefault(hello["job"], []).append(talk)
        ways[hello["job"]] = hello["ways"]
    seconds: dict[str, list[float]] = {way: [] for names in ways.values() for way in names}
    end_s = time.monotonic() + at_most_s
    for turn in range(-1, rounds):
        if turn > 0 and time.monotonic() > end_s:
            break
        for job, names in ways.items():
            for way in names:
                for talk in ranks[job]:
                    talk.write(json.dumps([way, steps if turn >= 0 else warm_up]) + "\n")
                    talk.flush()
                reports = [json.loads(talk.readline()) for talk in ranks[job]]
                if turn >= 0:
                    seconds[way] += map(max, zip(*(x["seconds"][1:] for x in reports)))
    for end in (*talks, *lines):
        end.close()
    return {way: np.array(values) for way, values in seconds.items()}


def evaluate(seconds: dict[str, np.ndarray]) -> dict[str, Any]:
    """Medians and exposed shares."""
    times = {way: float(np.median(values)) for way, values in seconds.items()}
    result: dict[str, Any] = {
        "step_ms": {
            way: [round(1e3 * q, 1) for q in np.percentile(s, (25, 50, 75))]
            for way, s in seconds.items()
        }
    }
    fastest = min(seconds for way, seconds in times.items() if way.startswith("alone"))
    for wire in ("Gloo", "MPI"):
        alone = times[f"alone ({wire})"]
        traffic = times[f"fddp after ({wire})"] - alone
        result[wire] = {
            "alone_ms": 1e3 * alone,
            "traffic_ms": 1e3 * traffic,
            "exposed": (times[f"fddp overlap ({wire})"] - fastest) / traffic,
        }
    if "PyTorch, alone" in times:
        ddp = min((way for way in times if way.startswith("PyTorch DDP")), key=times.__getitem__)
        traffic = result["Gloo"]["traffic_ms"] / 1e3  # the same bytes on the same wire
        result[ddp] = {"exposed": (times[ddp] - times["PyTorch, alone"]) / traffic}
    return result


def table(result: dict[str, Any]) -> str:
    fastest = min(result["step_ms"][f"fddp overlap ({wire})"][1] for wire in ("Gloo", "MPI"))
    rows = [
        f"{way:28} {low:8.1f} {middle:8.1f} {high:8.1f} ms   {middle / fastest:5.2f} × fddp"
        for way, (low, middle, high) in result["step_ms"].items()
    ]
    for key, value in result.items():
        if key != "step_ms":
            rows.append(
                f"{key:28} " + "  ".join(f"{name} {number:.2f}" for name, number in value.items())
            )
    return "\n".join(rows)


if __name__ == "__main__":
    main()
