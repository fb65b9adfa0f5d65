"""The memory of a rank that makes a state too large for it alone.

    python -m bench.holding [mpi|gloo] [ranks]

64 Mi parameters in leaves of 16 MiB, with Adam's moments 768 MiB, in shards on so many ranks of
this machine. The results are the largest growth of a rank's resident memory while the state is
made, by a function and from arrays, the growth that lasts, and the seconds.
"""

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax

import fddp
from bench.jobs import ending, start
from bench.record import save

LEAVES = 16
WIDTH = 2048
MIB = 2**20


def make() -> dict[str, jax.Array]:
    """The parameters of a stack of equal layers."""
    keys = jax.random.split(jax.random.key(0), LEAVES)
    return {
        f"layer_{k}": 0.02 * jax.random.normal(key, (WIDTH, WIDTH)) for k, key in enumerate(keys)
    }


def loss_fn(params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    for w in params.values():
        x = jnp.tanh(x @ w)
    return jnp.mean(x**2)


def grown(run: Callable[[], Any]) -> tuple[Any, dict[str, float]]:
    """Runs a function; also returns the growth of this process's resident memory, at most and
    lasting, and the seconds."""
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = resident("VmRSS")
    begin = time.perf_counter()
    state = jax.block_until_ready(run())
    seconds = time.perf_counter() - begin
    mib = {"peak_mib": resident("VmHWM") - before, "held_mib": resident("VmRSS") - before}
    return state, {
        **{name: round(x / MIB, 1) for name, x in mib.items()},
        "seconds": round(seconds, 2),
    }


def resident(name: str) -> int:
    """Bytes of resident memory: "VmRSS" now, "VmHWM" at most."""
    (line,) = [
        x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(f"{name}:")
    ]
    return 1024 * int(line.split()[1])


def rank(how: str) -> None:
    """The part of one rank; rank 0 prints the results of all."""
    group = fddp.init()
    step = fddp.train_step(loss_fn, optax.adam(1e-3), group=group, shard="state")
    _, memory = grown(lambda: step.init(make if how == "function" else jax.jit(make)()))
    gathered = group.all_gather_object(memory)
    group.print(json.dumps(gathered))


def main(backend: str = "mpi", ranks: str = "4") -> None:
    """Measures both ways, and saves the results."""
    results = {}
    for how in ("function", "arrays"):
        command = [sys.executable, "-m", "bench.holding", "rank", how]
        with ending(
            start(backend, int(ranks), command, {"JAX_PLATFORMS": "cpu"}, stdout=-1, text=True)
        ) as jobs:
            texts = [job.communicate()[0] for job in jobs]
        (line,) = [line for text in texts for line in text.splitlines() if line.startswith("[{")]
        results[how] = json.loads(line)
        print(how, *results[how], sep="\n  ", flush=True)
    save(f"holding_{backend}_{ranks}", results)


if __name__ == "__main__":
    rank(*sys.argv[2:]) if sys.argv[1:2] == ["rank"] else main(*sys.argv[1:])
