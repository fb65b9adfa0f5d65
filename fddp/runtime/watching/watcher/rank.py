"""Observes and ends the rank of a watcher.

Source: the monitor process of NVIDIA's resiliency extension.
"""

import json
import os
import signal
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from mmap import mmap
from operator import itemgetter
from pathlib import Path
from typing import Any

from . import shared_memory
from .links import EVERY_S
from .shared_memory import EXITED, FAILED, FINISHED, LEFT, MESSAGES, message


def report_reader(memory: mmap, job: Mapping[str, Any]) -> Callable[[], dict[str, Any]]:
    """Returns a function that reads the rank's report from its records."""
    last_life = -1
    changed = time.monotonic()

    def read() -> dict[str, Any]:
        nonlocal last_life, changed
        life = shared_memory.LIFE.read(memory)["life"]
        head = shared_memory.HEAD.read(memory)
        doing = shared_memory.DOING.read(memory)
        time_s = time.monotonic()
        if life != last_life:
            last_life = life
            changed = time_s
        still = time_s - head.pop("moved")
        lifeless = time_s - changed
        place = {"place": ""}
        if still > lifeless + EVERY_S:  # it was written after the last move
            place = shared_memory.PLACE.read(memory)
        return {
            "rank": job["rank"],
            "still": still,
            "lifeless": lifeless,
            "done": doing["doing"].startswith((FINISHED, EXITED, FAILED)),
            "left": doing["doing"] == LEFT,
            "stopped": stopped(job["parent"]),
            **head,
            **doing,
            **shared_memory.SENDING.read(memory),
            **place,
            **shared_memory.TOLD.read(memory),
            **shared_memory.ANSWER.read(memory),
        }

    return read


def stopped(process: int) -> bool:
    """True if a signal or a debugger has stopped the process; False without /proc."""
    try:
        status = Path(f"/proc/{process}/stat").read_text(errors="replace")
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] in ("T", "t")


def death(parent: int) -> Callable[[], float | None]:
    """Returns a function for the end time of this process's parent, None before its end."""
    end_s: float | None = None

    def died() -> float | None:
        nonlocal end_s
        if end_s is None and os.getppid() != parent:
            end_s = time.monotonic()
        return end_s

    return died


def pidfd(process: int) -> list[int]:
    """A file that becomes readable when the process ends; empty on systems without such files."""
    try:
        return [os.pidfd_open(process)]
    except (AttributeError, OSError):
        return []


def end(
    memory: mmap,
    job: Mapping[str, Any],
    report: Mapping[str, Any],
    words: str,
    died: Callable[[], float | None],
) -> None:
    """Saves the rank's last messages, requests its end, and kills it after a grace period."""
    record(memory, job, report, words)
    shared_memory.VERDICT.write(memory, True, words)
    deadline = time.monotonic() + job["grace_s"]
    while not died() and time.monotonic() < deadline:
        time.sleep(0.05)
    if not died():
        os.kill(job["parent"], signal.SIGKILL)


def record(memory: mmap, job: Mapping[str, Any], report: Mapping[str, Any], words: str) -> bool:
    """Writes the rank's last messages to a file for `python -m fddp flight`; False without one."""
    time_s = time.monotonic()
    slots = [message(number).read(memory) for number in range(MESSAGES)]
    messages = list[dict[str, Any]]()
    for slot in sorted(slots, key=itemgetter("number")):
        begin = slot.pop("begin")
        end = slot.pop("end")
        if not begin:
            continue
        slot |= {"step": slot["step"] + report["before"], "began_s": begin - time_s, "took_s": None}
        if end:
            slot["took_s"] = end - begin
        messages.append(slot)
    summary = {
        "rank": report["rank"],
        "steps": report["steps"] + report["before"],
        "doing": report["doing"],
        "size": job["size"],
        "why": words,
        "began": job["began"],
    }
    with suppress(OSError):
        folder = Path(job["flight"])
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        temporary = folder / f"{job['rank']}.{os.getpid()}"
        with temporary.open("x") as file:  # another user's link at either name is not followed
            json.dump(summary | {"messages": messages}, file, indent=1)
        temporary.replace(folder / f"rank_{job['rank']}.json")
        return True
    return False
