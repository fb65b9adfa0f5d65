"""Does a training that ends well end without a word? Its script ends soon after its last step, in
several ways.

    python bench/endings.py [--trainings 200] [--loaded] [--quick]

Two processes train for a few steps, in all schedules, over MPI and over Gloo. Handlers at Python's
exit keep each process for a random while, as loggers do; some scripts look at their last loss,
others end while their last step is still under way. `--loaded` lets two processes compute for
nothing meanwhile.
"""

import os
import re
import subprocess
import sys
from itertools import cycle, islice, product
from pathlib import Path
from typing import Any

ROOT = str(Path(__file__).parents[1])
sys.path.insert(0, ROOT)
from bench.jobs import start
from bench.record import question, save

SIZE = 2
TIMEOUT_S = 120
SCRIPT = """
import atexit, random, sys, time
# Before fddp is imported: after all handlers of its own.
atexit.register(time.sleep, random.choice((0.0, 0.3, 1.5)))
import fddp, jax.numpy as jnp, optax
group = fddp.init(sys.argv[1])
loss = lambda w, x: jnp.mean((x @ w @ w) ** 2)
step = fddp.train_step(loss, optax.adam(1e-3), group=group, schedule=sys.argv[2])
state, looks = step.init(jnp.eye(500)), random.random() < 0.5
for _ in range(random.Random(sys.argv[3]).randint(1, 12)):  # the same on both
    state, info = step(state, jnp.ones((64, 500)))
    if looks:
        float(info.loss)
print("trained")
"""
SPIN = "while True: pass"


def main() -> None:
    parser = question(__doc__, "8 trainings")
    parser.add_argument("--trainings", type=int, default=200)
    parser.add_argument("--loaded", action="store_true", help="while two other processes compute")
    args = parser.parse_args()
    count = 8 if args.quick else args.trainings
    load = [subprocess.Popen([sys.executable, "-c", SPIN]) for _ in range(2 * args.loaded)]
    try:
        ways = islice(cycle(product(("mpi", "gloo"), ("overlap", "after", "eager"))), count)
        wrong = [fault for number, way in enumerate(ways) if (fault := training(number, *way))]
    finally:
        for process in load:
            process.kill()
    print(f"{count} trainings that end well: {len(wrong)} with a word or an exit status")
    if not args.quick:
        name = f"endings{'_loaded' * args.loaded}"
        print(save(name, {"trainings": count, "loaded": args.loaded, "wrong": wrong}))


def training(seed: int, backend: str, schedule: str) -> str:
    """Runs one training; returns the fault of its end, or ""."""
    env = {"JAX_PLATFORMS": "cpu", "PYTHONPATH": os.environ.get("PYTHONPATH", ROOT)}
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    command = [sys.executable, "-c", SCRIPT, backend, schedule, str(seed)]
    jobs = start(backend, SIZE, command, env, **pipes)
    try:
        output = "".join(job.communicate(timeout=TIMEOUT_S)[0] for job in jobs)
    finally:
        for job in jobs:
            job.kill()
    waits = r"fddp: rank \d+ (of \d+ )?waits "  # on a busy machine, for ranks that start later
    said = re.findall(r"^fddp: .*", output, re.MULTILINE)
    words = [line for line in said if not re.match(waits, line)]
    codes = [job.returncode for job in jobs]
    if not words and set(codes) == {0} and output.count("trained") == SIZE:
        return ""
    fault = f"{backend} {schedule} {seed}: {codes} {words or output[-500:]}"
    print(fault, flush=True)
    return fault


if __name__ == "__main__":
    main()
