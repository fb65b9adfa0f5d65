"""A rank, as its watcher sees it: reads what the rank wrote down and whether it lives, and ends it.

Source: the monitor process of NVIDIA's resiliency extension.
"""

import json
import os
import signal
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from mmap import mmap
from pathlib import Path
from typing import Any

from .links import EVERY_S
from .shared_memory import (
    ANSWER,
    DOING,
    FAILED,
    FINISHED,
    HEAD,
    LEFT,
    LIFE,
    MESSAGES,
    PLACE,
    SENDING,
    TOLD,
    VERDICT,
    message,
)


def reader(memory: mmap, job: Mapping[str, Any]) -> Callable[[], dict[str, Any]]:
    """Makes a function that reads what the rank wrote down."""
    lived = -1
    changed = time.monotonic()

    def read() -> dict[str, Any]:
        nonlocal lived, changed
        life = LIFE.read(memory)["life"]
        head = HEAD.read(memory)
        doing = DOING.read(memory)
        now = time.monotonic()
        if life != lived:
            lived = life
            changed = now
        still = now - head.pop("moved")
        lifeless = now - changed
        been = still > lifeless + EVERY_S  # at its place since it moved last
        return {
            "rank": job["rank"],
            "still": still,
            "lifeless": lifeless,
            "done": doing["doing"] in (FINISHED, FAILED),
            "left": doing["doing"] == LEFT,
            "stopped": stopped(job["parent"]),
            **head,
            **doing,
            **SENDING.read(memory),
            **(PLACE.read(memory) if been else {"place": ""}),
            **TOLD.read(memory),
            **ANSWER.read(memory),
        }

    return read


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
    VERDICT.write(memory, True, words)
    until = time.monotonic() + job["grace_s"]
    while not died() and time.monotonic() < until:
        time.sleep(0.05)
    if not died():
        os.kill(job["parent"], signal.SIGKILL)


def record(memory: mmap, job: Mapping[str, Any], own: Mapping[str, Any], words: str) -> None:
    """Writes the last messages of the rank to a file, for `python -m fddp flight`."""
    now = time.monotonic()
    last = [message(number).read(memory) for number in range(MESSAGES)]
    sent = [
        {
            "number": one["number"],
            "step": one["step"] + own["before"],
            "name": one["name"],
            "nbytes": one["nbytes"],
            "began_s": one["begin"] - now,
            "took_s": one["end"] - one["begin"] if one["end"] else None,
        }
        for one in sorted(last, key=lambda one: one["number"])
        if one["begin"]
    ]
    own = {"rank": own["rank"], "steps": own["steps"] + own["before"], "doing": own["doing"]}
    told = own | {"size": job["size"], "why": words, "began": job["began"]}
    with suppress(OSError):
        folder = Path(job["flight"])
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        fresh = folder / f"{job['rank']}.{os.getpid()}"
        with fresh.open("x") as file:  # another user's link at either name is not followed
            json.dump(told | {"messages": sent}, file, indent=1)
        fresh.replace(folder / f"rank_{job['rank']}.json")
