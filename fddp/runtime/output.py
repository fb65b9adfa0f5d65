"""Copies the output of the ranks in whole lines, so that lines of several ranks do not mix."""

import os
import re
import subprocess
import sys
import threading
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
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


def shown(
    process: subprocess.Popen[bytes], prefix: str, ending: threading.Event
) -> list[threading.Thread]:
    """Starts threads that copy a process's output, each line after its rank, until it ends.

    `prefix` is "" where mpiexec marks the lines. A watcher's line about the end of the job sets
    `ending`.
    """

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
                        _write(out.fileno(), line)
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


def _write(descriptor: int, data: bytes) -> None:
    """Writes without a buffer: Python aborts at its end if a thread holds the lock of one."""
    while data:
        data = data[os.write(descriptor, data) :]


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
