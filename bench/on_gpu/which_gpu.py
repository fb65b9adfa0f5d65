"""One rank of a launcher prints its own GPU, and True if it reaches the others."""

import json
import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import fddp

MARK = "which: "


def main() -> None:
    print(MARK + json.dumps(which()), flush=True)


def which() -> dict[str, Any]:
    """Joins the other ranks, takes one step with them, and returns this rank's place, its GPUs as
    the machine numbers them, and the mean of all ranks' numbers."""
    group = fddp.init()
    devices = jax.local_devices()
    mean = None
    message = ""
    try:
        step = fddp.train_step(lambda w, x: jnp.mean((w - x) ** 2), optax.sgd(0.5), group=group)
        state, _ = step(step.init(jnp.zeros(())), np.full(len(devices), group.rank, np.float32))
        mean = float(state.params)
    except Exception as error:  # of NCCL: the GPU can be identified all the same
        message = str(error)[-300:]
    shown = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    numbers = [device.local_hardware_id or 0 for device in devices]
    names = shown.split(",")
    on_gpu = devices[0].platform != "cpu"
    return {
        "rank": group.rank,
        "processes": group.processes,
        "backend": group.backend,
        "shown": shown,
        "gpus": [names[k] if shown and k < len(names) else str(k) for k in numbers]
        if on_gpu
        else [],
        "mean": mean,
        "said": message,
    }


if __name__ == "__main__":
    main()
