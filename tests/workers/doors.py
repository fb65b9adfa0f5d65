"""Ranks join a world, train a step, and print a line for their group: `doors.py HOW [WORD]`.

- join: by the launcher of the ranks; WORD is a backend.
- adopt: each calls `jax.distributed.initialize` before.
- child: rank 0 then starts this script as `join`, and as `join local`, and prints their last lines.
- late: rank WORD, or each for `all`, uses JAX before.
- small: /dev/shm claims to have 4 KiB.
- gpus: over Gloo; JAX of rank WORD claims to use GPUs.
- leave: in the reverse order of their variables, at port WORD. All leave the world. Then rank 0
  computes on, rank 1 fails, and rank 2 gets a SIGTERM.
"""

import os
import select
import shutil
import signal
import subprocess
import sys
import time
import warnings
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax

import fddp

WATCHERS_S = 4.0  # the watchers end a job sooner


def main(how: str, word: str = "") -> None:
    group = join(how, word)
    if how == "child" and group.is_main:
        for words in (["join"], ["join", "local"]):
            child = subprocess.run(
                [sys.executable, __file__, *words], capture_output=True, text=True
            )
            print((child.stdout or child.stderr).splitlines()[-1], flush=True)
    step = fddp.train_step(lambda w, x: jnp.mean((w - x) ** 2), optax.sgd(0.5), group=group)
    state, _ = step(step.init(jnp.zeros(())), np.full(2, group.rank, np.float32))
    mean = float(state.params)
    place = f"{group.backend} {group.rank} of {group.processes}"
    print(f"{place}, {group.size} replicas, {mean}", flush=True)
    if how == "leave":
        leave(group, jnp.asarray(mean))


def join(how: str, word: str) -> fddp.Group:
    if how == "adopt":
        rank, size = (int(os.environ.pop(f"FDDP_{name}")) for name in ("RANK", "SIZE"))
        jax.distributed.initialize(os.environ.pop("FDDP_COORDINATOR"), size, rank)
    if how == "late" and word in ("all", os.environ["FDDP_RANK"]):
        jnp.ones(2)
    if how == "small":
        shutil.disk_usage = lambda folder: SimpleNamespace(total=4096)
    if how == "gpus" and word == os.environ["FDDP_RANK"]:
        jax.default_backend = lambda: "gpu"
    if how == "leave":
        rank, size = (int(os.environ[f"FDDP_{name}"]) for name in ("RANK", "SIZE"))
        return fddp.init(rank=size - 1 - rank, size=size, coordinator=f"127.0.0.1:{word}")
    if "OMPI_COMM_WORLD_RANK" in os.environ:  # mpi4py finds another MPI than Open MPI
        warnings.filterwarnings("ignore", "suspicious MPI execution environment")
    return fddp.init({"join": word or None, "gpus": "gloo"}.get(how))


def leave(group: fddp.Group, mean: jax.Array) -> None:
    numbers = [int(number) for number in group.all_gather(os.getpid())]
    processes = [os.pidfd_open(number) for number in numbers if number != os.getpid()]
    fddp.preempted()  # from now on a SIGTERM only requests the end of the training
    time.sleep(0.5 * group.rank)
    fddp.shutdown()
    fddp.shutdown()  # no world is left
    if group.rank == 1:
        raise ValueError("on its own")
    if group.rank == 2:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)
    for process in processes:
        select.select([process], [], [])  # ready when the process has ended
    time.sleep(WATCHERS_S)
    single = fddp.init("local")
    print(f"{single.processes} process, {mean + jnp.ones(())}")


if __name__ == "__main__":
    main(*sys.argv[1:])
