"""Ranks break in every way while the others train on: how soon is the next step, do two groups ever
train, and does the training end as the calm run does?

    python bench/elastic.py [--steps 2000] [--every 20] [--faults SIGKILL …] [--quick]

Trains a small network with Adam and twelve virtual replicas on four ranks, under `python -m fddp
run --elastic` over Gloo: once in peace, once with a fault of a rank that is drawn, about every so
many seconds, between two steps or in a message. The rank starts again and joins. Compares the
digests of the whole states and the groups of all steps, and measures the time from each fault to
the next step of any other rank.
"""

import hashlib
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from copy import copy
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax

import fddp

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
from bench.chaos import arguments
from bench.faults import FAULTS, PLACES
from bench.record import save

RANKS = 4
STALL_S = 2.0
INPUT_S = 0.05  # the loading time of a batch
LIMIT_S = 7200.0
BACK_S = 60.0
OPTIONS: Any = {"virtual_replicas": 12}
WIDTH = 64
BATCH = 24

BREAK: dict[str, Callable[[], None]] = {
    **{name: function for name, (function, _) in FAULTS.items()},
    "os._exit": lambda: os._exit(7),  # a rank that ends with 0 has reached its end
}
# Kinds that end a rank by itself, and not by `fddp run`.
EXITS = {"SIGKILL", "SIGSEGV", "raise", "SystemExit", "os._exit"}


@dataclass
class Fault:
    """A broken rank."""

    kind: str
    rank: int
    place: str
    step: int
    """The last step before it."""
    back_s: float | None = None
    """Seconds until the next step; None: the training had just ended."""
    named: bool = False
    """True if the next group is the earlier one without the broken rank."""


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--faults", nargs="+", choices=BREAK, default=list(BREAK))
    parser.add_argument("--name", default="elastic", help="of the result's file")
    args = parser.parse_args()
    if args.quick:
        args.steps, args.every = 100, 3.0
    if args.rank:
        train(Path(args.rank[0]), int(args.rank[1]), float(args.rank[2]))
        return
    calm, *_ = run(args.steps, None, args.faults, random.Random(args.seed))
    wild, faults, split = run(args.steps, args.every, args.faults, random.Random(args.seed))
    results = {"equal": calm == wild, "split": split, "steps": args.steps}
    results["faults"] = [asdict(fault) for fault in faults]
    print(summary(results))
    if not args.quick:
        print(save(args.name, {"ranks": RANKS, "stall_s": STALL_S, **results}))
    if not results["equal"] or split:
        sys.exit(1)


def summary(results: dict[str, Any]) -> str:
    faults = results["faults"]
    end = "the state of the calm run" if results["equal"] else "ANOTHER STATE than the calm run"
    ended = [fault for fault in faults if fault["back_s"] is not None]
    lines = [
        f"{results['steps']} steps with {len(faults)} faults end with {end}; "
        f"{sum(fault['named'] for fault in ended)} of {len(ended)} times the others went on "
        f"without the broken rank alone; groups that trained beside another: {results['split']}"
    ]
    for kind in BREAK:
        seconds = [fault["back_s"] for fault in ended if fault["kind"] == kind]
        if seconds:
            after = f"the next step after {np.median(seconds):.2f} s, at most {max(seconds):.2f}"
            lines.append(f"{kind:10} {len(seconds):3} times: {after}")
    return "\n".join(lines)


