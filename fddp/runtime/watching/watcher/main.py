"""The main loop of a watcher, the separate process for each rank that `watchdog.py` starts.

A watcher reads the records of its rank (`shared_memory.py`) and reports to the watcher of rank 0,
which judges (`verdicts.py`). It ends its rank when the job must end. A stopped, debugged or killed
rank cannot silence it, because they share no interpreter. Watchers exchange lines of JSON.

Source: PyTorch's NCCL watchdog; the monitor process of NVIDIA's resiliency extension.
"""

import os
import signal
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from .links import (
    EVERY_S,
    SEND_S,
    Links,
    allow_files,
    lines,
    send,
    wait_for_others,
    wait_readable,
    write_stderr,
)
from .rank import WatchedRank
from .shared_memory import FAILED, PROPOSAL, VERDICT
from .verdicts import Verdict, judge, judge_alone, unheard

STOP_S = 1.5  # seconds until all ranks have received a proposed stop
LEAST_S = 1e-3  # least seconds of a step when `STOP_S` is converted to steps
LAST_S = 5.0  # seconds for which the watcher of a dead rank waits for rank 0's verdict


def main(job: dict[str, Any]) -> None:
    """Watches a rank until it has ended; `watchdog.watched` makes `job`."""
    # A launcher that ends the job signals all its processes, and the watchers must report last.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    # A higher priority, to detect the first death first. Not every user may raise it.
    with suppress(OSError):
        os.nice(-10)
    allow_files(job["size"])  # rank 0's watcher has a link for each rank
    links: Links = {socket.socket(fileno=number): bytearray() for number in job["links"]}
    for link in links:
        link.settimeout(SEND_S)
    watch = Watch(job, job["rank"], WatchedRank(job), links)
    while not _has_ended(watch):
        received = _hear(watch)
        if watch.own["left"]:  # rank 0's watcher only waits until all other ranks have left
            continue
        own_verdict = _judge(watch)
        _report(watch)
        for verdict in filter(None, [*received, own_verdict]):
            _tell(watch, verdict)
            if verdict.end:
                return _end(watch, abort=watch.rank == 0 or bool(own_verdict))
    if watch.own["doing"] == FAILED and watch.own["steps"]:
        # The other ranks failed by its end before a verdict.
        watch.watched.record(watch.own, f"rank {watch.rank} failed")
    return None


class Stop(NamedTuple):
    """Number of the `stops` call at which all ranks stop, 0 for none; `settled` once all agree."""

    step: int
    settled: bool


@dataclass
class Watch:
    """A watched rank, and the state of its watcher."""

    job: Mapping[str, Any]
    rank: int
    watched: WatchedRank
    links: Links
    born: float = field(default_factory=time.monotonic)
    now: float = 0.0
    """Time of the last check."""
    own: dict[str, Any] = field(default_factory=dict)
    reports: dict[int, dict[str, Any]] = field(default_factory=dict)
    """Rank → last received report."""
    spoke: dict[socket.socket, float] = field(default_factory=dict)
    """Link → time of its last message."""
    stop: Stop = field(default=Stop(0, False))
    said: str = ""
    """Text of the last verdict for the rank."""
    sent: float = 0.0
    """Time of the last report to other watchers."""
    told_death: bool = False
    """True after the report of the rank's end."""


def _hear(watch: Watch) -> list[Verdict]:
    """Waits briefly for messages or the rank's end; returns the received verdicts."""
    readable = wait_readable([*watch.watched.ends, *watch.links], EVERY_S)
    time_s = watch.now = time.monotonic()
    verdicts = list[Verdict]()
    for link in [link for link in watch.links if link in readable]:
        for line in lines(link, watch.links):
            watch.spoke[link] = time_s
            if "words" in line:
                verdicts.append(Verdict(line["words"], line["end"]))
            elif "step" in line:
                watch.stop = Stop(line["step"], line["settled"])
            elif "rank" in line:
                if line["gone"] is not None:
                    line["gone"] = time_s - line["gone"]
                watch.reports[line["rank"]] = line | {"heard": time_s}
    watch.own = watch.reports[watch.rank] = watch.watched.report() | {"heard": time_s}
    return verdicts


