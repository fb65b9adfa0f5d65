"""Many small layers: what does a step cost where computing and traffic take nearly no time?

    python bench/small_nets.py [--leaves 20 200 800] [--torch PYTHON] [--quick]

A layer is a matrix of 32 x 32 and a vector; a batch has 32 rows. Each job has its ways take turns:
two ranks over MPI, one core each; two over Gloo; one process with one device, and with eight;
PyTorch DDP, in an environment of its own. "alone" is the step of one process without traffic, by
each rank at the same time, and "by hand" the step with one mpi4jax all-reduce of all gradients.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.flatten_util import ravel_pytree

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
import fddp
from bench.jobs import MPIEXEC, ending, start
from bench.record import interleave, question, save, summary

LEAVES = (20, 200, 800)
WIDTH = 32
STEPS = 20  # in a turn
PATIENCE_S = 900
RATE = 0.01
SCHEDULES = ("overlap", "after")


def main() -> None:
    parser = question(__doc__, "10 leaves, 2 turns")
    parser.add_argument("--leaves", nargs="+", type=int, default=LEAVES)
    parser.add_argument("--torch", help="python of an environment with torch (CPU)")
    parser.add_argument("--alone", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.alone:
        job, leaves, turns = args.alone
        measure(job, int(leaves), int(turns))
        return
    counts, turns = ((10,), 2) if args.quick else (args.leaves, 15)
    results = dict[str, dict[str, Any]]()
    for count in counts:
        results[str(count)] = found = dict[str, Any]()
        for job in ("mpi", "gloo", "1 device", "8 devices"):
            found |= in_processes(job, [sys.executable, __file__, "--alone", job], count, turns)
        if args.torch:
            worker = [args.torch, str(ROOT / "bench" / "torch_worker.py")]
            found |= in_processes("torch", worker, count, turns)
        for way, times in found.items():
            print(f"{count:5} leaves  {way:30} {times['median_ms']:8.3f} ms", flush=True)
    if not args.quick:
        print(save("small_nets", results))


def in_processes(job: str, command: list[str], count: int, turns: int) -> dict[str, Any]:
    """Runs a job's ranks, and reads what rank 0 prints."""
    command = [*command, str(count), str(turns)]
    env = {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "text": True}
    if job == "mpi":
        bound = [MPIEXEC, "-bind-to", "core", "-n", "2", *command]
        jobs = [subprocess.Popen(bound, env=os.environ | env, **pipes)]
    elif job in ("gloo", "torch"):
        jobs = start("gloo", 2, command, env, **pipes)
    else:
        env["JAX_NUM_CPU_DEVICES"] = job.split()[0]
        jobs = [subprocess.Popen(command, env=os.environ | env, **pipes)]
    with ending(jobs):
        outputs = [job.communicate(timeout=PATIENCE_S)[0] for job in jobs]
    (line,) = [line for output in outputs for line in output.splitlines() if line.startswith("{")]
    return json.loads(line)


def measure(job: str, leaves: int, turns: int) -> None:
    """One process of a job: prints the milliseconds of a step of each way."""
    group = fddp.init()
    if job == "gloo":  # as mpiexec binds the ranks over MPI; XLA has its threads already
        cores = sorted(os.sched_getaffinity(0))
        for thread in Path("/proc/self/task").iterdir():
            os.sched_setaffinity(int(thread.name), {cores[group.rank % len(cores)]})
    random = np.random.default_rng(0)
    params = [
        (random.normal(size=(WIDTH, WIDTH)).astype(np.float32) / 6, np.zeros(WIDTH, np.float32))
        for _ in range(leaves // 2)
    ]
    random = np.random.default_rng(1 + group.rank)
    rows = random.normal(size=(32 * group.size // group.processes, WIDTH)).astype(np.float32)
    ways = {
        f"{schedule} ({job})": a_step(group, schedule, params, rows)
        for schedule in (SCHEDULES if group.processes > 1 else SCHEDULES[:1])
    }
    ways[f"scan of steps ({job})"] = a_scan(group, params, rows)
    if job == "mpi":
        ways["alone, jit"] = by_hand(params, rows, lambda x: x)
        ways["by hand, mpi4jax"] = by_hand(params, rows, mean_over_ranks(group))
    seconds = interleave(ways, rounds=turns, warm_up=3, pause=group.barrier)
    group.print(json.dumps({way: summary(times / STEPS) for way, times in seconds.items()}))


def loss_fn(params: Any, rows: jax.Array) -> jax.Array:
    for weights, bias in params:
        rows = jnp.tanh(rows @ weights + bias)
    return jnp.mean((rows - 1) ** 2)


def a_step(group: fddp.Group, schedule: Any, params: Any, rows: Any) -> Callable[[], Any]:
    """Steps that wait for each other, called from Python."""
    step = fddp.train_step(loss_fn, optax.sgd(RATE), group=group, schedule=schedule)
    state = step.init(params)

    def run() -> None:
        nonlocal state
        for _ in range(STEPS):
            state, info = step(state, rows)
            jax.block_until_ready((state.params, info.loss))

    return run


def a_scan(group: fddp.Group, params: Any, rows: Any) -> Callable[[], Any]:
    """The same number of steps in one program."""
    step = fddp.train_step(loss_fn, optax.sgd(RATE), group=group)
    state, _ = step(step.init(params), rows)
    train = jax.jit(lambda state, batches: jax.lax.scan(step, state, batches), donate_argnums=0)
    (weights, _), *_ = state.params
    batches = np.stack([rows] * STEPS)
    if group.backend != "mpi":
        sharding = jax.NamedSharding(weights.sharding.mesh, jax.P(None, group.axis_name))
        batches = jax.make_array_from_process_local_data(sharding, batches)

    def run() -> Any:
        nonlocal state
        state, infos = train(state, batches)
        return infos.loss

    return run


def mean_over_ranks(group: fddp.Group) -> Callable[[jax.Array], jax.Array]:
    import mpi4jax
    from mpi4py import MPI

    return lambda x: mpi4jax.allreduce(x, op=MPI.SUM, comm=MPI.COMM_WORLD) / group.size


def by_hand(params: Any, rows: Any, mean: Callable[[Any], Any]) -> Callable[[], Any]:
    """A step in one program, whose gradients are one array when `mean` takes them."""

    @jax.jit
    def step(params: Any, rows: Any) -> tuple[Any, Any]:
        loss, grads = jax.value_and_grad(loss_fn)(params, rows)
        flat, unravel = ravel_pytree(grads)
        return jax.tree.map(lambda p, g: p - RATE * g, params, unravel(mean(flat))), loss

    def run() -> None:
        nonlocal params
        for _ in range(STEPS):
            params, loss = step(params, rows)
            jax.block_until_ready((params, loss))

    return run


if __name__ == "__main__":
    main()
