"""The memory and the bytes of checkpoints on each rank, for a state too large for a rank alone.

    python -m bench.saving [mpi|gloo] [ranks]

64 Mi parameters in leaves of 16 MiB, with Adam's moments 768 MiB, in shards on so many ranks of
this machine. The results are the largest growth of each rank's resident memory, including its part
of the state: to a state that is saved; in another process to one that is restored into a
form, and to one that is restored into another state. Then the bytes that it wrote. At last it
trains: in turns some steps without a checkpoint, and as many in which one is saved and written. The
extra time of the latter is given as a share of a hundred steps.
"""

import json
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import fddp
from bench.jobs import ending, start
from bench.record import save
from fddp.buckets import is_shard

LEAVES = 16
WIDTH = 2048
STEPS = 6  # while which a checkpoint is written
ROUNDS = 5
MIB = 2**20


def loss_fn(params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    for w in params.values():
        x = jnp.tanh(x @ w)
    return jnp.mean(x**2)


def filled(group: fddp.Group, forms: fddp.TrainState) -> fddp.TrainState:
    """A state of these forms, made part by part: no rank ever has more."""
    count = group.placement.replicas_in_array

    def fill(x: Any) -> Any:
        if not is_shard(x):
            return group.placement.place(np.zeros(x.shape, x.dtype), fddp.comm.REPLICATED)
        rows = np.full(
            (x.parts.shape[0] // count, *x.parts.shape[1:]), 1.0 + group.rank, x.parts.dtype
        )
        return replace(x, parts=group.placement.place(rows, group.placement.per_replica))

    return jax.tree.map(fill, forms, is_leaf=is_shard)


def resident(name: str) -> float:
    """MiB of resident memory: "VmRSS" now, "VmHWM" at most."""
    (line,) = [
        x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(f"{name}:")
    ]
    return int(line.split()[1]) / 1024


class Watched:
    """The results of a function in this process, with the largest growth of its memory."""

    def __init__(self) -> None:
        self.before = resident("VmRSS")
        self.results = dict[str, Any]()

    @contextmanager
    def __call__(self, what: str) -> Iterator[None]:
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak
        clock = time.perf_counter()
        yield
        self.results[f"{what}_s"] = round(time.perf_counter() - clock, 3)
        self.results[f"{what}_peak_mib"] = round(resident("VmHWM") - self.before, 1)


def rank(folder: str, act: str) -> None:
    """The part of one rank; rank 0 prints the results of all."""
    group = fddp.init()
    step = fddp.train_step(loss_fn, optax.adam(1e-3), group=group, shard="state")
    forms = step.shapes(
        {f"layer_{k}": jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32) for k in range(LEAVES)}
    )
    fddp.Checkpoints(folder, step).close()  # libraries are loaded
    watched = Watched()
    {"save": saves, "restore": restores, "train": trains}[act](
        group, step, forms, Path(folder), watched
    )
    gathered = group.all_gather_object(watched.results)
    group.print(json.dumps(gathered))


def saves(
    group: fddp.Group, step: fddp.TrainStep, forms: fddp.TrainState, folder: Path, watched: Watched
) -> None:
    with watched("made"):
        state = jax.block_until_ready(filled(group, forms))
    with watched("saved"), fddp.Checkpoints(folder, step) as checkpoints:
        checkpoints.save(state, now=True)
    (newest,) = folder.glob("[0-9]*")
    nbytes = (newest / f"{group.rank}.npz").stat().st_size
    watched.results["mib_written"] = round(nbytes / MIB, 3)


def restores(
    group: fddp.Group, step: fddp.TrainStep, forms: fddp.TrainState, folder: Path, watched: Watched
) -> None:
    for what, make in (("into_form", lambda: forms), ("into_state", lambda: filled(group, forms))):
        with watched(what), fddp.Checkpoints(folder, step) as checkpoints:
            state, _ = checkpoints.restore(make())
        first = np.asarray(jax.tree.leaves(state.params)[0].addressable_shards[0].data)
        if not np.all(first == 1.0 + group.rank):
            raise RuntimeError("other numbers were restored than saved")
        del state, first


def trains(
    group: fddp.Group, step: fddp.TrainStep, forms: fddp.TrainState, folder: Path, watched: Watched
) -> None:
    state = filled(group, forms)
    rows = np.ones((1, WIDTH), np.float32)
    without = list[float]()
    within = list[float]()
    with fddp.Checkpoints(folder, step, keep=1) as checkpoints:
        state, _ = step(state, rows)
        for turn in range(2 * ROUNDS):
            group.barrier()
            clock = time.perf_counter()
            if turn % 2:
                checkpoints.save(state, now=True)
            for _ in range(STEPS):
                state, _ = step(state, rows)
            jax.block_until_ready(state)
            if turn % 2:
                checkpoints._writing.result()
            group.barrier()
            (within if turn % 2 else without).append(time.perf_counter() - clock)
    longer = [(slow - fast) / (100 * fast / STEPS) for slow, fast in zip(within, without)]
    watched.results |= {
        "step_s": round(float(np.median(without)) / STEPS, 3),
        "share_of_100_steps": round(float(np.median(longer)), 4),
        "of_rounds": [round(x, 4) for x in sorted(longer)],
    }


def main(backend: str = "mpi", ranks: str = "4") -> None:
    """Measures, and saves the results."""
    folder = tempfile.mkdtemp()
    results = {}
    try:
        for act in ("save", "restore", "train"):
            command = [sys.executable, "-m", "bench.saving", "rank", folder, act]
            with ending(
                start(backend, int(ranks), command, {"JAX_PLATFORMS": "cpu"}, stdout=-1, text=True)
            ) as jobs:
                texts = [job.communicate()[0] for job in jobs]
            (line,) = [
                line for text in texts for line in text.splitlines() if line.startswith("[{")
            ]
            results[act] = json.loads(line)
            print(act, *results[act], sep="\n  ", flush=True)
    finally:
        shutil.rmtree(folder)
    save(f"saving_{backend}_{ranks}", results)


if __name__ == "__main__":
    rank(*sys.argv[2:]) if sys.argv[1:2] == ["rank"] else main(*sys.argv[1:])
