"""What compiles, said while it does: a step of a large model compiles for minutes, and nothing else would be seen."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from time import monotonic
from typing import Any, TypeAlias

from fddp.comm import Group, reports

FIRST_WORD_S, NEXT_WORD_S = 10.0, 30.0

# What says so while its block runs: given what compiles, in a few words, or a function that tells it.
Compiling: TypeAlias = Callable[[str | Callable[[], str]], AbstractContextManager[None]]


def compiling(group: Group, what: str | Callable[[], str]) -> AbstractContextManager[None]:
    """Says on rank 0 what compiles and for how long already, on stderr, once it has taken some seconds.

    Args:
      group: the replicas.
      what: what compiles, or a function that tells it at the time.

    Returns:
      The context in which it is said.
    """
    began = monotonic()

    def state() -> str:
        return f"compiling {what() if callable(what) else what}, {monotonic() - began:.0f} s so far"

    return reports(state, FIRST_WORD_S, NEXT_WORD_S) if group.is_main else nullcontext()


def first_call(program: Callable[..., Any], what: str, says: Compiling) -> Callable[..., Any]:
    """A program that is compiled when it is first called, and says so meanwhile.

    Args:
      program: from `jax.jit`.
      what: what it is, in a few words.
      says: `compiling`, of a group.

    Returns:
      The same.
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
