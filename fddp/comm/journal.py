"""The journal of a process: what it does, noted where it happens.

A group knows its journal as these functions. They do nothing in a process that nobody watches; those of a watched one
are made by `fddp.watching`.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple


class Finding(NamedTuple):
    """The last finding of the watchers of all ranks."""

    end: bool
    """Whether this rank is to end."""
    words: str
    """The reason, for a person."""


def _block(*_: Any) -> AbstractContextManager[None]:
    return nullcontext()


def _note(*_: Any) -> None: ...


@dataclass
class Journal:
    """The functions by which a process notes what it does; the groups that it is a member of share them."""

    step: Callable[[int], AbstractContextManager[None]] = _block
    """`step(processes)`: notes a step of so many processes, from its first task to its last."""
    call: Callable[[str, int], AbstractContextManager[None]] = _block
    """`call(name, processes)`: notes a collective of the hosts of so many processes."""
    message: Callable[[str, int], AbstractContextManager[None]] = _block
    """`message(name, nbytes)`: notes a message, from when it leaves until its sum is there; on any thread."""
    say: Callable[[str], None] = _note
    """Notes what the main thread begins."""
    between: Callable[[], None] = _note
    """Notes that the main thread is between two steps, and makes progress."""
    computed: Callable[[float], None] = _note
    """Notes the seconds that the step under way has computed, where they are known."""
    launched: Callable[[Any], None] = _note
    """Notes the results of a step for which Python does not wait: the step is over when the last one is ready."""
    adds: Callable[[int], None] = _note
    """`adds(processes)`: notes a batch without a message, which a step of so many processes will send."""
    goes_on: Callable[[int], None] = _note
    """Notes that this process continues a training that was saved after a step, by the step's number."""
    stall_s: float = 30.0
    """Seconds for which nothing may move while this process waits for others."""
    finding: Callable[[], Finding] = lambda: Finding(False, "")
    """Reads what the watchers have found so far."""
    ask_to_stop: Callable[[], None] = _note
    """Notes that this process is to end soon; the handler of a signal may call it."""
    stops: Callable[[], bool] = lambda: False
    """Whether all ranks stop now: ranks that ask equally often get the same answer."""


def alone() -> Journal:
    """Makes the journal of a process that is alone: nobody watches it, but it can be told to end."""
    asked = list[bool]()
    return Journal(ask_to_stop=lambda: asked.append(True), stops=lambda: bool(asked))
