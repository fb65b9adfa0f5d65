"""Reports what compiles: a step of a large model compiles for minutes, and nothing else would be seen."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from time import monotonic
from typing import Any, TypeAlias

from fddp.comm import Group, reports

FIRST_WORD_S = 10.0
NEXT_WORD_S = 30.0

# Reports while its block runs; takes a few words for what compiles, or a function that returns them.
Compiling: TypeAlias = Callable[[str | Callable[[], str]], AbstractContextManager[None]]


def compiling(group: Group, what: str | Callable[[], str]) -> AbstractContextManager[None]:
    """Reports on rank 0, on stderr, what compiles and for how long already, once it has taken some seconds.

    Args:
      group: the replicas.
      what: a few words for what compiles, or a function that returns them at the time.

    Returns:
      A context that reports until it ends.
    """
    began = monotonic()

    def state() -> str:
        return f"compiling {what() if callable(what) else what}, {monotonic() - began:.0f} s so far"

    return reports(state, FIRST_WORD_S, NEXT_WORD_S) if group.is_main else nullcontext()


def first_call(program: Callable[..., Any], what: str, says: Compiling) -> Callable[..., Any]:
    """Wraps a program, so that its first call, which compiles it, is reported.

    Args:
      program: from `jax.jit`.
      what: a few words for it.
      says: `compiling`, of a group.

    Returns:
      The same program.
    """
    compiled = False

    def run(*given: Any) -> Any:
        nonlocal compiled
        if compiled:
            return program(*given)
        with says(f"and starting {what}"):
            made = program(*given)
        compiled = True
        return made

    return run
