"""A rank, by default the last, ends badly with sums in flight while the others train:
`ends.py HOW[:RANK]`."""

import os
import signal
import sys

import jax.numpy as jnp
import numpy as np
import optax

import fddp


def end(how: str, group: fddp.Group) -> None:
    if how == "raise":
        raise RuntimeError(f"rank {group.rank} has had enough")
    if how.startswith("interrupted"):
        signal.signal(
            signal.SIGINT, signal.default_int_handler
        )  # shells let background processes ignore it
        os.kill(os.getpid(), signal.SIGINT)


def main(how: str, rank: str = "") -> None:
    group = fddp.init()
    fails = group.rank == int(rank or group.size - 1) or how == "interrupted_all"
    loss = lambda w, x: jnp.mean((w - x) ** 2)  # noqa: E731
    step = fddp.train_step(loss, optax.sgd(0.1), group=group, schedule="eager")
    state = step.init(jnp.zeros(2 if how == "differ" and fails else 1))
    for number in range(100_000):
        if fails and number == 3:
            end(how, group)
        state, _ = step(state, np.zeros((4, 1), np.float32))


if __name__ == "__main__":
    main(*sys.argv[1].split(":"))
