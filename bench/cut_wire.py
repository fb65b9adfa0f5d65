"""Does every process of a job end, on both sides, when the wire between two hosts is cut for ever?

    python bench/cut_wire.py [--count 5] [--quick]

Two ranks on two hosts (`two_hosts.py`) train a tiny network with a stall of two seconds, over Gloo
and MPI, bare and under `python -m fddp run`. The wire is pulled, or swallows all packets. The
results are the end of the last process, the exit codes, and the reason in each watcher's record.
"""

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))
from bench.faults import processes_of
from bench.record import save
from bench.two_hosts import BACKENDS, NAMES, ROOT, start_gloo, start_mpi, start_run, two_hosts
from fddp.comm import poll
from fddp.watching import read_flights

STALL_S = 2.0
LIMIT_S = 60.0
STEPS = 500  # before the cut
CUTS = {"pulled": "ip link set wire down", "silent": "tc qdisc replace dev wire root bfifo limit 1"}
SAYS = ("rank 1 has not been heard of", "rank 0 has not been heard of")  # on rank 0, on rank 1


@dataclass(frozen=True)
class Trial:
    """The outcome of a job after its wire was cut."""

    backend: str
    way: str
    cut: str
    gone_s: float | None
    """Seconds from the cut until its last process was gone; None: some were running at the
    limit."""
    codes: list[int]
    why: list[str]
    """The reasons in the records of both ranks' watchers."""

    @property
    def right(self) -> bool:
        named = len(self.why) == 2 and all(name in reason for name, reason in zip(SAYS, self.why))
        return self.gone_s is not None and 0 not in self.codes and named


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=5, help="cuts of each kind (default 5)")
    parser.add_argument(
        "--quick", action="store_true", help="one of each kind, and nothing is saved"
    )
    parser.add_argument("--rank", nargs=2, metavar=("BACKEND", "FOLDER"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank:
        train(args.rank[0], Path(args.rank[1]))
        return
    results = []
    for backend, way, cut in product(BACKENDS, ("bare", "run"), CUTS):
        trials = [tried(backend, way, cut) for _ in range(1 if args.quick else args.count)]
        results += trials
        end_times = [trial.gone_s for trial in trials if trial.gone_s is not None]
        good = sum(trial.right for trial in trials)
        after = (
            f"{np.median(end_times or np.nan):.1f} s, at most {max(end_times, default=np.nan):.1f}"
        )
        print(
            f"{backend:<5} {way:<5} {cut:<7} {good} of {len(trials)} right; all gone after {after}",
            flush=True,
        )
        for trial in trials:
            if not trial.right:
                print(trial)
    if not args.quick:
        print(save("cut_wire", {"stall_s": STALL_S, "jobs": [asdict(trial) for trial in results]}))


def tried(backend: str, way: str, cut: str) -> Trial:
    """Cuts the wire of a job, and observes it."""
    start: Callable[..., list[subprocess.Popen]] = start_run
    if way == "bare":
        start = start_gloo if backend == "gloo" else start_mpi
    with two_hosts("1gbit"), tempfile.TemporaryDirectory() as folder:
        env = {
            "JAX_PLATFORMS": "cpu",
            "PYTHONPATH": str(ROOT),
            "BENCH": folder,
            "FDDP_FLIGHT_DIR": f"{folder}/flight",
        }
        quiet: Any = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        jobs = start([sys.executable, __file__, "--rank", backend, folder], env, **quiet)
        poll(lambda: Path(folder, "trains").exists(), LIMIT_S)
        for name in NAMES:
            subprocess.run(["ip", "netns", "exec", name, *CUTS[cut].split()], check=True)
        at = time.monotonic()
        over = poll(
            lambda: all(job.poll() is not None for job in jobs) and not processes_of(folder),
            LIMIT_S,
        )
        gone_s = time.monotonic() - at
        for process in processes_of(folder):
            os.kill(process, signal.SIGKILL)
        codes = [job.wait() for job in jobs]
        flights = read_flights([f"{folder}/flight"])
    return Trial(
        backend,
        way,
        cut,
        round(gone_s, 2) if over else None,
        codes,
        [record["why"] for record in flights],
    )


def train(backend: str, folder: Path) -> None:
    """One rank: trains for ever."""
    import jax.numpy as jnp
    import optax

    import fddp

    group = fddp.init(backend, stall_s=STALL_S)
    step = fddp.train_step(lambda w, x: jnp.mean((x @ w) ** 2), optax.sgd(0.1), group=group)
    state = step.init(np.ones((4, 1), np.float32))
    while True:
        state, info = step(state, np.ones((4, 4), np.float32))
        float(info.loss)
        if step.steps == STEPS and group.rank == 0:
            (folder / "trains").touch()


if __name__ == "__main__":
    main()
