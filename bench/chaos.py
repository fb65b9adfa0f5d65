"""Does a training survive the night? Ranks are killed repeatedly, and it must end as the calm run
does.

    python bench/chaos.py [--steps 2000] [--every 20] [--seed 0] [--quick]

Trains a small network with dropout, buffers, Adam, a dynamic loss scale and a hook with memory
under `python -m fddp run`, on MPI and on Gloo: once in peace, once with a signal (SIGKILL, SIGSTOP,
SIGSEGV or SIGABRT) to a rank that is drawn, about every so many seconds. Compares the digests of
the whole states and all losses at the end, and measures the time from each signal to the next step.
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
from collections import Counter
from contextlib import suppress
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
from bench.record import question, save

RANKS = 3
STALL_S = 2.0
SAVE_EVERY = 20
INPUT_S = 0.05  # the loading time of a batch
SIGNALS = ("SIGKILL", "SIGSTOP", "SIGSEGV", "SIGABRT")
LIMIT_S = 1800
BACKENDS = {"mpi": "mpiexec", "gloo": "processes"}


@dataclass
class Fault:
    """A signal to a rank."""

    signal: str
    rank: int
    step: int
    """The last step before it."""
    back_s: float | None = None
    """Seconds until the next step; None: the training had just ended."""


def arguments(description: str | None) -> argparse.ArgumentParser:
    """The arguments of a training with faults."""
    parser = question(description, "100 steps, a fault every 3 seconds")
    parser.add_argument("--steps", type=int, default=2000, help="of the training")
    parser.add_argument("--every", type=float, default=20, help="seconds between two faults, about")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rank", nargs="+", metavar="WORD", help=argparse.SUPPRESS)
    return parser


def main() -> None:
    args = arguments(__doc__).parse_args()
    if args.quick:
        args.steps, args.every = 100, 3.0
    if args.rank:
        train(Path(args.rank[0]), int(args.rank[1]))
        return
    results = {}
    for backend in list(BACKENDS)[: 1 if args.quick else None]:
        calm, _ = run(backend, args.steps, None, random.Random(args.seed))
        wild, faults = run(backend, args.steps, args.every, random.Random(args.seed))
        results[backend] = {
            "equal": calm == wild,
            "steps": len(wild["losses"]),
            "digest": wild["digest"],
            "faults": [asdict(fault) for fault in faults],
        }
        print(summary(backend, results[backend]), flush=True)
    if not args.quick:
        settings = {"ranks": RANKS, "stall_s": STALL_S, "save_every": SAVE_EVERY}
        print(save("chaos", settings | results))
    if not all(result["equal"] for result in results.values()):
        sys.exit(1)


def summary(backend: str, result: dict[str, Any]) -> str:
    recoveries = [fault["back_s"] for fault in result["faults"] if fault["back_s"] is not None]
    kinds = dict(Counter(fault["signal"] for fault in result["faults"]))
    end = "the state and losses of the calm run" if result["equal"] else "ANOTHER STATE"
    return (
        f"{backend}: {result['steps']} steps with faults {kinds} end with {end}; from a fault to "
        f"the next step {np.median(recoveries or np.nan):.1f} s, at most "
        f"{max(recoveries, default=np.nan):.1f}"
    )


def run(
    backend: str, steps: int, every: float | None, draw: random.Random
) -> tuple[dict[str, Any], list[Fault]]:
    """A training under `python -m fddp run`; the results of rank 0 at its end, and its faults."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        env = os.environ | {"JAX_PLATFORMS": "cpu", "FDDP_GRACE_S": "1"}
        env["FDDP_FLIGHT_DIR"] = f"{folder}/flight"
        script = [sys.executable, __file__, "--rank", name, str(steps)]
        words = ["-n", str(RANKS), "--restarts", "1000", "--by", BACKENDS[backend], "--", *script]
        with (folder / "log").open("w") as log:
            command = [sys.executable, "-m", "fddp", "run", *words]
            pipes: Any = {"stdout": log, "stderr": subprocess.STDOUT}
            job = subprocess.Popen(command, env=env, cwd=ROOT, **pipes)
            faults = strike(job, folder, every, draw)
        if job.returncode or not (folder / "end.json").exists():
            print((folder / "log").read_text()[-5000:])
            raise RuntimeError(f"{backend}: the training ended with {job.returncode}.")
        return json.loads((folder / "end.json").read_text()), faults


