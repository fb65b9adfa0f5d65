"""Compiling: how long does a first step take, by jit, staged, by two ranks of a host, and with
layers under `lax.scan`?

    python bench/compiling.py [--quick] [--only WORD]

Seconds that the first step takes longer than the second one, each in a fresh process, or on two MPI
ranks of this machine that begin together. `shared cache` gives these ranks an empty
JAX_COMPILATION_CACHE_DIR in common.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import optax

import fddp

sys.path.insert(0, str(Path(__file__).parents[1]))
from bench.jobs import MPIEXEC
from bench.problems import GPT_36MIB, problem
from bench.record import save
from models import scanned

LAYERS = (12, 48)
CAP = 4
PATIENCE_S = 500


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="nothing is saved")
    parser.add_argument("--only", default="", help="cases whose name has this word")
    parser.add_argument("--alone", nargs=2, metavar=("MODEL", "WAY"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.alone:
        print(json.dumps({"seconds": first_step(*args.alone)}))
        return
    cases: dict[str, tuple[str, str, int, bool]] = {
        "GPT of 6 layers, jit": ("gpt", "jit", 1, False),
        "GPT of 6 layers, staged": ("gpt", "staged", 1, False),
        "GPT of 6 layers, staged, 2 ranks": ("gpt", "staged", 2, False),
        "GPT of 6 layers, staged, 2 ranks, shared cache": ("gpt", "staged", 2, True),
        **{f"GPT of {n} layers, scanned, jit": (f"scanned:{n}", "jit", 1, False) for n in LAYERS},
        **{
            f"GPT of {n} layers, scanned, staged": (f"scanned:{n}", "staged", 1, False)
            for n in LAYERS
        },
    }
    results = dict[str, float]()
    for name, case in cases.items():
        if args.only in name:
            results[name] = in_processes(*case)
            print(f"{results[name]:8.1f} s  {name}", flush=True)
    if not args.quick and not args.only:
        print(save("compiling", results))


def in_processes(model: str, way: str, ranks: int, shared: bool) -> float:
    """Runs a case in processes of its own; the slowest rank counts."""
    with tempfile.TemporaryDirectory() as folder:
        env = {**os.environ, "JAX_PLATFORMS": "cpu"}
        if shared:
            env |= {
                "JAX_COMPILATION_CACHE_DIR": folder,
                "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.1",
            }
        command = [sys.executable, __file__, "--alone", model, way]
        command = [MPIEXEC, "-n", str(ranks), *command] if ranks > 1 else command
        process = subprocess.run(
            command, stdout=subprocess.PIPE, text=True, check=True, env=env, timeout=PATIENCE_S
        )
    return max(
        json.loads(line)["seconds"] for line in process.stdout.splitlines() if line.startswith("{")
    )


def first_step(model: str, way: Any) -> float:
    """Seconds that the first step takes longer than the second one."""
    group = fddp.init()
    loss_fn, params, batch = _problem(model)
    optimizer = optax.adamw(1e-3)
    if way == "jit":
        state = params, optimizer.init(params)
        step: Any = jax.jit(_by_hand(loss_fn, optimizer), donate_argnums=0)
    else:
        step = fddp.train_step(
            loss_fn, optimizer, group=group, has_aux=True, schedule=way, bucket_cap_mb=CAP
        )
        state = step.init(params)
    seconds = list[float]()
    for _ in range(2):
        group.barrier()
        start = time.perf_counter()
        state, info = step(state, batch)
        jax.block_until_ready((state, info))
        seconds.append(time.perf_counter() - start)
    return seconds[0] - seconds[1]


def _problem(model: str) -> tuple[Any, Any, Any]:
    if model == "gpt":
        task = problem("gpt", 0)
        return task.loss_fn, task.params, task.batch
    layers = int(model.partition(":")[2])
    deep = scanned.scanned(GPT_36MIB.clone(layers=layers))
    batch = scanned.batch(deep, 5, 0, length=96)
    return scanned.loss_fn(deep), scanned.init(deep, jax.random.key(0), batch)[0], batch


def _by_hand(loss_fn: Any, optimizer: Any) -> Any:
    def step(state: Any, batch: Any) -> Any:
        params, opt_state = state
        (loss, aux), grads = jax.value_and_grad(loss_fn, has_aux=True)(params, batch)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), (loss, aux)

    return step


if __name__ == "__main__":
    main()
