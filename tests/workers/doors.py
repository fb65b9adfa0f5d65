"""Ranks that start or leave in some way of their own: `doors.py HOW`.

- step: prints the mean loss of a step, whatever launcher has started them.
- late N: rank N, or `all`, uses JAX before `fddp.init`.
- leave: all leave the world; rank 1 then fails, rank 0 computes on for longer than its end could be missed.
- leaves_by_mpi: what is said where the world cannot be left.
- terminated: a SIGTERM after the world is left, though the loop had taken it over.
"""

import os
import signal
import sys
import time

import jax.numpy as jnp
import optax

import fddp


def main(how: str, who: str = "") -> None:
    if how == "late" and who in ("all", os.environ["FDDP_RANK"]):
        jnp.ones(2)
    group = fddp.init()
    step = fddp.train_step(lambda w, x: jnp.mean((x - w) ** 2), optax.sgd(0.5), group=group)
    state, info = step(step.init(jnp.zeros(())), jnp.full(4, 2.0 * group.rank))
    if how == "step":
        print(f"rank {group.rank} of {group.processes} over {group.backend}: {info.loss}")
    if how == "leaves_by_mpi":
        try:
            fddp.shutdown()
        except RuntimeError as error:
            print(error)
        assert fddp.init() is group
    if how == "leave":
        kept = jnp.asarray(state.params.addressable_data(0))
        time.sleep(2.0 * group.rank)
        fddp.shutdown()
        fddp.shutdown()  # there is none to leave any more
        if group.rank:
            raise ValueError("on its own")
        time.sleep(8.0)  # the watchers would long have ended it
        alone = fddp.init("local")
        print(f"{alone.processes} process, {kept + jnp.ones(())}")
    if how == "terminated":
        fddp.preempted()
        fddp.shutdown()
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)


if __name__ == "__main__":
    main(*sys.argv[1:])
