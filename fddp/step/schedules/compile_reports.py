"""Reports which program compiles: a large model compiles for minutes without other output."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from time import monotonic
from typing import Any

from fddp.comm import Group, reports

FIRST_WORD_S = 10.0
NEXT_WORD_S = 30.0


def report_compiling(group: Group, what: str) -> AbstractContextManager[None]:
    """Reports on rank 0, on stderr, which program compiles, and for how many seconds so far."""
    start = monotonic()

    def state() -> str:
        return f"compiling {what}, {monotonic() - start:.0f} s so far"

    if group.is_main:
        return reports(state, FIRST_WORD_S, NEXT_WORD_S)
    return nullcontext()


def report_first_call(program: Callable[..., Any], what: str, group: Group) -> Callable[..., Any]:
    """Wraps a jitted program so that its first call, which compiles it, is reported."""
    compiled = False

    def run(*inputs: Any) -> Any:
        nonlocal compiled
        if compiled:
            return program(*inputs)
        with report_compiling(group, f"and starting {what}"):
            outputs = program(*inputs)
        compiled = True
        return outputs

    return run
