"""The process beside each rank that watches it: started by `watchdog.py`.

It reads what its rank writes down (`fddp.comm.journal`) and tells that to the watcher of rank 0, which judges
(`verdicts.py`, `remarks.py`). It ends its rank when the job is to end. It shares no interpreter with its rank, so that
a rank that is stopped, held in a debugger or killed cannot silence it. Watchers exchange lines of JSON, and listen only
to those that know the job's token.

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

STOP_S = 1.5  # so long until all ranks have heard where they are to stop
LEAST_S = 1e-3  # for which a step counts at least, to find out how many steps that is
LAST_S = 5.0  # so long the watcher of a rank that died waits for the verdict of the others


def main(job: dict[str, Any]) -> None:
    """Watches until its rank has ended.

    Args:
      job: where the journal lies and how, who the others are, and how long a stall is.
    """
    # Whoever ends a job signals all its processes, and the watchers are to have the last word.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    with suppress(OSError):  # a higher priority, so that the first death is seen first; not every user may ask for it
        os.nice(-10)
    memory = mmap(job["memory"], job["bytes"])
    rank = job["rank"]
    read = reader(memory, job)
    died = death(job["parent"])
    door, links = meet(memory, job)
    ears = [*([door] if door else []), *pidfd(job["parent"])]
    reports: dict[int, dict[str, Any]] = {}
    spoke = dict[socket.socket, float]()
    said = ""
    before = None
    sent = 0.0
    stop = Stop(0, False)
    remarked = set[str]()
    born = time.monotonic()
    while True:
        ready, _, _ = select.select([*ears, *links], [], [], EVERY_S)
        if door and door in ready:
            welcome(door, links, job["token"])
        now = time.monotonic()
        verdicts = list[Any]()
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
        # A watcher does not answer every line, or it would do nothing else.
        if news or now > sent + EVERY_S:
            # Hosts have clocks of their own: how long ago it was is the same on all.
            ago = None if own["gone"] is None else now - own["gone"]
            send(links, own | {"gone": ago} if rank else stop._asdict())
            sent = now
            before = own["gone"]
        for verdict in [] if rank else verdicts:
            send(links, verdict)
        for verdict in verdicts:
            concerned = not own["done"] or (verdict["end"] and not own["gone"])  # one that has finished is ended too
            if concerned and verdict["words"] != said:
                said = verdict["words"]
                tell(memory, job, said, end=False)
                say(f"rank {rank} of {job['size']}: {said}.")
            if verdict["end"]:
                # Rank 0 ends last: it holds JAX's service, without which the others would end with messages of JAX's.
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
    """The step after which all ranks stop, 0 if none was told to; and whether all have agreed."""

    step: int
    settled: bool


def stop_of(reports: Mapping[int, Mapping[str, Any]], stop: Stop) -> Stop:
    """Makes the watchers' next proposal, from the ranks' answers to the last one."""
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