def run(
    steps: int, every: float | None, kinds: list[str], draw: random.Random
) -> tuple[set[str], list[Fault], int]:
    """A training; the digests that its ranks print at their end, its faults, and the number of
    groups that trained beside another."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        env = os.environ | {"JAX_PLATFORMS": "cpu", "TF_CPP_MIN_LOG_LEVEL": "3"}
        pause = INPUT_S if every else 0.0
        words = ["--elastic", "-n", str(RANKS), __file__, "--rank", name, str(steps), str(pause)]
        command = [sys.executable, "-m", "fddp", "run", *words]
        with subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE) as job:
            output = list[bytes]()
            reader = threading.Thread(target=lambda: output.extend(job.stdout or ()))
            reader.start()
            faults = list[Fault]()
            deadline = time.monotonic() + LIMIT_S
            while every and job.poll() is None and time.monotonic() < deadline:
                if wait(job, every * draw.uniform(0.7, 1.3)) and len(newest(folder)) == RANKS:
                    faults.append(break_rank(job, folder, kinds, draw, faults))
                    print(f"{len(faults):4} {faults[-1]}", flush=True)
            job.wait(LIMIT_S)
            reader.join()
        if job.returncode:
            raise RuntimeError(f"the job ended with {job.returncode}")
        split = groups_beside_others(folder)
    lines = [line.decode().partition("] ")[2].strip() for line in output]
    return {line for line in lines if line.startswith("digest ")}, faults, split


def wait(job: subprocess.Popen, seconds: float) -> bool:
    """Waits for some seconds; False if the job has ended by then."""
    with suppress(subprocess.TimeoutExpired):
        job.wait(seconds)
    return job.poll() is None


def break_rank(
    job: subprocess.Popen, folder: Path, kinds: list[str], draw: random.Random, earlier: list[Fault]
) -> Fault:
    """Has a rank break itself, and waits until another rank has done a further step."""
    before = newest(folder)
    rank = draw.choice(sorted(before))
    step, group, ranks = max(before.values())
    last = [fault.kind for fault in earlier if fault.rank == rank][-2:]
    # A rank that ends by itself soon after three starts in a row does not start again.
    if len(last) == 2 and EXITS.issuperset(last):
        kinds = [kind for kind in kinds if kind not in EXITS] or kinds
    fault = Fault(draw.choice(kinds), rank, draw.choice(PLACES), step)
    order, broken = folder / f"break_{rank}", folder / f"broken_{rank}"
    broken.unlink(missing_ok=True)
    staging = order.with_suffix(".new")
    staging.write_text(f"{fault.kind}/{fault.place}")
    staging.replace(order)
    deadline = time.monotonic() + BACK_S
    while job.poll() is None and time.monotonic() < deadline:
        later = [x for x in newest(folder).values() if x[1] > group]
        if later and broken.exists():
            fault.back_s = round(time.monotonic() - float(broken.read_text()), 3)
            fault.named = min(later)[2] == [x for x in ranks if x != rank]
            break
        time.sleep(0.01)
    return fault


### The steps of all ranks, in files


Done = tuple[int, int, list[int]]
"""A step, the number of the group that did it, and the ranks of that group."""


def newest(folder: Path) -> dict[int, Done]:
    """Rank → its newest step, of running ranks."""
    found = dict[int, Done]()
    for file in folder.glob("steps_*"):
        _, rank, process = file.name.split("_")
        with suppress(OSError, IndexError):
            os.kill(int(process), 0)
            found[int(rank)] = read(file)[-1]
    return found


def read(file: Path) -> list[Done]:
    """All steps of a process; its last line may be incomplete."""
    return [json.loads(line) for line in file.read_text().split("\n")[:-1]]


def groups_beside_others(folder: Path) -> int:
    """The number of groups of which two with one number had different ranks, or which did a step
    after the next group had done it."""
    ranks_of = defaultdict[int, set[tuple[int, ...]]](set)
    steps_of = defaultdict[int, list[int]](list)
    for file in folder.glob("steps_*"):
        for step, group, ranks in read(file):
            ranks_of[group].add(tuple(ranks))
            steps_of[group].append(step)
    # An interrupted step may have been complete for a rank that broke: two groups do it.
    late = [x for x, y in pairwise(sorted(steps_of)) if max(steps_of[x]) > min(steps_of[y])]
    return len(late) + sum(len(ranks) > 1 for ranks in ranks_of.values())


### One rank


def train(folder: Path, steps: int, pause: float) -> None:
    """One rank, which breaks on demand."""
    fddp.init(elastic=True, stall_s=STALL_S)
    rank = os.environ["FDDP_RANK"]
    order, broken = folder / f"break_{rank}", folder / f"broken_{rank}"
    data = np.random.default_rng(0).normal(size=(5000, WIDTH)).astype(np.float32)
    params = {name: np.full((WIDTH, WIDTH), 1 / WIDTH, np.float32) for name in ("first", "second")}
    loss = lambda p, x: ((jax.numpy.tanh(x @ p["first"]) @ p["second"] - x) ** 2).mean()  # noqa: E731

    def break_if_demanded(place: str) -> None:
        if order.exists() and order.read_text().endswith(f"/{place}"):
            kind, _ = order.read_text().split("/")
            order.unlink()
            broken.write_text(str(time.monotonic()))
            BREAK[kind]()

    def make(group: fddp.Group) -> fddp.TrainStep:
        def message(name: str, nbytes: int) -> Any:
            if threading.current_thread() is threading.main_thread():
                break_if_demanded("message")
            return group.journal.message(name, nbytes)

        journal: Any = copy(group.journal)
        journal.message = message
        breaking = replace(group, journal=journal)
        return fddp.train_step(loss, optax.adam(1e-3), group=breaking, **OPTIONS)

    def rows(group: fddp.Group) -> np.ndarray:
        deal: Any = {"rank": group.rank, "size": group.processes, "start_step": trainer.number}
        virtual = OPTIONS["virtual_replicas"]
        return data[next(fddp.samples(len(data), BATCH, virtual_replicas=virtual, **deal))]

    trainer = fddp.elastic.Trainer(make, params)
    with (folder / f"steps_{rank}_{os.getpid()}").open("a") as done:
        while trainer.number < steps:
            time.sleep(pause)
            break_if_demanded("between")
            trainer.step(rows)
            stats = trainer.stats()
            done.write(f"{json.dumps([trainer.number, stats.group, stats.ranks])}\n")
            done.flush()
    leaves = jax.tree.leaves(jax.device_get(trainer.state))
    digest = hashlib.sha256(b"".join(np.asarray(x).tobytes() for x in leaves)).hexdigest()
    print(f"digest {digest}", flush=True)
    print(json.dumps(trainer.stats()), file=sys.stderr)


if __name__ == "__main__":
    main()