def strike(
    job: subprocess.Popen, folder: Path, every: float | None, draw: random.Random
) -> list[Fault]:
    """Sends signals until the job is over."""
    faults = list[Fault]()
    struck = 0.0
    due = None
    until = time.monotonic() + LIMIT_S
    while job.poll() is None and time.monotonic() < until:
        time.sleep(0.01)
        time_now = time.monotonic()
        (step, at) = last_step(folder)
        if faults and faults[-1].back_s is None:
            if at > struck:
                faults[-1].back_s = round(at - struck, 2)
        elif every and step and due is None:
            due = time_now + every * draw.uniform(0.5, 1.5)
        elif due and time_now > due:
            fault = Fault(draw.choice(SIGNALS), draw.randrange(RANKS), step)
            struck = time_now
            due = None
            with suppress(ProcessLookupError):  # the training has just ended
                process = int((folder / f"process {fault.rank}").read_text())
                os.kill(process, signal.Signals[fault.signal])
                faults.append(fault)
    if job.poll() is None:
        job.terminate()
        job.wait(30)
        raise RuntimeError(f"the training has not ended in {LIMIT_S} s; faults: {faults}")
    return faults


def last_step(folder: Path) -> tuple[int, float]:
    """The last step that rank 0 has done, and when."""
    try:
        step, at = (folder / "step").read_text().split()
        return int(step), float(at)
    except (OSError, ValueError):
        return 0, 0.0


### One rank


def train(folder: Path, steps: int) -> None:
    """Trains, or resumes."""
    import jax
    import jax.numpy as jnp
    import optax

    import fddp

    data = np.random.default_rng(5).normal(size=(960, 32)).astype(np.float32)

    def loss_fn(params: Any, x: Any, *, model_state: Any, rng: Any) -> Any:
        mean = 0.9 * model_state + jnp.mean(x, axis=0)
        x = x * jax.random.bernoulli(rng, 0.7, x.shape) - mean
        return jnp.mean((jnp.tanh(x @ params["w"]) + params["b"]) ** 2), (mean, None)

    group = fddp.init(stall_s=STALL_S)
    (folder / f"process {group.rank}").write_text(str(os.getpid()))
    optimizer = fddp.dynamic_scale(optax.adam(1e-3), growth_interval=50)
    options: Any = {"hook": fddp.hooks.topk(0.4), "bucket_cap_mb": 0}
    step = fddp.train_step(loss_fn, optimizer, group=group, **options)
    params = {"w": np.ones((32, 64), np.float32), "b": np.zeros(64, np.float32)}
    state = step.init(params, model_state=np.zeros(32, np.float32), rng=jax.random.key(1))
    with fddp.Checkpoints(folder / "saved", step, every=SAVE_EVERY) as checkpoints:
        state, losses = checkpoints.restore(state)
        losses = losses or []
        deal: Any = {"rank": group.rank, "size": group.processes, "start_step": int(state.step)}
        rows = fddp.samples(len(data), 48, **deal)
        for number, chosen in zip(range(int(state.step), steps), rows):
            time.sleep(INPUT_S)
            state, info = step(state, data[chosen])
            losses.append(float(info.loss))
            if group.rank == 0:
                temporary = folder / "step.new"
                temporary.write_text(f"{number + 1} {time.monotonic()}")
                temporary.rename(folder / "step")
            checkpoints.save(state, losses)
    leaves = jax.tree.leaves(state._replace(rng=jax.random.key_data(state.rng)))
    shards = [shard.data for x in leaves for shard in x.addressable_shards]
    bits = sha256(b"".join(np.asarray(x).tobytes() for x in shards)).digest()
    # Also the local memory of each replica.
    digest = sha256(group.all_gather(np.frombuffer(bits, np.uint8)).tobytes()).hexdigest()
    if group.rank == 0:
        (folder / "end.json").write_text(json.dumps({"losses": losses, "digest": digest}))


if __name__ == "__main__":
    main()
