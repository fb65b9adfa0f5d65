"""Scripts whose last rank fails inside its third step, catches the error and tries again:
`retries.py HOW`."""

import sys
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import fddp


def main(how: str) -> None:
    group = fddp.init()
    last = group.rank == group.size - 1
    calls: list[int] = []

    def reduce(wire: jax.Array) -> jax.Array:
        calls.append(wire.size)
        if len(calls) == 3 * 3 - 1 and last:  # the second all-reduce of three
            raise ArithmeticError("on purpose")
        return group.transport.all_reduce(wire)

    say = group.journal.say
    stages = list[str]()

    def begin(doing: str) -> None:
        stages.extend([doing] * (doing == "stage 0"))
        if how == "before, whole" and last and doing == "stage 0" and len(stages) == 3:
            raise ArithmeticError("on purpose")
        say(doing)

    group.journal.say = begin
    breaking = replace(group, transport=group.transport._replace(all_reduce=reduce))

    def step() -> tuple[fddp.TrainStep, fddp.TrainState]:
        loss = lambda p, x: sum(jnp.mean((w - x) ** 2) for w in p)  # noqa: E731
        options: Any = {
            "group": breaking,
            "bucket_cap_mb": 0,
            "donate": False,
            "schedule": "eager" if how == "before, whole" else "staged",
        }
        step = fddp.train_step(loss, optax.sgd(0.1), **options)
        # Of seven messages there are two orders, which the first steps try.
        return step, step.init([jnp.zeros(n) for n in range(1, 8 if how == "before, whole" else 4)])

    train, state = step()
    errors = set[str]()
    failed = False
    for _ in range(100):
        try:
            if failed and how.startswith("new"):
                failed = False
                train, state = step()
            state, _ = train(state, np.zeros(1, np.float32))
        except ArithmeticError:
            failed = True
        except RuntimeError as error:
            if not how.endswith("swallow") or not last:
                raise
            errors.add(str(error))
    print(*errors, "all went well", sep="\n")


if __name__ == "__main__":
    main(sys.argv[1])
