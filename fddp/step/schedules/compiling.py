"""Reports which program compiles: a large model compiles for minutes without other output."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from time import monotonic
from typing import Any, TypeAlias

from fddp.comm import Group, reports

FIRST_WORD_S = 10.0
NEXT_WORD_S = 30.0

# Reports while its block runs; takes a description of the program, or a function that returns it.
Compiling: TypeAlias = Callable[[str | Callable[[], str]], AbstractContextManager[None]]


def compiling(group: Group, what: str | Callable[[], str]) -> AbstractContextManager[None]:
    """Reports on rank 0, on stderr, which program compiles, and for how many seconds so far.

    `what` describes the program, or is a function that returns the current description.
    """
    start = monotonic()

    def state() -> str:
        text = what
        if callable(text):
            text = text()
        return f"compiling {text}, {monotonic() - start:.0f} s so far"

    if group.is_main:
        return reports(state, FIRST_WORD_S, NEXT_WORD_S)
    return nullcontext()


def first_call(program: Callable[..., Any], what: str, says: Compiling) -> Callable[..., Any]:
    """Wraps a jitted program so that its first call, which compiles it, is reported."""
    compiled = False

    def run(*inputs: Any) -> Any:
        nonlocal compiled
        if compiled:
            return program(*inputs)
        with says(f"and starting {what}"):
            outputs = program(*inputs)
        compiled = True
        return outputs

    return run
