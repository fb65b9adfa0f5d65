"""Shows a step of several programs in `jax.profiler`: its tasks by their names, on the threads that do them.

A program that is launched runs on threads of XLA's own. So a task shows while it is launched, and again while a thread
waits for it. A name costs less than a microsecond where no profiler runs.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import jax
from jax.profiler import TraceAnnotation

Made = TypeVar("Made")


def named(programs: Mapping[str, Callable[..., Sequence[Any]]]) -> dict[str, Callable[..., Sequence[Any]]]:
    """Wraps programs, so that their launches show.

    Args:
      programs: by the names of tasks.

    Returns:
      The same programs.
    """

    def showing(name: str, program: Callable[..., Sequence[Any]]) -> Callable[..., Sequence[Any]]:
        def run(*read: Any) -> Sequence[Any]:
            with TraceAnnotation(name):
                return program(*read)

        return run

    return {name: showing(name, program) for name, program in programs.items()}


def wait_for(name: str, made: Made) -> Made:
    """Waits for what a task makes, so that the wait shows under the task's name.

    Args:
      name: of the task.
      made: its arrays.

    Returns:
      The same arrays, once they are there.
    """
    with TraceAnnotation(name):
        return jax.block_until_ready(made)
