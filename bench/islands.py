"""A slow or stopped island: how much does it cost, with and without waiting for each other?

    python bench/islands.py [--only slow_island] [--seeds 3] [--seconds 8] [--quick]

Three processes over Gloo train a small network on handwritten digits, 16 rows a step. A step is
made 20 ms longer by sleeping, on the slow island 60 ms. Every method gets equally many seconds:
rows per second of all islands, and the loss on rows that none has trained on. Then two islands
train with an exchange after every eighth step, and one of them is stopped (SIGSTOP) for 10 s: the
steps that the other makes meanwhile, and in the 10 s before. At last asynchronous SGD is compared
with synchronous SGD at equal rows, without a clock: one island is three times slower, so that fast
ones bring more rows, and the loss is computed after equally many rows of all.

Source: Figure 1 of Ho et al., "More Effective Distributed ML via a Stale Synchronous Parallel
Parameter Server" (2013).
"""

import argparse
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax

sys.path.insert(0, str(Path(__file__).parents[1]))
import fddp
from bench import jobs
from bench.local_steps import digits
from bench.record import save, saved
from models import data

ISLANDS = 3
SLOW = 2  # the number of the slow island
STEP_S = 0.02
ROWS = 16
STOPPED_S = 10.0
POINTS = 10  # of each curve
PARTS = ("slow_island", "stopped_island", "equal_rows")
MOMENTUM = optax.sgd(0.05, momentum=0.9)
# Ways to train, by name: the optimizer, and whether islands make as many steps as they like.
METHODS: dict[str, tuple[Any, bool]] = {
    "DDP": (optax.sgd(0.1), False),
    "asynchronous SGD": (
        fddp.local_steps(optax.sgd(0.1), outer=optax.sgd(1 / ISLANDS), quorum=1),
        True,
    ),
    "asynchronous SGD, staleness 4": (
        fddp.local_steps(optax.sgd(0.1), outer=optax.sgd(1 / ISLANDS), quorum=1, max_staleness=4),
        True,
    ),
    "local SGD, 8": (fddp.local_steps(MOMENTUM, every=8), False),
    "local SGD, 8, quorum of 2": (fddp.local_steps(MOMENTUM, every=8, quorum=2), True),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument(
        "--only", nargs="+", choices=PARTS, default=PARTS, help="the file keeps the other parts"
    )
    parser.add_argument(
        "--quick", action="store_true", help="one seed and two seconds, nothing is saved"
    )
    parser.add_argument("--rank", choices=["slow", "stopped"], help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.quick:
        args.seeds = 1
        args.seconds = 2.0
    if args.rank:
        {"slow": rank_of_slow, "stopped": rank_of_stopped}[args.rank](args)
        return
    with tempfile.TemporaryDirectory() as folder:
        measures: dict[str, Callable[[], Any]] = {
            "slow_island": lambda: ranks("slow", ISLANDS, Path(folder), args),
            "stopped_island": lambda: {
                how: one_is_stopped(how, Path(folder) / how, args) for how in ("waits", "quorum")
            },
            "equal_rows": lambda: equal_rows(args.seeds, 60 if args.quick else 600),
        }
        results = {name: measures[name]() for name in args.only}
    print(json.dumps(results, indent=1))
    if not args.quick:
        settings = {"islands": ISLANDS, "step_s": STEP_S, "seconds": args.seconds}
        print(save("islands", saved("islands") | settings | results))


def ranks(kind: str, count: int, folder: Path, args: argparse.Namespace) -> Any:
    """Runs ranks of this script to their end; the result that rank 0 writes."""
    with jobs.ending(start(kind, count, folder, args)) as processes:
        for process in processes:
            process.wait()
    return json.loads((folder / "result.json").read_text())


def start(kind: str, count: int, folder: Path, args: argparse.Namespace) -> list[Any]:
    folder.mkdir(exist_ok=True)
    arguments = [
        "--rank",
        kind,
        "--folder",
        str(folder),
        "--seeds",
        str(args.seeds),
        "--seconds",
        str(args.seconds),
    ]
    return jobs.start(
        "gloo", count, [sys.executable, __file__, *arguments], {"JAX_PLATFORMS": "cpu"}
    )


def one_is_stopped(how: str, folder: Path, args: argparse.Namespace) -> dict[str, int]:
    """Steps of rank 0 in the seconds before rank 1 is stopped, and while it is."""
    folder.mkdir()
    (folder / "how").write_text(how)
    with jobs.ending(start("stopped", 2, folder, args)) as processes:
        while not (folder / "begun").exists():
            time.sleep(0.05)
        time.sleep(STOPPED_S + 1)
        at = time.monotonic()
        os.kill(processes[1].pid, signal.SIGSTOP)
        time.sleep(STOPPED_S)
        os.kill(processes[1].pid, signal.SIGCONT)
        for process in processes:
            process.wait()
    end_times = np.array(json.loads((folder / "result.json").read_text()))
    before, meanwhile = (
        int(np.sum((end_times > t) & (end_times <= t + STOPPED_S))) for t in (at - STOPPED_S, at)
    )
    return {"steps_before": before, "steps_while_stopped": meanwhile}


def rank_of_slow(args: argparse.Namespace) -> None:
    group = fddp.init("gloo")
    results: dict[str, Any] = {name: {"rows_per_s": [], "test_loss": []} for name in METHODS}
    for seed in range(args.seeds):
        for name, (optimizer, free) in METHODS.items():
            rows, loss = train(group, seed, optimizer, free, args.seconds)
            results[name]["rows_per_s"].append(round(rows))
            results[name]["test_loss"].append(round(loss, 5))
            group.print(name, rows, loss)
    if group.is_main:
        (args.folder / "result.json").write_text(json.dumps(results))


def train(
    group: fddp.Group, seed: int, optimizer: Any, free: bool, seconds: float
) -> tuple[float, float]:
    """Rows per second of all islands, and the loss on rows that they have not trained on."""
    problem = digits(seed, 1)
    batches = own_batches(group.rank, seed)
    step = fddp.train_step(problem.loss_fn, optimizer, group=group)
    state, _ = step(step.init(problem.params), next(batches))  # compiles
    slow = 3 * STEP_S if group.rank == SLOW else STEP_S
    group.barrier()
    begin = time.monotonic()
    count = 0
    steps = round(seconds / (3 * STEP_S))  # of those that wait for the slow one
    while time.monotonic() < begin + seconds if free else count < steps:
        state, _ = step(state, next(batches))
        time.sleep(slow)
        count += 1
    state = fddp.meet(step, state)
    duration = time.monotonic() - begin
    params = fddp.whole(state.params, group=group)
    loss = held_out(problem, params)
    return ROWS * float(group.all_reduce(count)) / float(group.all_reduce(duration, "max")), loss


def rank_of_stopped(args: argparse.Namespace) -> None:
    """Trains long enough to stop the other island meanwhile; rank 0 notes the ends of its steps."""
    group = fddp.init("gloo")
    problem = digits(0, 1)
    batches = own_batches(group.rank, 0)
    quorum = {"waits": None, "quorum": 1}[(args.folder / "how").read_text()]
    step = fddp.train_step(
        problem.loss_fn, fddp.local_steps(MOMENTUM, every=8, quorum=quorum), group=group
    )
    state, _ = step(step.init(problem.params), next(batches))
    group.barrier()
    if group.is_main:
        (args.folder / "begun").touch()
    end_times = list[float]()
    for _ in range(round(2.5 * STOPPED_S / STEP_S)):
        state, _ = step(state, next(batches))
        jax.block_until_ready(state.step)
        time.sleep(STEP_S)
        end_times.append(time.monotonic())
    fddp.meet(step, state)
    if group.is_main:
        (args.folder / "result.json").write_text(json.dumps(end_times))


def equal_rows(seeds: int, most: int) -> dict[str, Any]:
    """Test loss after so many rows of all islands, for each seed: steps of the fast islands, `most`
    at the end."""
    slow = 3  # times
    step_counts = [k * most // POINTS for k in range(1, POINTS + 1)]
    counts = [
        [end // slow if island == SLOW else end for island in range(ISLANDS)] for end in step_counts
    ]
    # Synchronous steps have the rows of all islands.
    rows = [sum(counts_of_islands) // ISLANDS * ISLANDS * ROWS for counts_of_islands in counts]

    def asynchronous(seed: int, batch_counts: list[int], **options: Any) -> float:
        problem = digits(seed, 1)
        optimizer = fddp.local_steps(
            optax.sgd(0.1), outer=optax.sgd(1 / ISLANDS), quorum=1, **options
        )
        batches = [
            list(islice(own_batches(island, seed), count))
            for island, count in enumerate(batch_counts)
        ]
        islands = fddp.simulate_islands(
            problem.loss_fn,
            optimizer,
            problem.params,
            batches,
            # Those that come at once would be merged as one.
            seconds=lambda island, number: slow if island == SLOW else 1 + 0.05 * island,
        )
        return held_out(problem, islands.params)

    def synchronous(seed: int) -> list[float]:
        problem = digits(seed, 1)
        step = fddp.train_step(problem.loss_fn, optax.sgd(0.1), group=fddp.init("local"))
        state = step.init(problem.params)
        losses = list[float]()
        for number, batches in enumerate(
            zip(*(own_batches(island, seed) for island in range(ISLANDS))), 1
        ):
            state, _ = step(state, jax.tree.map(lambda *x: np.concatenate(x), *batches))
            if number * ISLANDS * ROWS == rows[len(losses)]:
                losses.append(held_out(problem, state.params))
            if len(losses) == POINTS:
                break
        return losses

    methods = {
        "synchronous SGD": synchronous,
        "asynchronous SGD": lambda seed: [
            asynchronous(seed, batch_counts) for batch_counts in counts
        ],
        "asynchronous SGD, staleness 4": lambda seed: [
            asynchronous(seed, batch_counts, max_staleness=4) for batch_counts in counts
        ],
    }
    curves = {name: [method(seed) for seed in range(seeds)] for name, method in methods.items()}
    return {
        "rows": rows,
        "test_loss": {name: np.round(curve, 5).tolist() for name, curve in curves.items()},
    }


def held_out(problem: Any, params: Any) -> float:
    """The loss on held-out rows."""
    return float(np.mean([problem.loss_fn(params, batch) for batch in problem.held_out]))


def own_batches(island: int, seed: int) -> Any:
    """Rows that an island draws for itself."""
    images, labels, _, _ = data.split_digits()
    images = images.reshape(len(images), -1).astype(np.float32) / 16
    draw = np.random.default_rng((seed, island))
    while True:
        chosen = draw.integers(len(images), size=ROWS)
        yield {"image": images[chosen], "label": labels[chosen].astype(np.int32)}


if __name__ == "__main__":
    main()