def _judge(watch: Watch) -> Verdict | None:
    """Judges all ranks on rank 0; other watchers judge if rank 0 is silent."""
    stall_s = watch.job["stall_s"]
    verdict = None
    if watch.rank:
        last_heard = max(watch.spoke.values(), default=watch.born)
        verdict = judge_alone(watch.own, last_heard, watch.now, stall_s, met=bool(watch.spoke))
    else:
        ranks = range(watch.job["size"])
        silent = {rank: unheard(rank, watch.own, watch.born, met=False) for rank in ranks}
        if len(watch.reports) == len(ranks) or watch.now > watch.born + LAST_S:
            verdict = judge(silent | watch.reports, watch.now, stall_s)
        watch.stop = stop_of(watch.reports, watch.stop)
    PROPOSAL.write(watch.watched.memory, *watch.stop)
    return verdict


def _report(watch: Watch) -> None:
    """Sends the rank's report to rank 0's watcher, which sends the proposed stop to all."""
    # At once when the rank has ended, else seldom: replies to every line would occupy the watchers.
    end_s = watch.own["gone"]
    if watch.now <= watch.sent + EVERY_S and (not end_s or watch.told_death):
        return
    line = watch.stop._asdict()
    if watch.rank:
        line = dict(watch.own)
        if end_s is not None:
            line["gone"] = watch.now - end_s  # clocks of hosts differ: the age is equal on all
    send(watch.links, line)
    watch.sent = watch.now
    watch.told_death = bool(end_s)


def _tell(watch: Watch, verdict: Verdict) -> None:
    """Writes a verdict to the rank and to stderr, once; rank 0 first sends it to all watchers."""
    if not watch.rank:
        send(watch.links, verdict._asdict())
    # The end of a job also ends finished ranks.
    concerned = not watch.own["done"] or (verdict.end and not watch.own["gone"])
    if concerned and verdict.words != watch.said:
        watch.said = verdict.words
        VERDICT.write(watch.watched.memory, False, verdict.words)
        write_stderr(f"rank {watch.rank} of {watch.job['size']}: {verdict.words}.")


def _end(watch: Watch, *, abort: bool) -> None:
    """Ends the rank, rank 0 last, and reports to mpiexec."""
    job = watch.job
    patience = 2 * job["grace_s"]
    if watch.rank == 0:
        # JAX's service ends with rank 0, and without it the others would end with JAX's messages.
        near = {
            link: buffer
            for link, buffer in watch.links.items()
            if watch.spoke.get(link, watch.now) > watch.now - patience
        }
        wait_for_others(near, patience)
        if watch.watched.record(watch.own, watch.said):
            write_stderr(
                f"`python -m fddp flight {job['flight']}` shows the last messages of each rank."
            )
    watch.watched.end(watch.own, watch.said)
    watch.watched.leave_last(watch.links, patience, abort=abort)


def _has_ended(watch: Watch) -> bool:
    """True once the rank has ended or left; rank 0's watcher also waits for all links to close."""
    end_s = watch.own.get("gone")
    # The watcher of a failed rank awaits rank 0's verdict, to save the messages of a single
    # failure.
    expects = watch.links and watch.own.get("doing") == FAILED
    over = end_s and ((watch.own["done"] and not expects) or watch.now > end_s + LAST_S)
    reports = watch.reports.values()
    all_over = len(reports) == watch.job["size"] and all(
        report["done"] and report["gone"] for report in reports
    )
    return all_over or (bool(watch.own.get("left") or over) and (watch.rank > 0 or not watch.links))


def stop_of(reports: Mapping[int, Mapping[str, Any]], stop: Stop) -> Stop:
    """Makes the watchers' next proposal from the ranks' answers to the last."""
    active = [report for report in reports.values() if not report["done"]]
    if stop.settled or not any(report["told"] for report in active):
        return stop
    if stop.step and all(report["agreed"] == stop.step for report in active):
        return Stop(stop.step, True)
    if stop.step and not any(report["agreed"] == -stop.step for report in active):
        return stop
    # No rank may reach the call before all have received the proposal.
    ahead = max(STOP_S / max(report["between_s"], LEAST_S) for report in active)
    return Stop(max(report["asks"] for report in active) + 1 + int(ahead), False)
