"""Does a step run on, without hangs, leaks of memory or threads that stay?

    python bench/soak.py [--steps 2000] [--quick]

Four processes over MPI, then four over Gloo, train a tiny network. Memory (RSS) and threads are
read ten times on the way; the first tenth warms up.
"""

import argparse
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
from bench.jobs import ending, start
from bench.record import question, save

SIZE = 4
TIMEOUT_S = 600
READINGS = 10


def main() -> None:
    parser = question(__doc__, "200 steps")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--rank", metavar="BACKEND", help=argparse.SUPPRESS)
    args = parser.parse_args()
    steps = 200 if args.quick else args.steps
    if args.rank:
        soak(args.rank, steps)
        return
    results = {backend: job(backend, steps) for backend in ("mpi", "gloo")}
    for backend, ranks in results.items():
        growth = max(r["rss_mb"][-1] / r["rss_mb"][0] for r in ranks)
        print(
            f"{backend}: {steps} steps on {SIZE} ranks; memory grows {100 * (growth - 1):+.2f} % "
            f"at most; {ranks[0]}"
        )
    if not args.quick:
        print(save("soak", {"steps": steps, **results}))


def job(backend: str, steps: int) -> list[dict[str, Any]]:
    """Runs four ranks and collects the readings of each."""
    command = [sys.executable, __file__, "--steps", str(steps), "--rank", backend]
    pipes: Any = {"stdout": subprocess.PIPE, "text": True}
    with ending(start(backend, SIZE, command, {"JAX_PLATFORMS": "cpu"}, **pipes)) as jobs:
        output = "".join(job.communicate(timeout=TIMEOUT_S)[0] for job in jobs)
    reports = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    if len(reports) != SIZE or any(job.returncode for job in jobs):
        raise RuntimeError(f"{backend}: not all of {SIZE} ranks came to their end:\n{output}")
    return sorted(reports, key=lambda report: report["rank"])


def soak(backend: str, steps: int) -> None:
    """One rank: trains, and prints its readings."""
    import jax
    import optax

    import fddp
    from models import mlp

    group = fddp.init(backend)
    model = mlp.PRESETS["tiny"]
    batch = mlp.batch(model, 8, group.rank)
    params, _ = mlp.init(model, jax.random.key(0), batch)
    caps: dict[str, Any] = {
        "bucket_cap_mb": 0.002,
        "first_bucket_mb": 0.002,
        "last_bucket_mb": 0.002,
    }
    step = fddp.train_step(mlp.loss_fn(model), optax.adam(1e-3), group=group, has_aux=True, **caps)
    state = step.init(params)
    rss = []
    threads = []
    for number in range(steps):
        state, info = step(state, batch)
        if number % (steps // READINGS) == steps // READINGS - 1:
            jax.block_until_ready(info.loss)
            rss.append(round(_rss_mb(), 2))
            threads.append(threading.active_count())
    line = {
        "rank": group.rank,
        "buckets": len(step.plan.buckets),
        "rss_mb": rss,
        "threads": threads,
    }
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()
    group.barrier()


def _rss_mb() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


if __name__ == "__main__":
    main()
