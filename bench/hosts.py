r"""More hosts: how does a step grow from 2 hosts to 4, 8 and 16, with waits for computing? fddp and
PyTorch DDP.

    sudo .venv/bin/python bench/hosts.py [--hosts 2 4 8 16] [--each 2] [--mbit 25] \
        [--torch PYTHON] [--quick]

Network namespaces on a switch, 25 Mbit/s in each direction between a host and the switch, and
layers of 0.25 MiB; at another rate layers are larger in proportion, and two cores carry fewer
hosts. A layer sleeps as long as it would compute (`waiting` in bench/problems.py), so that two
cores carry sixteen hosts; launchers, messages, their sums and updates are real. All ways are alive
at once and take turns, four steps each. With `--each 2` there are two ranks on a host, and sums
over each host first take turns with sums at once. Earlier results for other numbers of hosts, other
rates or other backends stay in the file.

With `--project` steps are tuned on two hosts, and the file gets the projections of
`Tuning.at_scale` for all measured numbers of hosts.

  bound       a limit for every schedule: the larger of a step without traffic and of the bytes over
              the rate
  efficiency  a step without traffic over a step: weak scaling
  busy        the share of this machine's cores that worked while the ways took turns
"""

import argparse
import json
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from subprocess import Popen
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
from bench.jobs import ending
from bench.overlap import in_turns, listening
from bench.problems import ELEMENTS, LAYERS
from bench.record import busy_and_idle_s, save, saved, with_table
from bench.scaling import projected
from bench.two_hosts import Hosts, connect, ip, namespaces, shape, start_gloo, start_mpi
from fddp.analysis.tuning.link import Link
from fddp.analysis.tuning.scaling import hop_of, ring

PAGE = ROOT / "bench" / "README.md"
STEPS = 4  # in a turn
SWITCH = "fddp-switch"
BURST_S = 2.6e-3  # of the rate; more would let a part of each message pass at once
MBIT = 25  # a second, for layers of ELEMENTS
FRAME = 1448 / 1514  # of an Ethernet frame's bytes are a message's

# (command, variables) → the processes of a job
Start = Callable[[Sequence[str], Mapping[str, str]], list[Popen]]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hosts", nargs="+", type=int, default=[2, 4, 8, 16])
    parser.add_argument("--each", type=int, default=1, help="ranks on a host")
    parser.add_argument("--mbit", type=int, default=MBIT, help="a second, of each host's wire")
    parser.add_argument("--backends", nargs="+", default=["gloo"], choices=["gloo", "mpi"])
    parser.add_argument(
        "--torch", default=None, help="python of an environment with torch 2.13 (CPU)"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--project", action="store_true", help="from two hosts to the others, and nothing else"
    )
    parser.add_argument("--quick", action="store_true", help="1 round, nothing is saved")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # takes the hosts down before it ends
    rounds = 1 if args.quick else args.rounds
    if args.project:
        keep(
            {
                title: {**result, **projection(title, result)}
                for projection in [projections()]
                for title, result in saved("hosts").items()
            }
        )
        return
    for count in args.hosts:
        with switched(count, args.mbit) as hosts:
            jobs = starts(hosts, args.each, args.backends, args.torch)
            result = measure(jobs, count, args.each, args.mbit, rounds)
        title = f"{count} of {args.each} at {args.mbit} Mbit/s, {' and '.join(args.backends)}"
        print(f"\n{title}\n{table(result)}", flush=True)
        if not args.quick:
            keep({title: result})


def keep(results: Mapping[str, Any]) -> None:
    """Adds results to those of the file, and writes the table of all."""
    print(save("hosts", saved("hosts") | dict(results)))
    PAGE.write_text(with_table(PAGE.read_text(), as_markdown(saved("hosts")), "bench/hosts.py"))


def projections() -> Callable[[str, Mapping[str, Any]], dict[str, float]]:
    """Tunes on two hosts; returns (title, result) → the projected staged step, for a rank a host
    over Gloo."""
    with switched(2, MBIT) as hosts, tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "found.json"
        command = [
            sys.executable,
            str(ROOT / "bench" / "tuning_worker.py"),
            "gloo",
            "waiting",
            "3",
            str(path),
            str(ELEMENTS / 2**18),
        ]
        with ending(start_gloo(command, {"PYTHONPATH": str(ROOT)}, hosts=hosts)) as jobs:
            if any(job.wait(300) for job in jobs):
                raise RuntimeError("two hosts could not be tuned; the error is above.")
        measurement = json.loads(path.read_text())
    hop = hop_of(Link(**measurement["link"]), 2)

    def project(title: str, result: Mapping[str, Any]) -> dict[str, float]:
        backends, each, mbit, count = _place((title, result))
        if (backends, each, mbit) != ("gloo", 1, MBIT):
            return {}
        (projected_step,) = projected(measurement, hop, measurement, (count,), ring)
        step_ms = 1e3 * projected_step.step_s
        print(
            f"{title}: projected {step_ms:.0f} ms, "
            f"{step_ms / result['step_ms']['fddp staged (Gloo)'][1] - 1:+.1%}"
        )
        return {"at_scale_ms": round(step_ms, 1)}

    return project


