"""Ways for processes to meet: `joins.py HOW [PORT]`. Prints a line for the group that came of it."""

import os
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax

import fddp


def join(how: str, port: str) -> fddp.Group:
    if how == "adopt":
        rank, size = (int(os.environ.pop(f"FDDP_{name}")) for name in ("RANK", "SIZE"))
        jax.distributed.initialize(os.environ.pop("FDDP_COORDINATOR"), size, rank)
        return fddp.init()
    if how == "arguments":
        return fddp.init(rank=1 - int(os.environ["FDDP_RANK"]), size=2, coordinator=f"127.0.0.1:{port}")
    return fddp.init(how or None)


def main(how: str = "", port: str = "") -> None:
    group = join(how, port)
    devices = group.size // group.processes
    step = fddp.train_step(lambda w, x: jnp.mean((w - x) ** 2), optax.sgd(0.5), group=group)
    state, _ = step(step.init(jnp.zeros(())), np.full(2 * devices, group.rank, np.float32))
    print(f"{group.backend} {group.rank} of {group.processes}, {group.size} replicas, {float(state.params)}")


if __name__ == "__main__":
    main(*sys.argv[1:])
