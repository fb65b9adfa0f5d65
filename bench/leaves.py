"""A state of thousands of arrays: what does each part of training cost per leaf?

    python bench/leaves.py [--leaves 100 300 1000 3000] [--quick]

Each number of leaves runs in processes of its own: alone, and on two MPI ranks. A leaf
is a vector of 64 numbers, and the loss reads each of them once, so that nearly all time is spent
per leaf. Beside each step: `jit` of the same step. `python_ms` is the processor time of the thread
that calls the step until it returns, less that of `jit`.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

sys.path.insert(0, str(Path(__file__).parents[1]))
import fddp
from bench.jobs import MPIEXEC
from bench.record import question, save

LEAVES = (100, 300, 1000, 3000)
WIDTH = 64
STEPS = 30
PATIENCE_S = 900
CASES = {"alone": 1, "2 ranks": 2}
PARTS = ("init_s", "first_step_s", "jit_first_step_s", "step_ms", "jit_ms", "python_ms")
SAVING = ("save_s", "restore_s")


def main() -> None:
    parser = question(__doc__, "20 and 40 leaves")
    parser.add_argument("--leaves", nargs="+", type=int, default=LEAVES)
    parser.add_argument("--alone", type=int, metavar="LEAVES", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.alone:
        measure(args.alone)
        return
    counts = (20, 40) if args.quick else args.leaves
    results = dict[str, dict[int, dict[str, float]]]()
    for name, ranks in CASES.items():
        results[name] = {}
        for count in counts:
            results[name][count] = row = in_processes(count, ranks)
            figures = "  ".join(f"{part} {row[part]:8.3f}" for part in (*PARTS, *SAVING))
            print(f"{name:16} {count:5} leaves  {figures}", flush=True)
    if not args.quick:
        print(save("leaves", results))


def in_processes(count: int, ranks: int) -> dict[str, float]:
    """Measures in fresh processes; rank 0 counts."""
    command = [sys.executable, __file__, "--alone", str(count)]
    if ranks > 1:
        command = [MPIEXEC, "-bind-to", "core", "-n", str(ranks), *command]
    env = os.environ | {"JAX_PLATFORMS": "cpu"}
    output = subprocess.run(
        command, stdout=subprocess.PIPE, text=True, check=True, env=env, timeout=PATIENCE_S
    ).stdout
    return json.loads(next(line for line in output.splitlines() if line.startswith("{")))


def measure(count: int) -> None:
    """Prints the seconds of each part of a training."""
    group = fddp.init()
    random = np.random.default_rng(0)
    params = {f"{k:05}": random.normal(size=WIDTH).astype(np.float32) for k in range(count)}
    batch = np.random.default_rng(1 + group.rank).normal(size=(2, WIDTH)).astype(np.float32)
    optimizer = optax.sgd(0.01, momentum=0.9)

    def loss_fn(params: Any, batch: Any) -> Any:
        x = jnp.mean(batch, 0)
        return sum(jnp.sum(leaf * x) ** 2 for leaf in params.values()) / count

    def by_hand(params: Any, opt_state: Any, batch: Any) -> Any:
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    found = dict[str, float]()
    plain = jax.jit(by_hand, donate_argnums=(0, 1))
    arguments = (jax.tree.map(jnp.array, params), optimizer.init(params))

    def jit_step() -> None:
        nonlocal arguments
        *arguments, _ = plain(*arguments, batch)

    step = fddp.train_step(loss_fn, optimizer, group=group)
    start = time.perf_counter()
    state = jax.block_until_ready(step.init(params))
    found["init_s"] = time.perf_counter() - start

    def fddp_step() -> None:
        nonlocal state
        state, _ = step(state, batch)

    group.barrier()
    ways = {"jit": (jit_step, lambda: arguments), "fddp": (fddp_step, lambda: state)}
    timed: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
    for _ in range(STEPS):  # in turn: the memory of later arrays is slower
        for way in ways:
            timed[way].append(one_step(*ways[way]))
    jit, own = (np.median(times[STEPS // 2 :], 0) for times in timed.values())
    found["jit_first_step_s"], found["first_step_s"] = timed["jit"][0][0], timed["fddp"][0][0]
    found["jit_ms"], found["step_ms"] = 1e3 * jit[0], 1e3 * own[0]
    found["python_ms"] = 1e3 * (own[1] - jit[1])
    with tempfile.TemporaryDirectory() as folder:
        folder = group.broadcast_object(folder)
        with redirect_stdout(sys.stderr), fddp.Checkpoints(folder, step) as checkpoints:
            start = time.perf_counter()
            checkpoints.save(state, now=True)
            found["save_s"] = time.perf_counter() - start
            start = time.perf_counter()
            jax.block_until_ready(checkpoints.restore(state)[0].params)
            found["restore_s"] = time.perf_counter() - start
        group.barrier()
    group.print(json.dumps({name: round(x, 4) for name, x in found.items()}))


def one_step(step: Callable[[], None], result: Callable[[], Any]) -> tuple[float, float]:
    """Seconds of a step, and of the calling thread until the call returns."""
    start, thread_start = time.perf_counter(), time.thread_time()
    step()
    thread_s = time.thread_time() - thread_start
    jax.block_until_ready(result())
    return time.perf_counter() - start, thread_s


if __name__ == "__main__":
    main()
