"""The output of ranks, passed on in whole lines: those of several ranks do not mix."""

import os
import re
import subprocess
import sys
import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO

FLIGHT = b"`python -m fddp flight "  # which the watcher of rank 0 names when it ends a job
MARK = re.compile(rb"\x1e(\d+)\x1f")  # in front of each piece that MPICH's mpiexec passes on
MARK_BYTES = 12
LINE_ENDS = (b"\n", b"\r")  # a progress bar ends its lines with the second
LONGEST = 2**16
GREETING = re.compile(rb"\[Gloo\] Rank \d+ is connected to ")  # of XLA, which nothing silences


def shown(process: subprocess.Popen[bytes], prefix: str, ending: threading.Event) -> list[threading.Thread]:
    """Passes on what a process writes, each line with its rank in front.

    Args:
      process: has pipes for its output.
      prefix: in front of each line; "" where mpiexec marks them.
      ending: is set once a watcher writes that it ends the job.

    Returns:
      Threads, which end with the output.
    """

    def copy(stream: IO[bytes], out: IO[bytes] | None) -> None:
        with stream:
            for line in _of_each_rank(stream, prefix.encode()):
                if FLIGHT in line:
                    ending.set()
                if out is None:
                    continue
                try:
                    out.write(line)  # one write: lines of several ranks do not mix
                    out.flush()
                except OSError as error:  # a full disk, or a reader that has left: the ranks go on
                    with Path(os.devnull).open("wb") as nowhere:
                        os.dup2(nowhere.fileno(), out.fileno())  # also for what the buffer still holds
                    with suppress(OSError):
                        tell(f"what the ranks print is lost from here on: {error.strerror}.")

    outs = [getattr(stream, "buffer", None) for stream in (sys.stdout, sys.stderr)]  # a shell may close both
    pairs = zip((process.stdout, process.stderr), outs)
    threads = [threading.Thread(target=copy, args=pair, daemon=True) for pair in pairs]
    for thread in threads:
        thread.start()
    return threads


def _of_each_rank(stream: IO[bytes], rank: bytes) -> Iterator[bytes]:
    """Whole lines with their rank in front, of pieces of lines that mpiexec marks with the rank; without greetings."""
    begun = defaultdict[bytes, bytes](bytes)
    for piece in _pieces(stream):
        unmarked, *marked = MARK.split(piece)
        ranks = [rank, *(b"[%b] " % number for number in marked[::2])]
        for rank, text in zip(ranks, [unmarked, *marked[1::2]]):
            begun[rank] += text
            if begun[rank].endswith(LINE_ENDS) or len(begun[rank]) > LONGEST:
                line = begun.pop(rank)
                if not GREETING.match(line):
                    yield rank + line
    yield from (rank + line for rank, line in begun.items() if line)


def _pieces(stream: IO[bytes]) -> Iterator[bytes]:
    """Splits output after each line end, and never inside of a mark."""
    rest = b""
    while data := os.read(stream.fileno(), LONGEST):
        data = rest + data
        mark = data.rfind(b"\x1e", -MARK_BYTES)
        whole = len(data) if mark < 0 or b"\x1f" in data[mark:] else mark
        rest = data[whole:]
        yield from data[:whole].splitlines(keepends=True)
    yield rest


def tell(line: str) -> None:
    """Prints a line of `fddp run` itself."""
    print(f"fddp run: {line}", file=sys.stderr, flush=True)
