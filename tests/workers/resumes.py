"""A training that is killed now and then and goes on: `resumes.py FOLDER STEPS RANK:STEP ...`.

With VIRTUAL_REPLICAS it has so many, and no hook; with SHARD its state lies in shards. The rank
kills itself before the step, once. At the end rank 0 writes FOLDER/end.json: all losses, and the
state's bits.
"""

import hashlib
import json
import os
import signal
import sys
import time
from itertools import islice
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from problems import with_dropout

import fddp

ROWS = np.random.default_rng(5).normal(size=(48, 3)).astype(np.float32)


def digest(state: fddp.TrainState) -> str:
    bits = hashlib.sha256()
    for x in jax.tree.leaves(state._replace(rng=jax.random.key_data(state.rng))):
        bits.update(b"".join(np.asarray(shard.data).tobytes() for shard in x.addressable_shards))
    return bits.hexdigest()


def main(folder: Path, steps: int, *kills: str) -> None:
    group = fddp.init(stall_s=10.0)
    optimizer = fddp.dynamic_scale(optax.adam(0.1), growth_interval=3)
    virtual = int(os.environ.get("VIRTUAL_REPLICAS", 0)) or None
    shard = os.environ.get("SHARD")
    options: Any = (
        {"virtual_replicas": virtual, "shard": shard}
        if virtual or shard
        else {"hook": fddp.hooks.topk(0.4)}
    )
    step = fddp.train_step(with_dropout, optimizer, group=group, bucket_cap_mb=0, **options)
    params = {"w": np.ones((3, 5), np.float32), "b": np.zeros(5, np.float32)}
    state = step.init(params, model_state=np.zeros(3, np.float32), rng=jax.random.key(1))
    with fddp.Checkpoints(folder / "saved", step, every=4) as checkpoints:
        state, losses = checkpoints.restore(state)
        losses = losses or []
        share: Any = {"rank": group.rank, "size": group.processes, "virtual_replicas": virtual}
        rows = fddp.samples(len(ROWS), 12, start_step=int(state.step), **share)
        for number in islice(rows, steps - int(state.step)):
            for kill in kills:
                killed = folder / f"killed {kill}"
                if kill == f"{group.rank}:{int(state.step)}" and not killed.exists():
                    killed.touch()
                    time.sleep(
                        float(os.environ.get("BEFORE_KILL_S", 1))
                    )  # meanwhile the last checkpoint is written
                    os.kill(os.getpid(), signal.SIGKILL)
            state, info = step(state, ROWS[number])
            losses.append(float(info.loss))
            checkpoints.save(state, losses)
            if fddp.preempted():
                checkpoints.save(state, losses, now=True)
                return
    state = fddp.whole(state, group=group)
    if group.rank == 0:
        (folder / "end.json").write_text(json.dumps([losses, digest(state)]))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
