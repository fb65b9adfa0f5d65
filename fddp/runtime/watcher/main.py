"""The process beside each rank that watches it: started by `watchdog.py`.

It reads what its rank writes down (`fddp.comm.journal`), tells it to the watcher of rank 0, which judges
(`verdicts.py`, `remarks.py`), and ends its rank when the job is to end. It shares no interpreter with its rank, so that
a rank that is stopped, held in a debugger or killed cannot silence it. Lines of JSON travel, to who knows the job's
token.

Source: PyTorch's NCCL watchdog; the monitor process of NVIDIA's resiliency extension.
"""

import os
import select
import signal
import socket
import struct
import time
from collections.abc import Mapping
from contextlib import suppress
from mmap import mmap
from typing import Any, NamedTuple

from .links import EVERY_S, lines, meet, say, send, wait_for_others, welcome
from .mpiexec import leave_last
from .rank import death, end, pidfd, put, reader, tell
from .remarks import remarks
from .verdicts import Verdict, judge, judge_alone, unheard

STOP_S, LEAST_S = 1.5, 1e-3  # so long until all have heard where they are to stop, if a step takes no less than this
LAST_S = 5.0  # so long the watcher of a rank that died waits for what the others' say of it


def main(job: dict[str, Any]) -> None:
    """Watches until its rank has ended.

    Args:
      job: where the journal lies and how, who the others are, and how long a stall is.
    """
    # Who ends a job signals all that belongs to it, and the last word is the watchers'.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    with suppress(OSError):  # who dies first is seen by who wakes first; not every user may ask for it
        os.nice(-10)
    memory, rank = mmap(job["memory"], job["bytes"]), job["rank"]
    read, died = reader(memory, job), death(job["parent"])
    door, links = meet(memory, job)
    ears = [*([door] if door else []), *pidfd(job["parent"])]
    reports: dict[int, dict[str, Any]] = {}
    spoke = dict[socket.socket, float]()
    said, before, sent, stop, remarked = "", None, 0.0, Stop(0, False), set[str]()
    born = time.monotonic()
    while True:
        ready, _, _ = select.select([*ears, *links], [], [], EVERY_S)
        if door and door in ready:
            welcome(door, links, job["token"])
        now, verdicts = time.monotonic(), list[Any]()
        for link, line in [(one, line) for one in list(links) if one in ready for line in lines(one, links)]:
            spoke[link] = now
            if "words" in line:
                verdicts.append(line)
            elif "step" in line:
                stop = Stop(line["step"], line["settled"])
            elif "rank" in line:
                gone = None if line["gone"] is None else now - line["gone"]
                reports[line["rank"]] = line | {"heard": now, "gone": gone}
        own = reports[rank] = read() | {"gone": died(), "heard": now}
        ears = ears[: bool(door)] if own["gone"] else ears
        if own["left"]:
            if rank or not links:
                return None
            continue
        all_here = len(reports) == job["size"] or now > born + LAST_S
        if rank:
            found = judge_alone(own, max(spoke.values(), default=born), now, job["stall_s"], met=bool(spoke))
        else:
            silent = {other: unheard(other, own, born, met=False) for other in range(job["size"])}
            found = judge(silent | reports, now, job["stall_s"]) if all_here else None
            stop = stop_of(reports, stop)
            for about, words in remarks(reports).items():
                verdicts += [] if about in remarked else [Verdict(words, False)._asdict()]
                remarked.add(about)
        put(memory, job["proposed"], struct.pack(job["proposal"], *stop))
        verdicts += [found._asdict()] if found else []
        news = own["gone"] and not before
        # Not to every line an answer, or the watchers would do nothing else.
        if news or now > sent + EVERY_S:
            # Hosts have clocks of their own: how long ago is the same on all.
            ago = None if own["gone"] is None else now - own["gone"]
            send(links, own | {"gone": ago} if rank else stop._asdict())
            sent, before = now, own["gone"]
        for verdict in [] if rank else verdicts:
            send(links, verdict)
        for verdict in verdicts:
            concerned = not own["done"] or (verdict["end"] and not own["gone"])  # one that has finished is ended too
            if concerned and verdict["words"] != said:
                said = verdict["words"]
                tell(memory, job, said, end=False)
                say(f"rank {rank} of {job['size']}: {said}.")
            if verdict["end"]:
                # Rank 0 last: on JAX's service, which it holds, the others' processes would end in words of their own.
                patience = 2 * job["grace_s"]
                near = {link: links[link] for link in links if spoke.get(link, now) > now - patience}
                wait_for_others({} if rank else near, patience)
                if rank == 0:
                    say(f"`python -m fddp flight {job['flight']}` tells what each rank sent last.")
                end(memory, job, own, said, died)
                return leave_last(job["pmi_fd"], links, patience, abort=rank == 0 or found is not None)
        over = own["gone"] and (own["done"] or now > own["gone"] + LAST_S)
        if over and (rank or not links):
            return None


class Stop(NamedTuple):
    """After which step all ranks stop: 0 if nobody was told to; and whether all have agreed."""

    step: int
    settled: bool


def stop_of(reports: Mapping[int, Mapping[str, Any]], stop: Stop) -> Stop:
    """What the watchers propose, from what the ranks have answered to the last proposal."""
    going = [one for one in reports.values() if not one["done"]]
    if stop.settled or not any(one["told"] for one in going):
        return stop
    if stop.step and all(one["agreed"] == stop.step for one in going):
        return Stop(stop.step, True)
    if stop.step and not any(one["agreed"] == -stop.step for one in going):
        return stop
    # No rank is to reach it before all have heard of it.
    ahead = max(STOP_S / max(one["between_s"], LEAST_S) for one in going)
    return Stop(max(one["asks"] for one in going) + 1 + int(ahead), False)
