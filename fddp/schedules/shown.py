"""Shows a step of several programs in `jax.profiler`: its tasks by name, on their threads.

A launched program runs on threads of XLA's own. So a task shows while it is launched, and again
while a thread waits for it. A name costs less than a microsecond if no profiler runs.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import jax
from jax.profiler import TraceAnnotation

Outputs = TypeVar("Outputs")


def named(
    programs: Mapping[str, Callable[..., Sequence[Any]]],
) -> dict[str, Callable[..., Sequence[Any]]]:
    """Wraps the programs of tasks so that their launches show."""

    def showing(name: str, program: Callable[..., Sequence[Any]]) -> Callable[..., Sequence[Any]]:
        def run(*inputs: Any) -> Sequence[Any]:
            with TraceAnnotation(name):
                return program(*inputs)

        return run

    return {name: showing(name, program) for name, program in programs.items()}


def wait_for(name: str, outputs: Outputs) -> Outputs:
    """Waits for the outputs of a task, so that the wait shows under the task's name."""
    with TraceAnnotation(name):
        return jax.block_until_ready(outputs)
