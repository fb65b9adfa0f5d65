"""Ranks are killed and stopped while the others train on: how soon is the next step, and does the
training end as the calm run does?

    python bench/elastic.py [--steps 2000] [--every 20] [--seed 0] [--quick]

Trains a small network with Adam and twelve virtual replicas on four ranks, under `python -m fddp
run --elastic` over Gloo: once in peace, once with a signal to a rank that is drawn, about every so
many seconds. The rank starts again and joins. Compares the digests of the whole states, and
measures the time from each signal to the next step of any other rank.
"""

import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax

import fddp

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
from bench.chaos import SIGNALS, Fault, arguments
from bench.record import save

RANKS = 4
STALL_S = 2.0
INPUT_S = 0.05  # the loading time of a batch
LIMIT_S = 3600.0
OPTIONS: Any = {"virtual_replicas": 12, "schedule": "staged"}
WIDTH = 64
BATCH = 24


def main() -> None:
    args = arguments(__doc__)
    if args.rank:
        train(Path(args.rank[0]), int(args.rank[1]))
        return
    calm, _ = run(args.steps, None, random.Random(args.seed))
    wild, faults = run(args.steps, args.every, random.Random(args.seed))
    results = {
        "equal": calm == wild,
        "ended": len(wild),
        "steps": args.steps,
        "faults": [asdict(fault) for fault in faults],
    }
    print(summary(results))
    if not args.quick:
        print(save("elastic", {"ranks": RANKS, "stall_s": STALL_S, **results}))
    if not results["equal"]:
        sys.exit(1)


def summary(results: dict[str, Any]) -> str:
    end = "the state of the calm run" if results["equal"] else "ANOTHER STATE than the calm run"
    lines = [f"{results['steps']} steps with {len(results['faults'])} faults end with {end}"]
    for name in SIGNALS:
        seconds = [
            fault["back_s"]
            for fault in results["faults"]
            if fault["signal"] == name and fault["back_s"] is not None
        ]
        if seconds:
            lines.append(
                f"{name:8} {len(seconds):3} times: the next step after {np.median(seconds):.2f} s, "
                f"at most {max(seconds):.2f}"
            )
    return "\n".join(lines)


def run(steps: int, every: float | None, draw: random.Random) -> tuple[set[str], list[Fault]]:
    """A training; the digests that its ranks print at their end, and its faults."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        env = os.environ | {"JAX_PLATFORMS": "cpu", "TF_CPP_MIN_LOG_LEVEL": "3"}
        words = ["--elastic", "-n", str(RANKS), __file__, "--rank", name, str(steps)]
        command = [sys.executable, "-m", "fddp", "run", *words]
        with subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE) as job:
            faults = list[Fault]()
            deadline = time.monotonic() + LIMIT_S
            while every and job.poll() is None and time.monotonic() < deadline:
                if wait(job, every * draw.uniform(0.7, 1.3)) and len(places(folder)) == RANKS:
                    faults.append(break_rank(job, folder, draw))
            out, _ = job.communicate(timeout=LIMIT_S)
        if job.returncode:
            raise RuntimeError(f"the job ended with {job.returncode}")
    lines = [line.partition("] ")[2] for line in out.decode().splitlines()]
    return {line.removeprefix("digest ") for line in lines if line.startswith("digest ")}, faults


def wait(job: subprocess.Popen, seconds: float) -> bool:
    """Waits for some seconds; False if the job has ended by then."""
    with suppress(subprocess.TimeoutExpired):
        job.wait(seconds)
    return job.poll() is None


def places(folder: Path) -> dict[int, tuple[int, int]]:
    """Rank → its process and the steps that it has done, of running ranks."""
    found = dict[int, tuple[int, int]]()
    for file in folder.glob("rank_*"):
        with suppress(ValueError, OSError):  # it is just being replaced
            process, step = map(int, file.read_text().split())
            os.kill(process, 0)
            found[int(file.name.removeprefix("rank_"))] = process, step
    return found


def break_rank(job: subprocess.Popen, folder: Path, draw: random.Random) -> Fault:
    """Sends a signal to a rank, and waits until another rank has done a further step."""
    before = places(folder)
    rank = draw.choice(sorted(before))
    number = max(step for _, step in before.values())
    fault = Fault(draw.choice(SIGNALS), rank, number)
    begin = time.monotonic()
    with suppress(ProcessLookupError):
        os.kill(before[rank][0], getattr(signal, fault.signal))
    while job.poll() is None:
        others = [step for k, (_, step) in places(folder).items() if k != rank]
        # A step may have been complete when the signal arrived.
        if max(others, default=0) > number + 1:
            fault.back_s = round(time.monotonic() - begin, 3)
            break
        time.sleep(0.01)
    if fault.signal == "SIGSTOP":  # its host would end it some time
        with suppress(ProcessLookupError):
            os.kill(before[rank][0], signal.SIGKILL)
    return fault


def train(folder: Path, steps: int) -> None:
    """One rank."""
    fddp.init(elastic=True, stall_s=STALL_S)
    data = np.random.default_rng(0).normal(size=(5000, WIDTH)).astype(np.float32)
    params = {name: np.full((WIDTH, WIDTH), 1 / WIDTH, np.float32) for name in ("first", "second")}
    loss = lambda p, x: ((jax.numpy.tanh(x @ p["first"]) @ p["second"] - x) ** 2).mean()  # noqa: E731
    trainer = fddp.elastic.Trainer(
        lambda group: fddp.train_step(loss, optax.adam(1e-3), group=group, **OPTIONS), params
    )
    place = folder / f"rank_{os.environ['FDDP_RANK']}"

    def rows(group: fddp.Group) -> np.ndarray:
        deal: Any = {"rank": group.rank, "size": group.processes, "start_step": trainer.number}
        virtual = OPTIONS["virtual_replicas"]
        return data[next(fddp.samples(len(data), BATCH, virtual_replicas=virtual, **deal))]

    while trainer.number < steps:
        time.sleep(INPUT_S)
        trainer.step(rows)
        staging = place.with_suffix(".new")
        staging.write_text(f"{os.getpid()} {trainer.number}")
        staging.replace(place)
    leaves = jax.tree.leaves(jax.device_get(trainer.state))
    digest = hashlib.sha256(b"".join(np.asarray(x).tobytes() for x in leaves)).hexdigest()
    print(f"digest {digest}", flush=True)
    print(json.dumps(trainer.stats()), file=sys.stderr)


if __name__ == "__main__":
    main()
