"""A training with a process that lives on after its last step, unobserved: `ends_well.py`."""

import atexit
import time


def main() -> None:
    atexit.register(
        time.sleep, 1.5
    )  # before fddp is imported: after all handlers of its own, as a logger's is
    import jax.numpy as jnp
    import optax

    import fddp

    group = fddp.init()
    step = fddp.train_step(lambda w, x: jnp.mean((x @ w @ w) ** 2), optax.sgd(0.1), group=group)
    state = step.init(jnp.eye(400) / 20)
    for number in range(8):
        if group.rank and number == 7:
            time.sleep(0.5)
        state, _ = step(state, jnp.ones((64, 400)) / 20)
    if group.rank:
        float(state.params[0, 0])
    print("trained")


if __name__ == "__main__":
    main()
