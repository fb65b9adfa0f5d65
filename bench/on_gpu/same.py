"""Does a step train as plain JAX does, on one replica?

Products are taken in full float32: with TF32, the default on GPUs, two programs differ by more than
fddp ever would. Plain JAX itself shows the effect of rounding. It is run once more, for not every
program of XLA gives the same bits each time on a GPU; and with the rows in the reverse order, which
adds the same numbers in another one.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

from bench.on_gpu.machine import Machine
from bench.overhead import hand_written
from bench.workload import read

STEPS = 5
# Relative to a loss, and to the path of the parameters; or this many times the effect of the
# order of the rows.
LOSS = 1e-5
WAY = 1e-3
TIMES = 10


def measures(machine: Machine) -> dict[str, Callable[[], dict[str, Any]]]:
    """Compares each model."""
    return {name: partial(compare, name) for name in machine.models}


def compare(name: str) -> dict[str, Any]:
    """Trains a model, as module:preset:rows, in three ways from the same parameters."""
    with jax.default_matmul_precision("highest"):
        work = read(name)
        optimizer = optax.sgd(1e-2, momentum=0.9)
        by_hand = jax.jit(hand_written(work.loss_fn, optimizer))

        def plain(batch: Any) -> tuple[list[float], Any]:
            state: Any = (work.params, optimizer.init(work.params), work.model_state)
            losses = []
            for _ in range(STEPS):
                state, (loss, _) = by_hand(state, batch)
                losses.append(float(loss))
            return losses, state[0]

        def of_fddp() -> tuple[list[float], Any]:
            step, state = work.step(optimizer)
            losses = []
            for _ in range(STEPS):
                state, info = step(state, work.batch)
                losses.append(float(info.loss))
            return losses, state.params

        expected = plain(work.batch)
        fddp_difference = _difference(of_fddp(), expected, work.params)
        repeated_difference = _difference(plain(work.batch), expected, work.params)
        rows = jax.tree.map(lambda x: x[::-1], work.batch)
        reversed_difference = _difference(plain(rows), expected, work.params)
    fine = all(
        fddp_difference[what] <= max(limit, TIMES * reversed_difference[what])
        for what, limit in (("loss", LOSS), ("way", WAY))
    )
    return {
        "steps": STEPS,
        "first_and_last_loss": [expected[0][0], expected[0][-1]],
        "fddp": fddp_difference,
        "plain_again": repeated_difference,
        "plain_with_rows_reversed": reversed_difference,
        **({} if fine else {"wrong": "it differs from plain JAX by more than rounding"}),
    }


def tell(figures: dict[str, Any]) -> str:
    """The figures in words."""
    fddp = figures["fddp"]
    bits = "the bits of plain JAX" if fddp["bits_equal"] else "not the bits of plain JAX"
    bits_again = "its bits" if figures["plain_again"]["bits_equal"] else "other bits"
    reversed_rows = figures["plain_with_rows_reversed"]
    return (
        f"{bits} after {figures['steps']} steps: losses differ by {fddp['loss']:.1e}, "
        f"parameters by {fddp['way']:.1e} of their way; plain JAX again has {bits_again}, "
        f"with rows reversed {reversed_rows['loss']:.1e} and {reversed_rows['way']:.1e}"
    )


def _difference(
    result: tuple[list[float], Any], expected: tuple[list[float], Any], start: Any
) -> dict[str, Any]:
    distance, path_length, equal = _distances(result[1], expected[1], start)
    return {
        "loss": max(abs(a - b) / max(abs(b), 1e-30) for a, b in zip(result[0], expected[0])),
        "way": float(distance / path_length),
        "bits_equal": result[0] == expected[0] and bool(equal),
    }


@jax.jit
def _distances(params: Any, expected: Any, start: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The distance of two results, the distance of the second from the start, and True if they are
    equal."""
    distance = optax.tree.norm(optax.tree.sub(params, expected))
    path_length = optax.tree.norm(optax.tree.sub(expected, start))
    equal = jax.tree.map(jnp.array_equal, params, expected)
    return distance, path_length, jnp.all(jnp.array(jax.tree.leaves(equal)))
