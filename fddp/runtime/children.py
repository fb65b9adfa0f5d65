"""Child processes, each the leader of its own group: exit codes, ends, and signals to the parent.

A child is reaped only after its group was killed. Until then it stays a zombie, so that its number
still names its group and no other process.
"""

import os
import signal
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress


def exit_code(pid: int) -> int | None:
    """Returns a child's exit code without reaping it, None while it runs; refuses a reaped one."""
    status = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if status is None:
        return None
    if status.si_code == os.CLD_EXITED:
        return status.si_status
    return -status.si_status


def describe_end(code: int) -> str:
    """Describes an exit code, which is negative after a signal."""
    if code < 0:
        return f"by {signal.Signals(-code).name}"
    return f"with exit code {code}"


def exit_status(code: int) -> int:
    """Converts the exit code of a child to a status for this process, as a shell does."""
    return 128 - code if code < 0 else code


def kill_groups(pids: Iterable[int]) -> None:
    """Kills children and all processes of their groups; skips children that were reaped."""
    for pid in pids:
        with suppress(ChildProcessError, ProcessLookupError, PermissionError):
            exit_code(pid)  # raises for a reaped child
            _kill_group(pid)


def _kill_group(pid: int) -> None:
    try:
        os.killpg(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):  # the child has no group yet
        os.kill(pid, signal.SIGKILL)


@contextmanager
def collect_signals(*numbers: int) -> Iterator[list[int]]:
    """Collects signals while its block runs; yields the numbers of the received signals.

    No signal interrupts the block or is lost in a callback of another library. Signals that this
    process ignores, for example under nohup, stay ignored. Only SIGCHLD does not: the kernel would
    drop the exit codes of the children.
    """
    signals = list[int]()
    handlers = {
        number: signal.signal(number, lambda number, frame: signals.append(number))
        for number in numbers
        if signal.getsignal(number) != signal.SIG_IGN
    }
    if numbers and signal.getsignal(signal.SIGCHLD) == signal.SIG_IGN:
        handlers[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        yield signals
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def cores_for(ranks: int) -> int:
    """The cores of each of a host's ranks; 0 if they are too few, or if not all may be used."""
    cores = os.cpu_count() or 1
    usable = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else ()
    return cores // ranks if len(usable) == cores else 0
