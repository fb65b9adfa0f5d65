"""Scripts in which the last rank is broken after a few steps, while the others train on:
`faults.py HOW`."""

import ctypes
import os
import signal
import sys
from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
import optax

import fddp

STALL_S = 2.0
C = ctypes.CDLL(None)

HOW: dict[str, Callable[[], object]] = {
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "exit": lambda: os._exit(0),
    "term": lambda: os.kill(os.getpid(), signal.SIGTERM),  # and no code calls fddp.preempted
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "hold": lambda: ctypes.PyDLL(None).sleep(1000),  # a call that keeps Python's interpreter
    # By the C library after Python's end, when the other ranks need this one no more.
    "stop_at_exit": lambda: C.__cxa_atexit(C["raise"], ctypes.c_void_p(signal.SIGSTOP), None),
    "preempt": lambda: os.kill(os.getpid(), signal.SIGTERM),
    "raise": lambda: [][0],
}


def main(how: str) -> None:
    if folder := os.environ.get("OWN_FILES"):
        # mpiexec has no pipe to this process any more, nor to its watcher.
        file = os.open(f"{folder}/own.{os.environ['PMI_RANK']}", os.O_CREAT | os.O_WRONLY)
        for stream in (1, 2):
            os.dup2(file, stream)
    group = fddp.init(stall_s=STALL_S)
    broken = group.rank == (0 if how.endswith("_0") else group.size - 1)
    how = how.removesuffix("_0")
    if broken and how == "at_once":
        sys.exit(3)
    if how == "early_alone":  # in a smaller group
        if group.rank not in (members := (0, group.size - 1)):
            return
        group = group.subgroup(members)
    step = fddp.train_step(
        lambda p, x: jnp.mean((x @ p["a"] @ p["b"]) ** 2),
        optax.sgd(0.1),
        group=group,
        bucket_cap_mb=0,
    )
    state = step.init({"a": np.ones((4, 4), np.float32), "b": np.ones((4, 1), np.float32)})
    last_steps = {"early": 200, "late": 20, "stop_at_exit": 20}
    if broken and how == "stop_at_exit":
        HOW[how]()
    for number in range(last_steps.get(how, 100_000)):
        if broken and number == 20:
            if how.startswith("early"):
                break
            if how == "raise_exit":
                raise SystemExit(3)
            HOW[how]()
        state, info = step(state, np.ones((4, 4), np.float32))
        float(info.loss)
        if how == "preempt" and fddp.preempted():
            print(f"saved {int(state.step)}")
            break
    if broken and how == "late":
        raise ArithmeticError("broken on purpose")


if __name__ == "__main__":
    main(sys.argv[1])
