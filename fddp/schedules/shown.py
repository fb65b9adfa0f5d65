"""What `jax.profiler` shows of a step of several programs: its tasks by their names, on the threads that do them.

A program that is launched runs on, on threads of XLA's own; so a task shows when it is launched and while somebody
waits for it. Where no profiler runs a name costs less than a microsecond.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import jax
from jax.profiler import TraceAnnotation

Made = TypeVar("Made")


def named(programs: Mapping[str, Callable[..., Sequence[Any]]]) -> dict[str, Callable[..., Sequence[Any]]]:
    """Programs whose launches show.

    Args:
      programs: by the names of tasks.

    Returns:
      The same.
    """

    def showing(name: str, program: Callable[..., Sequence[Any]]) -> Callable[..., Sequence[Any]]:
        def run(*read: Any) -> Sequence[Any]:
            with TraceAnnotation(name):
                return program(*read)

        return run

    return {name: showing(name, program) for name, program in programs.items()}


def wait_for(name: str, made: Made) -> Made:
    """Waits for what a task makes, and the wait shows under its name.

    Args:
      name: of the task.
      made: its arrays.

    Returns:
      The same, once they are there.
    """
    with TraceAnnotation(name):
        return jax.block_until_ready(made)
