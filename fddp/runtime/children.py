"""Child processes, each the leader of its own group: exit codes, ends, signals and output.

A child is reaped only after its group was killed. Until then it stays a zombie, so that its number
still names its group and no other process. The output of the ranks is copied in whole lines, so
that lines of several ranks do not mix.
"""

import os
import re
import signal
import subprocess
import sys
import threading
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

FLIGHT = b"`python -m fddp flight "  # printed by the watcher of rank 0 when it ends a job
MARK = re.compile(rb"\x1e(\d+)\x1f")  # set by MPICH's mpiexec before each piece of output
MARK_BYTES = 12
LINE_ENDS = (b"\n", b"\r")  # a progress bar ends its lines with \r
LONGEST = 2**16
GREETING = re.compile(rb"\[Gloo\] Rank \d+ is connected to ")  # XLA always prints it
LOOK_S = 0.05
# Held while a line is written: lines of several ranks do not mix.
_writing = {"stdout": threading.Lock(), "stderr": threading.Lock()}


def exit_code(pid: int) -> int | None:
    """Returns a child's exit code without reaping it, None while it runs; refuses a reaped one."""
    status = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if status is None:
        return None
    if status.si_code == os.CLD_EXITED:
        return status.si_status
    return -status.si_status


def is_stopped(pid: int) -> bool:
    """True for a running child that a signal or a debugger has stopped."""
    return os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOHANG | os.WNOWAIT) is not None


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
            try:
                os.killpg(pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):  # the child has no group yet
                os.kill(pid, signal.SIGKILL)


@contextmanager
def collect_signals(*numbers: int) -> Iterator[list[int]]:
    """Collects signals while its block runs, which none interrupts; yields their numbers."""
    # Signals that this process ignores, for example under nohup, stay ignored. Only SIGCHLD does
    # not: the kernel would drop the exit codes of the children.
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


### Output


def shown(
    process: subprocess.Popen[bytes], prefix: str, ending: threading.Event
) -> list[threading.Thread]:
    """Starts threads that copy a process's output; a watcher's last line sets `ending`."""

    def copy(stream: IO[bytes], name: str) -> None:
        out = getattr(sys, name)  # None if a shell has closed it
        with stream:
            for line in _of_each_rank(stream, prefix.encode()):
                if FLIGHT in line:
                    ending.set()
                if out is None:
                    continue
                try:
                    with _writing[name]:
                        # Without a buffer: Python aborts at its end if a thread holds its lock.
                        while line:
                            line = line[os.write(out.fileno(), line) :]
                except OSError as error:  # a full disk, or no reader: the ranks continue
                    with Path(os.devnull).open("wb") as nowhere:
                        os.dup2(nowhere.fileno(), out.fileno())
                    with suppress(OSError):
                        print_line(
                            f"the output of the ranks is lost from now on: {error.strerror}."
                        )

    pairs = zip((process.stdout, process.stderr), _writing)
    threads = [threading.Thread(target=copy, args=pair, daemon=True) for pair in pairs]
    for thread in threads:
        thread.start()
    return threads


def drain(readers: Iterable[threading.Thread], limit_s: float, signals: Sequence[int]) -> None:
    """Waits for the rest of the output, until a signal arrives."""
    # Time in which a line is being written does not count: a process that outlives its rank may
    # hold the output open, and the reader of this process may be slow.
    received = len(signals)
    for reader in readers:
        while reader.is_alive() and limit_s > 0 and len(signals) == received:
            reader.join(LOOK_S)
            if not any(lock.locked() for lock in _writing.values()):
                limit_s -= LOOK_S


def _of_each_rank(stream: IO[bytes], rank: bytes) -> Iterator[bytes]:
    """Joins pieces marked by mpiexec to whole lines after their rank; drops the greetings."""
    partial_lines = defaultdict[bytes, bytes](bytes)
    for piece in _pieces(stream):
        unmarked, *marked = MARK.split(piece)
        ranks = [rank, *(b"[%b] " % number for number in marked[::2])]
        for rank, text in zip(ranks, [unmarked, *marked[1::2]]):
            partial_lines[rank] += text
            if partial_lines[rank].endswith(LINE_ENDS) or len(partial_lines[rank]) > LONGEST:
                line = partial_lines.pop(rank)
                if not GREETING.match(line):
                    yield rank + line
    ends = b"\n" * (partial_lines.keys() != {b""})  # a line of another rank may follow
    yield from (rank + line + ends for rank, line in partial_lines.items() if line)


def _pieces(stream: IO[bytes]) -> Iterator[bytes]:
    """Splits output after each line end, never inside a mark."""
    remainder = b""
    while data := os.read(stream.fileno(), LONGEST):
        data = remainder + data
        end = data.rfind(b"\x1e", -MARK_BYTES)
        if end < 0 or b"\x1f" in data[end:]:
            end = len(data)
        remainder = data[end:]
        yield from data[:end].splitlines(keepends=True)
    yield remainder


def print_line(line: str) -> None:
    print(f"fddp run: {line}", file=sys.stderr, flush=True)
