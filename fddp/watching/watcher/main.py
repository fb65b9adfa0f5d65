"""The process beside each rank that watches it: started by `watchdog.py`.

It reads what its rank writes down (`shared_memory.py`) and tells that to the watcher of rank 0, which judges
(`verdicts.py`, `remarks.py`). It ends its rank when the job is to end. It shares no interpreter with its rank, so that
a rank that is stopped, held in a debugger or killed cannot silence it. Watchers exchange lines of JSON, and listen only
to those that know the job's token.

Source: PyTorch's NCCL watchdog; the monitor process of NVIDIA's resiliency extension.
"""

import os
import resource
import signal
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from mmap import mmap
from typing import Any, NamedTuple

from .links import EVERY_S, Links, lines, meet, ready, say, send, wait_for_others, welcome
from .mpiexec import leave_last
from .rank import death, end, pidfd, reader
from .remarks import remarks
from .shared_memory import FAILED, PROPOSAL, SIZE, VERDICT
from .verdicts import Verdict, judge, judge_alone, unheard

STOP_S = 1.5  # so long until all ranks have heard where they are to stop
LEAST_S = 1e-3  # for which a step counts at least, to find out how many steps that is
LAST_S = 5.0  # so long the watcher of a rank that died waits for the verdict of the others


def main(job: dict[str, Any]) -> None:
    """Watches until its rank has ended.

    Args:
      job: where the journal lies, who the others are, and how long a stall is.
    """
    # Whoever ends a job signals all its processes, and the watchers are to have the last word.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    with suppress(OSError):  # a higher priority, so that the first death is seen first; not every user may ask for it
        os.nice(-10)
    with suppress(OSError, ValueError):  # rank 0's has a link for each rank
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    memory = mmap(job["memory"], SIZE)
    process = job["parent"]
    watch = Watch(job, job["rank"], memory, reader(memory, job), death(process), pidfd(process), *meet(memory, job))
    while not _has_ended(watch):
        heard = _hear(watch)
        if watch.own["left"]:  # then rank 0's watcher only stays until the others have gone
            continue
        own = _judge(watch)
        _report(watch)
        for verdict in [*heard, *own]:
            _tell(watch, verdict)
            if verdict.end:
                return _end(watch, abort=watch.rank == 0 or bool(own))
    return None


class Stop(NamedTuple):
    """The step after which all ranks stop, 0 if none was told to; and whether all have agreed."""

    step: int
    settled: bool


@dataclass
class Watch:
    """A rank that is watched, and what its watcher has heard and said so far."""

    job: Mapping[str, Any]
    rank: int
    memory: mmap
    read: Callable[[], dict[str, Any]]
    """Reads what the rank wrote down."""
    died: Callable[[], float | None]
    """Tells when the rank ended."""
    ends: list[int]
    """A file that becomes ready when the rank ends."""
    door: socket.socket | None
    """The socket at which the other watchers come in, on rank 0."""
    links: Links
    """The connections to the other watchers."""
    born: float = field(default_factory=time.monotonic)
    now: float = 0.0
    """The time of the last look."""
    own: dict[str, Any] = field(default_factory=dict)
    """The rank's last report."""
    reports: dict[int, dict[str, Any]] = field(default_factory=dict)
    """The last report of each rank that was heard."""
    spoke: dict[socket.socket, float] = field(default_factory=dict)
    """The time at which each link was heard last."""
    stop: Stop = field(default=Stop(0, False))
    remarked: set[str] = field(default_factory=set)
    """The subjects on which remarks were made."""
    said: str = ""
    """The last verdict that the rank was told."""
    sent: float = 0.0
    """The time at which the other watchers were told something last."""
    told_death: bool = False
    """Whether they know that the rank has ended."""


