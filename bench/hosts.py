r"""More hosts: how does a step grow from 2 hosts to 4, 8 and 16, with waits for computing? fddp and
PyTorch DDP.

    sudo .venv/bin/python bench/hosts.py [--hosts 2 4 8 16] [--mbit 25] \
        [--torch PYTHON] [--quick]

Network namespaces on a switch, 25 Mbit/s in each direction between a host and the switch, and
layers of 0.25 MiB; at another rate layers are larger in proportion, and two cores carry fewer
hosts. A layer sleeps as long as it would compute (`waiting` in bench/problems.py), so that two
cores carry sixteen hosts; launchers, messages, their sums and updates are real. All ways are alive
at once and take turns, four steps each. Earlier results for other numbers of hosts, other rates or
other backends stay in the file.

  efficiency  a step without traffic over a step: weak scaling
  busy        the share of this machine's cores that worked while the ways took turns
"""

import signal
import sys
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
from bench.problems import ELEMENTS
from bench.record import busy_and_idle_s, question, save, saved, with_table
from bench.two_hosts import Hosts, connect, ip, namespaces, shape, start_gloo, start_mpi

PAGE = ROOT / "bench" / "README.md"
STEPS = 4  # in a turn
SWITCH = "fddp-switch"
BURST_S = 2.6e-3  # of the rate; more would let a part of each message pass at once
MBIT = 25  # a second, for layers of ELEMENTS

# (command, variables) → the processes of a job
Start = Callable[[Sequence[str], Mapping[str, str]], list[Popen]]


def main() -> None:
    parser = question(__doc__, "1 round of 2 hosts")
    parser.add_argument("--hosts", nargs="+", type=int, default=[2, 4, 8, 16])
    parser.add_argument("--mbit", type=int, default=MBIT, help="a second, of each host's wire")
    parser.add_argument("--backends", nargs="+", default=["gloo"], choices=["gloo", "mpi"])
    parser.add_argument("--torch", help="python of an environment with torch (CPU)")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # takes the hosts down before it ends
    for count in [2] if args.quick else args.hosts:
        with switched(count, args.mbit) as hosts:
            jobs = starts(hosts, args.backends, args.torch)
            result = measure(jobs, count, args.mbit, rounds=1 if args.quick else 3)
        title = f"{count} at {args.mbit} Mbit/s, {' and '.join(args.backends)}"
        print(f"\n{title}\n{table(result)}", flush=True)
        if not args.quick:
            keep({title: result})


def keep(results: Mapping[str, Any]) -> None:
    """Adds results to those of the file, and writes the table of all."""
    print(save("hosts", saved("hosts") | dict(results)))
    PAGE.write_text(with_table(PAGE.read_text(), as_markdown(saved("hosts")), "bench/hosts.py"))


@contextmanager
def switched(count: int, mbit: int) -> Iterator[Hosts]:
    """Sets up hosts on a switch, each with a wire of so many Mbit/s, and takes them down whatever
    happens."""
    hosts = Hosts(
        tuple(f"fddp-{k}" for k in range(count)), tuple(f"10.77.1.{k + 1}" for k in range(count))
    )
    burst = f"{round(BURST_S * mbit * 1e6 / 8)}b"
    with namespaces((SWITCH, *hosts.names)):
        ip(f"-n {SWITCH} link add switch type bridge")
        ip(f"-n {SWITCH} link set switch up")
        for k, name in enumerate(hosts.names):
            port = f"port{k}"
            ip(f"link add {port} netns {SWITCH} type veth peer name wire netns {name}")
            ip(f"-n {SWITCH} link set {port} master switch up")
            shape(SWITCH, port, f"{mbit}mbit", burst)
        connect(hosts, f"{mbit}mbit", burst)
        yield hosts


def starts(hosts: Hosts, backends: Sequence[str], torch: str | None) -> dict[str, Start]:
    """The starters of jobs on emulated hosts, by the command of their ranks."""
    starters: dict[str, Start] = {}
    for backend in backends:
        starters[backend] = partial(start_mpi if backend == "mpi" else start_gloo, hosts=hosts)
    if torch:
        starters[torch] = partial(start_gloo, hosts=hosts)
    return starters


def measure(jobs: Mapping[str, Start], count: int, mbit: int, rounds: int) -> dict[str, Any]:
    """Starts jobs on so many hosts at so many Mbit/s, and evaluates their ways.

    A job has the name of its backend, or of the python of an environment with PyTorch.
    """
    with listening() as (control, accept):
        processes: list[Popen] = []
        elements = ELEMENTS * mbit // MBIT
        task = [control, f"waiting:{elements}"]
        cap = str(elements / 2**18)  # a bucket for each layer
        with ending(processes):
            for job, start in jobs.items():
                fddp = [sys.executable, f"{ROOT}/bench/overlap_worker.py", job, *task, cap]
                torch = [job, f"{ROOT}/bench/torch_worker.py", *task]
                command = fddp if job in ("gloo", "mpi") else torch
                processes += start(command, {"PYTHONPATH": str(ROOT)})
            lines = accept(len(jobs) * count)
            before = busy_and_idle_s()
            seconds = in_turns(lines, rounds, steps=STEPS, warm_up=2)
            busy, idle = np.subtract(busy_and_idle_s(), before)
    return evaluate(seconds, busy / (busy + idle))


def evaluate(seconds: Mapping[str, np.ndarray], busy: float) -> dict[str, Any]:
    """Quartiles of each way's steps; `busy` is a share."""
    return {
        "step_ms": {
            way: [round(1e3 * q, 1) for q in np.percentile(durations, (25, 50, 75))]
            for way, durations in seconds.items()
        },
        "busy": round(float(busy), 3),
    }


def table(result: Mapping[str, Any]) -> str:
    rows = [
        f"{way:28} {low:8.1f} {middle:8.1f} {high:8.1f} ms   efficiency {share:.0%}"
        for way, (low, middle, high), share in _shares(result)
    ]
    return "\n".join([*rows, f"cores busy {result['busy']:.0%}"])


def as_markdown(results: Mapping[str, Any]) -> str:
    """The saved results as a table: medians with quartiles; of PyTorch DDP those of its best
    cap."""
    head = ["hosts", "way", "ms a step (quartiles)", "efficiency", "cores busy"]
    rows = [head, ["---"] * len(head)]
    for title, result in sorted(results.items(), key=_place):
        ways = result["step_ms"]
        best = min((way for way in ways if "DDP" in way), key=lambda x: ways[x][1], default=None)
        for way, (low, middle, high), share in _shares(result):
            if way == best or "DDP" not in way:
                ms = f"{middle:.0f} ({low:.0f}–{high:.0f})"
                rows.append([title, way, ms, f"{share:.2f}", f"{result['busy']:.2f}"])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _shares(result: Mapping[str, Any]) -> Iterator[tuple[str, list[float], float]]:
    """The way, its quartiles, and its efficiency."""
    alone = min(ms[1] for way, ms in result["step_ms"].items() if "alone" in way)
    for way, quartiles in result["step_ms"].items():
        yield way, quartiles, alone / quartiles[1]


def _place(saved: tuple[str, Any]) -> tuple[str, int, int]:
    """The place of a result in the table."""
    count, _, mbit, _, backends = saved[0].replace(",", "").split(maxsplit=4)
    return backends, int(mbit), int(count)


if __name__ == "__main__":
    main()
