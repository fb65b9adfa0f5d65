"""Survivors of a death: how soon do they train on in the same process, in a new mesh?

    python bench/survivors.py [--quick]

Over Gloo: MPICH ends them. One of three ranks kills itself; the others catch the error of the sum
that broke off, join a world of two ranks, and go on there with a copy of the state before the step
(`donate=False`). They have no watchers.
"""

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import jax
import jax.extend.backend
import numpy as np
import optax

sys.path.insert(0, str(Path(__file__).parents[1]))
import fddp
from bench.jobs import start
from bench.record import save

RANKS = 3
LAST = 20  # the rank of the highest number dies before this step


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="one death, not ten; nothing is saved")
    parser.add_argument("--rank", metavar="FOLDER", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank:
        survive(
            int(os.environ["FDDP_RANK"]),
            Path(args.rank),
            int(os.environ["FDDP_COORDINATOR"].split(":")[1]),
        )
        return
    times = [death() for _ in range(1 if args.quick else 10)]
    after = dict(
        zip(("the error is caught", "they have met", "the next step is over"), zip(*times))
    )
    for what, seconds in after.items():
        print(f"{what} after {np.median(seconds):.2f} s (at most {max(seconds):.2f})")
    if not args.quick:
        print(save("survivors", {"ranks": RANKS, "seconds": after}))


def death() -> list[float]:
    """Seconds from a death to the events of the slower survivor."""
    with tempfile.TemporaryDirectory() as folder:
        env = {"JAX_PLATFORMS": "cpu", "TF_CPP_MIN_LOG_LEVEL": "3"}
        for job in start(
            "gloo",
            RANKS,
            [sys.executable, __file__, "--rank", folder],
            env,
            stdout=subprocess.DEVNULL,
        ):
            job.wait(timeout=120)
        times_of_ranks = [
            np.array(Path(folder, str(rank)).read_text().split(), float) for rank in range(RANKS)
        ]
    return np.round(np.max(times_of_ranks[:-1], axis=0) - times_of_ranks[-1], 2).tolist()


def survive(rank: int, folder: Path, port: int) -> None:
    """One rank: trains until the last one dies, and a step more."""
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.config.update("jax_enable_recoverability", True)  # else JAX ends all ranks when one is gone
    params = np.zeros((256, 256), np.float32)
    times = list[float]()
    for size in (RANKS, RANKS - 1):
        jax.distributed.initialize(f"127.0.0.1:{port + RANKS - size}", size, rank)
        times.append(time.monotonic())
        group = fddp.mesh_group(jax.make_mesh((size,), ("replica",)))
        step = fddp.train_step(
            lambda w, x: ((x @ w - 1) ** 2).mean(), optax.sgd(0.1), group=group, donate=False
        )
        state = step.init(params)
        try:
            while size == RANKS or int(state.step) < 1:
                if (rank, int(state.step)) == (RANKS - 1, LAST):
                    (folder / str(rank)).write_text(str(time.monotonic()))
                    os.kill(os.getpid(), signal.SIGKILL)
                state, _ = jax.block_until_ready(step(state, np.ones((8, 256), np.float32)))
            times.append(time.monotonic())
        except jax.errors.JaxRuntimeError:
            times = [time.monotonic()]
            params = np.array(state.params.addressable_data(0))
        while rank == 0 and not (folder / f"left {size}").exists():
            time.sleep(
                0.01
            )  # JAX ends ranks that still speak to rank 0's service when that is gone
        jax.distributed.shutdown()
        (folder / f"left {size}").touch()
        jax.extend.backend.clear_backends()
    (folder / str(rank)).write_text(" ".join(map(str, times)))


if __name__ == "__main__":
    main()