@contextmanager
def switched(count: int, mbit: int) -> Iterator[Hosts]:
    """Sets up hosts on a switch, and takes them down whatever happens.

    Args:
      count: of the hosts.
      mbit: a second, of each one's wire.

    Yields:
      The hosts.
    """
    hosts = Hosts(
        tuple(f"fddp-{k}" for k in range(count)), tuple(f"10.77.1.{k + 1}" for k in range(count))
    )
    burst = f"{round(BURST_S * mbit * 1e6 / 8)}b"
    with namespaces((SWITCH, *hosts.names)):
        ip("-n", SWITCH, "link", "add", "switch", "type", "bridge")
        ip("-n", SWITCH, "link", "set", "switch", "up")
        for k, name in enumerate(hosts.names):
            port = f"port{k}"
            ip(
                "link",
                "add",
                port,
                "netns",
                SWITCH,
                "type",
                "veth",
                "peer",
                "name",
                "wire",
                "netns",
                name,
            )
            ip("-n", SWITCH, "link", "set", port, "master", "switch", "up")
            shape(SWITCH, port, f"{mbit}mbit", burst)
        connect(hosts, f"{mbit}mbit", burst)
        yield hosts


def starts(hosts: Hosts, each: int, backends: Sequence[str], torch: str | None) -> dict[str, Start]:
    """The starters of jobs on emulated hosts, by the command of their ranks."""
    starters: dict[str, Start] = {}
    for backend in backends:
        starters[backend] = partial(
            start_mpi if backend == "mpi" else start_gloo, each=each, hosts=hosts
        )
    if torch:
        starters[torch] = partial(start_gloo, each=each, hosts=hosts)
    return starters


def measure(
    jobs: Mapping[str, Start],
    count: int,
    each: int,
    mbit: int,
    rounds: int,
    warm_up: Callable[[str], int] = lambda way: 2,
) -> dict[str, Any]:
    """Starts all jobs, lets their ways take turns, and evaluates them.

    Args:
      jobs: starters, by the backend of fddp, or by the python of an environment with PyTorch.
      count: number of hosts.
      each: ranks on a host.
      mbit: rate of each host's wire, Mbit/s.
      rounds: turns of each way that count.
      warm_up: (way) → its steps before those.
    """
    with listening() as (control, accept):
        processes: list[Popen] = []
        worker = str(ROOT / "bench" / "hosts_worker.py")
        with ending(processes):
            for job, start in jobs.items():
                elements = str(ELEMENTS * mbit // MBIT)
                fddp = [sys.executable, worker, job, control, str(each), elements]
                torch = [
                    job,
                    str(ROOT / "bench" / "torch_worker.py"),
                    control,
                    f"waiting:{elements}",
                ]
                processes += start(
                    fddp if job in ("gloo", "mpi") else torch, {"PYTHONPATH": str(ROOT)}
                )
            lines = accept(len(jobs) * count * each)
            before = busy_and_idle_s()
            seconds, _ = in_turns(lines, rounds, steps=STEPS, warm_up=warm_up)
            busy, idle = np.subtract(busy_and_idle_s(), before)
    return evaluate(seconds, count, mbit, busy / (busy + idle))


def evaluate(
    seconds: Mapping[str, np.ndarray], count: int, mbit: int, busy: float
) -> dict[str, Any]:
    """Quartiles of each way's steps, and the bound, at `mbit` Mbit/s for each host; `busy` is a
    share."""
    nbytes = 4 * ELEMENTS * mbit // MBIT * LAYERS * 2 * (count - 1) / count
    traffic_s = nbytes / (mbit * 1e6 / 8 * FRAME)
    local_ms = [float(np.median(durations)) for way, durations in seconds.items() if "alone" in way]
    result: dict[str, Any] = {
        "step_ms": {
            way: [round(1e3 * q, 1) for q in np.percentile(durations, (25, 50, 75))]
            for way, durations in seconds.items()
        },
        "traffic_ms": round(1e3 * traffic_s, 1),
        "busy": round(float(busy), 3),
    }
    if local_ms:
        result |= {
            "alone_ms": round(1e3 * min(local_ms), 1),
            "bound_ms": round(1e3 * max(min(local_ms), traffic_s), 1),
        }
    return result


def table(result: Mapping[str, Any]) -> str:
    local_ms = result.get("alone_ms", np.nan)
    bound = result.get("bound_ms", np.nan)
    rows = [
        f"{way:28} {low:8.1f} {middle:8.1f} {high:8.1f} ms   {middle / bound:5.2f} × bound   "
        f"efficiency {local_ms / middle:.0%}"
        for way, (low, middle, high) in result["step_ms"].items()
    ]
    return "\n".join([*rows, f"traffic {result['traffic_ms']} ms, cores busy {result['busy']:.0%}"])


def as_markdown(results: Mapping[str, Any]) -> str:
    """The saved results as a table: medians with quartiles; of PyTorch DDP those of its best
    cap."""
    head = ["hosts of ranks", "way", "ms a step (quartiles)", "× bound", "efficiency", "cores busy"]
    rows = [head, ["---"] * len(head)]
    for title, result in sorted(results.items(), key=_place):
        ways = result["step_ms"]
        best = min(
            (way for way in ways if "DDP" in way), key=lambda way: ways[way][1], default=None
        )
        for way, (low, middle, high) in ways.items():
            if way == best or "DDP" not in way:
                share = [f"{middle / result['bound_ms']:.2f}", f"{result['alone_ms'] / middle:.2f}"]
                rows.append(
                    [
                        title,
                        way,
                        f"{middle:.0f} ({low:.0f}–{high:.0f})",
                        *share,
                        f"{result['busy']:.2f}",
                    ]
                )
        if "at_scale_ms" in result:
            projected_ms = result["at_scale_ms"]
            rows.append(
                [
                    title,
                    "staged, by `Tuning.at_scale` from two hosts",
                    f"{projected_ms:.0f}",
                    "",
                    "",
                    "",
                ]
            )
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _place(saved: tuple[str, Any]) -> tuple[str, int, int, int]:
    """The place of a result in the table."""
    count, _, each, _, mbit, _, backends = saved[0].replace(",", "").split(maxsplit=6)
    return backends, int(each), int(mbit), int(count)


if __name__ == "__main__":
    main()
