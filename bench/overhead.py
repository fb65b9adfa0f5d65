"""Overhead: how much does fddp cost on one replica, against the same step written by hand?

python bench/overhead.py [--quick]

On a GPU bench/gpu.py measures it.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax

import fddp

sys.path.insert(0, str(Path(__file__).parents[1]))
from bench.record import interleave, question, ratio, save, summary
from bench.workload import Workload, read

PROBLEMS = ("gpt:tiny:16", "resnet:18:4")


def main() -> None:
    parser = question(__doc__, "5 rounds of the first problem")
    parser.add_argument(
        "--problems", nargs="+", default=PROBLEMS, help="model:preset:rows, of models/"
    )
    parser.add_argument("--name", default="overhead", help="of the result's file")
    args = parser.parse_args()
    results = {
        problem: measure(read(problem), rounds=5 if args.quick else 60)
        for problem in (args.problems[:1] if args.quick else args.problems)
    }
    for name, result in results.items():
        time = result["fddp / by hand"]
        memory = result["extra_memory_in_gradients"]
        print(f"{name}: {time['median']:.3f} of the hand-written step's time", end=" ")
        print(
            f"({time['quartile_1']:.3f} … {time['quartile_3']:.3f}), {memory:+.2f} copies of the "
            f"gradients"
        )
    if not args.quick:
        print(save(args.name, results))


def measure(workload: Workload, *, rounds: int) -> dict[str, Any]:
    """Times both steps in turn, and compares XLA's figures of their memory."""
    loss_fn, params, model_state, batch = workload
    optimizer = optax.adamw(1e-3)

    by_hand = jax.jit(hand_written(loss_fn, optimizer), donate_argnums=0)
    hand_state = jax.tree.map(jnp.copy, (params, optimizer.init(params), model_state))
    step = fddp.train_step(loss_fn, optimizer, has_aux=True)
    state = step.init(params, model_state=model_state)

    extra = allocated_bytes(step.lower(state, batch)) - allocated_bytes(
        by_hand.lower(hand_state, batch)
    )

    def run_by_hand() -> Any:
        nonlocal hand_state
        hand_state, info = by_hand(hand_state, batch)
        return hand_state, info

    def run_fddp() -> Any:
        nonlocal state
        state, info = step(state, batch)
        return state, info

    seconds = interleave({"by hand": run_by_hand, "fddp": run_fddp}, rounds=rounds)
    return {
        **{name: summary(values) for name, values in seconds.items()},
        "fddp / by hand": ratio(seconds["fddp"], seconds["by hand"]),
        "extra_memory_in_gradients": extra / sum(x.nbytes for x in jax.tree.leaves(params)),
    }


def allocated_bytes(lowered: jax.stages.Lowered) -> int:
    """Bytes that a program allocates."""
    memory: Any = lowered.compile().memory_analysis()
    return memory.temp_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes


def hand_written(
    loss_fn: Callable[..., Any], optimizer: optax.GradientTransformation
) -> Callable[..., Any]:
    """The step of a local script."""

    def step(state: Any, batch: Any) -> Any:
        params, opt_state, model_state = state
        buffers = {} if model_state is None else {"model_state": model_state}
        (loss, aux), grads = jax.value_and_grad(loss_fn, has_aux=True)(params, batch, **buffers)
        if model_state is not None:
            model_state, aux = aux
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state, model_state), (loss, aux)

    return step


if __name__ == "__main__":
    main()
