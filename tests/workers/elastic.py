"""One rank of an elastic job with faults on purpose: `elastic.py FOLDER STEPS OPTIONS FAULTS`.

OPTIONS are those of the step, and FAULTS maps a rank to [kind, step], both as JSON. A rank that
starts again has no fault. Prints the numbers of replicas of the steps, the digest of the state, and
whether SIGTERM still stops the loop.
"""

import ctypes
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax

import fddp
import fddp.elastic
from fddp.elastic.job import current_job

ROWS = 999
BATCH = 12
RETURN_S = 30
STOPPED_S = 4  # longer than the stall of this job
LINGERS_S = 3  # another rank has asked to join by then
DATA = np.random.default_rng(0).normal(size=(ROWS, 4)).astype(np.float32)
PARAMS = {"a": np.ones((4, 3), np.float32), "b": np.ones(5, np.float32)}


def loss(params: Any, x: Any) -> Any:
    return ((x @ params["a"] - 1) ** 2).mean() + (params["b"] ** 2).mean()


def rows_of(number: int, group: fddp.Group, options: dict[str, Any]) -> np.ndarray:
    """The rows of a step that this process reads."""
    virtual = options.get("virtual_replicas")
    deal: Any = {"rank": group.rank, "size": group.processes, "virtual_replicas": virtual}
    return DATA[next(fddp.samples(ROWS, BATCH, start_step=number, **deal))]


def digest(state: Any) -> str:
    """A digest of the whole state, equal on all replicas."""
    arrays = [np.asarray(jax.device_get(x)) for x in jax.tree.leaves(fddp.whole(state))]
    return hashlib.sha256(b"".join(x.tobytes() for x in arrays)).hexdigest()


def fault(kind: str) -> None:
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "stop":  # and go on later, as a process on a suspended host does
        wake = f"sleep {STOPPED_S}; kill -CONT {os.getpid()}"
        subprocess.Popen(["sh", "-c", wake], start_new_session=True)
        os.kill(os.getpid(), signal.SIGSTOP)
    if kind == "hold":
        ctypes.PyDLL(None).sleep(1000)  # a call that keeps Python's interpreter
    if kind == "exit":
        raise SystemExit(3)


def refused(make: Any) -> str:
    """The error of a step that the trainer refuses."""
    try:
        fddp.elastic.Trainer(make, PARAMS)
    except ValueError as error:
        return str(error)
    return ""


def main(folder: str, steps: str, options: str, faults: str) -> None:
    chosen = json.loads(options)
    rank, size = os.environ["FDDP_RANK"], int(os.environ["FDDP_SIZE"])
    kind, at = json.loads(faults).get(rank, ("", -1))
    met = Path(folder) / rank
    if met.exists():
        Path(folder, "joins").touch()
    fddp.init(elastic=True, stall_s=2.0)
    groups = 0

    def make(group: fddp.Group) -> fddp.TrainStep:
        nonlocal groups
        groups += 1
        if kind == "kill between" and groups == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return fddp.train_step(loss, optax.adam(0.05), group=group, **chosen)

    local = fddp.local_steps(optax.sgd(0.1), every=2)
    refusals = [
        refused(lambda group: fddp.train_step(loss, local, group=group)),
        refused(lambda group: fddp.train_step(loss, optax.sgd(0.1), group=group, shard="state")),
    ]

    class Saves(fddp.Checkpoints):
        def save(self, state: Any, *args: Any, **options: Any) -> bool:
            strikes = int(state.step) == at and not met.exists()
            due = super().save(state, *args, **options)
            if strikes and kind == "kill while writing":
                met.touch()
                fault("kill")
            return due

    trainer = fddp.elastic.Trainer(
        make, PARAMS, checkpoints=lambda step: Saves(Path(folder, "saved"), step, every=10)
    )
    sizes = list[int]()
    fddp.preempted()
    killed = [kind for kind, _ in json.loads(faults).values() if kind.startswith("kill")]
    while trainer.number < int(steps):
        # A rank that starts again takes longer than all steps. Between steps it would interrupt.
        waits = killed and kind != "linger" and trainer.group.size < size
        if waits and trainer.number == int(steps) - 1:
            current_job().membership.regroups(RETURN_S)
        if trainer.number == at and not met.exists():
            met.touch()
            fault(kind)
        trainer.step(lambda group: rows_of(trainer.number, group, chosen))
        sizes.append(trainer.group.size)
    while kind == "linger" and not Path(folder, "joins").exists():
        time.sleep(0.1)
    time.sleep(LINGERS_S if kind == "linger" else 0)
    if kind == "linger":
        trainer.group.barrier()
    end = {"refusals": refusals, "sizes": sizes, "digest": digest(trainer.state)}
    os.kill(os.getpid(), signal.SIGTERM)
    print(json.dumps(end | {"preempted": fddp.preempted()}))


if __name__ == "__main__":
    main(*sys.argv[1:])
