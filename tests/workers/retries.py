"""Scripts whose last rank fails inside its third step, catches the error and tries again:
`retries.py HOW`."""

import sys

import jax
import jax.experimental
import jax.numpy as jnp
import numpy as np
import optax

import fddp


def main(how: str) -> None:
    group = fddp.init()
    last = group.rank == group.size - 1
    calls = list[None]()

    def fail(x: np.ndarray) -> np.ndarray:
        calls.append(None)
        if last and len(calls) == 3:
            raise ArithmeticError("on purpose")
        return x

    def loss(p: list[jax.Array], x: jax.Array) -> jax.Array:
        form = jax.ShapeDtypeStruct(x.shape, x.dtype)
        x = jax.experimental.io_callback(fail, form, x)
        return sum((jnp.mean((w - x) ** 2) for w in p), start=jnp.zeros(()))

    def start() -> tuple[fddp.TrainStep, fddp.TrainState]:
        step = fddp.train_step(loss, optax.sgd(0.1), group=group, bucket_cap_mb=0, donate=False)
        return step, step.init([jnp.zeros(n) for n in range(1, 4)])

    step, state = start()
    errors = set[str]()
    for _ in range(100):
        try:
            state, info = step(state, np.zeros(1, np.float32))
            float(info.loss)
        except RuntimeError as error:
            if not last:
                raise
            errors.add(str(error))
            if how == "new":
                step, state = start()
    print(*errors, "all went well", sep="\n")


if __name__ == "__main__":
    main(sys.argv[1])