def _hear(watch: Watch) -> list[Verdict]:
    """Waits until a watcher speaks or the rank ends, not for long; returns the verdicts that were heard."""
    moved = ready([*filter(None, [watch.door]), *watch.ends, *watch.links], EVERY_S)
    if watch.door and watch.door in moved:
        welcome(watch.door, watch.links, watch.job["token"])
    now = watch.now = time.monotonic()
    verdicts = list[Verdict]()
    for link, line in [(one, line) for one in list(watch.links) if one in moved for line in lines(one, watch.links)]:
        watch.spoke[link] = now
        if "words" in line:
            verdicts.append(Verdict(line["words"], line["end"]))
        elif "step" in line:
            watch.stop = Stop(line["step"], line["settled"])
        elif "rank" in line:
            gone = None if line["gone"] is None else now - line["gone"]
            watch.reports[line["rank"]] = line | {"heard": now, "gone": gone}
    watch.own = watch.reports[watch.rank] = watch.read() | {"gone": watch.died(), "heard": now}
    watch.ends = [] if watch.own["gone"] else watch.ends
    return verdicts


def _judge(watch: Watch) -> list[Verdict]:
    """Judges its own rank, if rank 0 is silent; on rank 0 all ranks, with remarks, each of which is made once."""
    stall_s = watch.job["stall_s"]
    verdicts = list[Verdict]()
    if watch.rank:
        heard = max(watch.spoke.values(), default=watch.born)
        found = judge_alone(watch.own, heard, watch.now, stall_s, met=bool(watch.spoke))
    else:
        every = range(watch.job["size"])
        silent = {rank: unheard(rank, watch.own, watch.born, met=False) for rank in every}
        all_here = len(watch.reports) == len(every) or watch.now > watch.born + LAST_S
        found = judge(silent | watch.reports, watch.now, stall_s) if all_here else None
        watch.stop = stop_of(watch.reports, watch.stop)
        new = {about: words for about, words in remarks(watch.reports).items() if about not in watch.remarked}
        verdicts += [Verdict(words, False) for words in new.values()]
        watch.remarked |= set(new)
    PROPOSAL.write(watch.memory, *watch.stop)
    return [*verdicts, *([found] if found else [])]


def _report(watch: Watch) -> None:
    """Tells rank 0 of the own rank, or all others where ranks stop: at once if the rank has ended, else now and then.

    A watcher does not answer every line, or it would do nothing else.
    """
    gone = watch.own["gone"]
    if watch.now <= watch.sent + EVERY_S and (not gone or watch.told_death):
        return
    # Hosts have clocks of their own: how long ago it was is the same on all.
    ago = None if gone is None else watch.now - gone
    send(watch.links, watch.own | {"gone": ago} if watch.rank else watch.stop._asdict())
    watch.sent = watch.now
    watch.told_death = bool(gone)


def _tell(watch: Watch, verdict: Verdict) -> None:
    """Passes a verdict on: rank 0 to the other watchers, each to its own rank and its person, once."""
    if not watch.rank:
        send(watch.links, verdict._asdict())
    # A rank that has finished is ended, too.
    concerned = not watch.own["done"] or (verdict.end and not watch.own["gone"])
    if concerned and verdict.words != watch.said:
        watch.said = verdict.words
        VERDICT.write(watch.memory, False, verdict.words)
        say(f"rank {watch.rank} of {watch.job['size']}: {verdict.words}.")


def _end(watch: Watch, *, abort: bool) -> None:
    """Ends the rank, and tells mpiexec.

    Rank 0 ends last: it holds JAX's service, without which the others would end with messages of JAX's.
    """
    job = watch.job
    patience = 2 * job["grace_s"]
    if watch.rank == 0:
        near = {x: links for x, links in watch.links.items() if watch.spoke.get(x, watch.now) > watch.now - patience}
        wait_for_others(near, patience)
        say(f"`python -m fddp flight {job['flight']}` tells what each rank sent last.")
    end(watch.memory, job, watch.own, watch.said, watch.died)
    leave_last(job["pmi_fd"], watch.links, patience, abort=abort)


def _has_ended(watch: Watch) -> bool:
    """Whether its rank has ended or left, and rank 0's watcher has no other to wait for."""
    gone = watch.own.get("gone")
    # The watcher of a rank that failed records its messages if rank 0 finds that it failed alone.
    expects = watch.links and watch.own.get("doing") == FAILED
    over = gone and ((watch.own["done"] and not expects) or watch.now > gone + LAST_S)
    reports = watch.reports.values()
    all_over = len(reports) == watch.job["size"] and all(one["done"] and one["gone"] for one in reports)
    return all_over or (bool(watch.own.get("left") or over) and (watch.rank > 0 or not watch.links))


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
