"""Watching a rank, and comparing replicas: how much does it cost?

    python bench/guarding.py [--quick]

Two ranks train a small GPT, a step each in turn: watched; unwatched (the watchers stopped, nothing
written down); with replicas compared after each step, a hundred times as often as with
`check_replicas_every=100`; and with skipping of non-finite gradients. A watcher catches up in a
pause after it was stopped, so its share of a core is also measured by itself.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))
from bench.jobs import ending, start
from bench.record import ratio, save, summary

RANKS = 2
ROWS = 10
PAUSE_S = 0.005
SELDOM = 4  # rounds; each has all ways
WARM_UP = 5  # rounds before the first that counts
BACKENDS = ("mpi", "gloo")
SCHEDULES = ("staged", "fused")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick", action="store_true", help="few rounds, for a look; nothing is saved"
    )
    parser.add_argument(
        "--rank",
        nargs=4,
        metavar=("FOLDER", "BACKEND", "SCHEDULE", "ROUNDS"),
        help=argparse.SUPPRESS,
    )
    args = parser.parse_args()
    if args.rank:
        measure(*args.rank)
        return
    results = {}
    for backend in BACKENDS:
        for schedule in SCHEDULES:
            with tempfile.TemporaryDirectory() as folder:
                words = [folder, backend, schedule, "50" if args.quick else "800"]
                env = {"JAX_PLATFORMS": "cpu", "NPROC": "1"}
                with ending(
                    start(backend, RANKS, [sys.executable, __file__, "--rank", *words], env)
                ) as jobs:
                    for job in jobs:
                        job.wait(timeout=600)
                result = results[f"{backend} {schedule}"] = json.loads(
                    Path(folder, "found.json").read_text()
                )
            print(summary_of(f"{backend} {schedule}", result), flush=True)
    if not args.quick:
        print(save("guarding", results))


def summary_of(name: str, result: dict[str, Any]) -> str:
    lines = [f"{name}: a step of {result['unwatched']['median_ms']:.1f} ms"]
    step = result["unwatched"]["median_ms"]
    for way in ("watched", "skipping"):
        quartiles = result[f"{way} / unwatched"]
        # Of a median of so many the error is 1.25 standard deviations over the root of their
        # number.
        error = (
            1.25
            * (quartiles["quartile_3"] - quartiles["quartile_1"])
            / 1.35
            / np.sqrt(result["rounds"][way])
        )
        lines.append(
            f"  {way}: {quartiles['median']:.4f} ± {error:.4f} ({quartiles['quartile_1']:.4f} … "
            f"{quartiles['quartile_3']:.4f})"
        )
    more = result["compared / watched"]["median"] - 1
    lines.append(f"  replicas compared: {more * step:.2f} ms each time, {more:.3f} % at every 100")
    lines.append(f"  a watcher: {result['watcher_share_of_a_core']:.2%} of a core")
    return "\n".join(lines)


### One rank


def measure(folder: str, backend: str, schedule: Any, rounds: str) -> None:
    """Times blocks of steps in turn; rank 0 writes the results."""
    import jax
    import optax

    import fddp
    from fddp.comm import Journal
    from models import gpt

    group = fddp.init(backend)
    model = gpt.PRESETS["tiny"]
    batch = gpt.batch(model, ROWS, group.rank)
    params, _ = gpt.init(model, jax.random.key(0), batch)

    def way(group: fddp.Group, **options: Any) -> Callable[[], Any]:
        step = fddp.train_step(
            gpt.loss_fn(model),
            optax.adamw(1e-3),
            group=group,
            has_aux=True,
            schedule=schedule,
            **options,
        )
        state = step.init(params)

        def run() -> Any:
            nonlocal state
            state, info = step(state, batch)
            return float(info.loss)

        return run

    ways = {
        "unwatched": way(replace(group, journal=Journal())),
        "watched": way(group),
        "compared": way(group, check_replicas_every=1),
        "skipping": way(group, skip_nonfinite=True),
    }
    watcher = _watcher()
    seconds = {name: list[float]() for name in ways}
    before = _used_s(watcher)
    began = time.monotonic()
    draw = random.Random(0)  # the same on all ranks
    for turn in range(int(rounds)):
        # The cost of a step depends on the work before it: so in any order, and after a pause.
        order = list(ways) if turn % SELDOM == 0 else ["unwatched", "watched"]
        for name in draw.sample(order, len(order)):
            if name == "unwatched":
                os.kill(watcher, signal.SIGSTOP)
            time.sleep(PAUSE_S)
            group.barrier()
            begin = time.perf_counter()
            ways[name]()
            seconds[name].append(time.perf_counter() - begin)
            os.kill(watcher, signal.SIGCONT)
            time.sleep(PAUSE_S)
    if group.rank == 0:
        times = {name: np.array(values) for name, values in seconds.items()}
        seldom = {name: times[name][::SELDOM] for name in ("watched", "unwatched")}
        summaries: dict[str, Any] = {
            name: summary(values[WARM_UP:]) for name, values in times.items()
        }
        summaries["watched / unwatched"] = ratio(
            times["watched"][WARM_UP:], times["unwatched"][WARM_UP:]
        )
        summaries["skipping / unwatched"] = ratio(
            times["skipping"][WARM_UP:], seldom["unwatched"][WARM_UP:]
        )
        summaries["compared / watched"] = ratio(
            times["compared"][WARM_UP:], seldom["watched"][WARM_UP:]
        )
        share = (_used_s(watcher) - before) / (time.monotonic() - began)
        details = {
            "rounds": {name: len(values) - WARM_UP for name, values in times.items()},
            "watcher_share_of_a_core": share,
        }
        Path(folder, "found.json").write_text(json.dumps(summaries | details))


def _watcher() -> int:
    """The process that watches this one."""
    output = subprocess.run(
        ["ps", "-o", "pid,args", "--ppid", str(os.getpid())], capture_output=True, text=True
    ).stdout
    (line,) = [line for line in output.splitlines() if "watcher.main" in line]
    return int(line.split()[0])


def _used_s(process: int) -> float:
    """Seconds of a processor that a process has taken."""
    used = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[11:13]
    return sum(map(int, used)) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    main()
