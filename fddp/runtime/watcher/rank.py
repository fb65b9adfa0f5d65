"""A rank, as its watcher sees it: reads what the rank wrote down and whether it lives, and ends it.

Source: the monitor process of NVIDIA's resiliency extension.
"""

import json
import os
import signal
import struct
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from mmap import mmap
from pathlib import Path
from typing import Any

from .links import EVERY_S


def reader(memory: mmap, job: Mapping[str, Any]) -> Callable[[], dict[str, Any]]:
    """Makes a function that reads what the rank wrote down."""
    head = struct.Struct(job["head"])
    answer = struct.Struct(job["answer"])
    lived = -1
    changed = time.monotonic()

    def text(place: int) -> str:
        return memory[place : place + job["text"]].rstrip(b"\0").decode(errors="replace")

    def read() -> dict[str, Any]:
        nonlocal lived, changed
        counts = dict(zip(job["heads"], head.unpack(_settled(memory, head.size))))
        life = counts.pop("life")
        moved = counts.pop("moved")
        now = time.monotonic()
        if life != lived:
            lived = life
            changed = now
        still = now - moved
        lifeless = now - changed
        return {
            "rank": job["rank"],
            "still": still,
            "lifeless": lifeless,
            "place": text(job["place"]) if still > lifeless + EVERY_S else "",  # where it has been since it moved last
            "doing": text(job["doing"]),
            "done": text(job["doing"]) in job["done"],
            "left": text(job["doing"]) == job["left"],
            "sending": text(job["sending"]),
            "stopped": stopped(job["parent"]),
            "told": bool(memory[job["stopping"]]),
            **counts,
            **dict(zip(("asks", "between_s", "agreed"), answer.unpack_from(memory, job["answered"]))),
        }

    return read


def _settled(memory: mmap, size: int) -> bytes:
    """Reads the beginning of a memory that is written meanwhile, until it is the same twice."""
    first = memory[:size]
    while (second := memory[:size]) != first:
        first = second
    return first


def stopped(process: int) -> bool:
    """Whether a process was stopped, by a signal or a debugger; where there is no /proc nobody knows."""
    try:
        return Path(f"/proc/{process}/stat").read_bytes().rpartition(b")")[2].split()[0] in (b"T", b"t")
    except OSError:
        return False


def death(parent: int) -> Callable[[], float | None]:
    """Makes a function that tells when the process that started this one ended."""
    at: float | None = None

    def died() -> float | None:
        nonlocal at
        if at is None and os.getppid() != parent:
            at = time.monotonic()
        return at

    return died


def pidfd(process: int) -> list[int]:
    """A file that becomes ready at once when a process ends; none where the system has no such files."""
    try:
        return [os.pidfd_open(process)] if hasattr(os, "pidfd_open") else []
    except OSError:
        return []


def end(
    memory: mmap, job: Mapping[str, Any], own: Mapping[str, Any], words: str, died: Callable[[], float | None]
) -> None:
    """Writes down what the rank sent last, and ends it: asks it to end, and kills it if it does not."""
    record(memory, job, own, words)
    tell(memory, job, words, end=True)
    until = time.monotonic() + job["grace_s"]
    while not died() and time.monotonic() < until:
        time.sleep(0.05)
    if not died():
        os.kill(job["parent"], signal.SIGKILL)


def tell(memory: mmap, job: Mapping[str, Any], words: str, *, end: bool) -> None:
    """Tells the rank what the watchers have found, and whether it is to end."""
    put(memory, job["ending"], struct.pack(job["verdict"], end, words.encode()[:511]))


def put(memory: mmap, place: int, packed: bytes) -> None:
    """Writes into memory that the rank reads meanwhile; `pack_into` would fill it with zeros first."""
    memory[place : place + len(packed)] = packed


def record(memory: mmap, job: Mapping[str, Any], own: Mapping[str, Any], words: str) -> None:
    """Writes the last messages of the rank to a file, for `python -m fddp flight`."""
    layout = struct.Struct(job["message"])
    now = time.monotonic()
    rows = [layout.unpack_from(memory, job["ring"] + k * layout.size) for k in range(job["messages"])]
    sent = [
        {
            "number": number,
            "step": step + own["before"],
            "name": name.rstrip(b"\0").decode(errors="replace"),
            "nbytes": nbytes,
            "began_s": begin - now,
            "took_s": stop - begin if stop else None,
        }
        for number, step, begin, stop, nbytes, name in sorted(rows)
        if begin
    ]
    own = {"rank": own["rank"], "steps": own["steps"] + own["before"], "doing": own["doing"]}
    told = own | {"size": job["size"], "why": words}
    with suppress(OSError):
        folder = Path(job["flight"])
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"rank_{job['rank']}.json").write_text(json.dumps(told | {"messages": sent}, indent=1))
