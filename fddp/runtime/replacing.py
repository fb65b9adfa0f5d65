"""Starts the ranks of an elastic job, and starts a rank again when it fails.

The other ranks train on meanwhile (`fddp.elastic`).
"""

import json
import os
import subprocess
import tempfile
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from fddp.runtime.children import (
    LOOK_S,
    collect_signals,
    describe_end,
    drain,
    exit_code,
    exit_status,
    is_stopped,
    kill_groups,
    print_line,
    shown,
)
from fddp.runtime.launchers import worlds
from fddp.runtime.supervisor import (
    END_S,
    ENDING,
    PAUSE_S,
    WARNING,
    Job,
    forward,
    kill,
    on_hosts,
    start_process,
)

FOLDER = "FDDP_ELASTIC"  # names the folder in which ranks of this host find their job
FINISHED = "finished"  # a file there, once a rank has reached its end
MEMBERS = "members.json"  # a file there: the members that have the state, and their addresses
LOST = "lost"  # a folder there, with a file for each silent or stuck process
# A script that fails soon after each start has a fault of its own.
SOON_S = 60.0
ATTEMPTS = 3


def supervise_ranks(job: Job) -> int:
    """Runs an elastic job; returns 0 if a rank reached its end, else the last failure's status."""
    with (
        tempfile.TemporaryDirectory(prefix="fddp-run-") as folder,
        collect_signals(*ENDING) as signals,
    ):
        env = {**os.environ, FOLDER: folder}
        env.setdefault("JAX_COMPILATION_CACHE_DIR", folder)  # a new group compiles little
        ranks = _Ranks(job, env)
        try:
            return ranks.watch(signals)
        finally:
            kill([*ranks.running.values()])
            drain(ranks.readers, END_S, signals)


class _Ranks:
    """The ranks of a job."""

    def __init__(self, job: Job, env: Mapping[str, str]) -> None:
        self._job = job
        self._env = env
        self._worlds = worlds(job.ranks, job.hosts)
        self._due = dict.fromkeys(range(job.ranks), 0.0)  # rank → when to start it
        self.running = dict[int, subprocess.Popen[bytes]]()
        self._started_at = dict[int, float]()
        self.readers = list[threading.Thread]()
        self._restarts = 0
        self._silenced = set[int]()  # processes that `_end_lost` has ended
        self._stopped_at = dict[int, float]()  # when a signal has stopped a process
        self._quick_failures = dict.fromkeys(range(job.ranks), 0)

    def watch(self, signals: list[int]) -> int:
        """Starts ranks when they are due, until none runs."""
        code = 0
        forwarded = 0
        finished = False
        deadline = float("inf")
        while True:
            now = time.monotonic()
            for rank in [rank for rank, due in self._due.items() if due <= now]:
                self._start(rank, now)
            for rank, process in list(self.running.items()):
                status = exit_code(process.pid)
                if status is None:
                    continue
                kill_groups([process.pid])
                process.wait()
                del self.running[rank]
                if status == 0:
                    finished = True
                    Path(self._env[FOLDER], FINISHED).touch()
                else:
                    code = status
                    self._fail(rank, process.pid, status, again=not (finished or signals))
            if finished:
                self._due.clear()
                self._end_stopped(now)
            self._end_lost()
            if not self.running and (finished or code):  # the state has ended with the last rank
                return 0 if finished else exit_status(code)
            if code and not finished and not self._has_state():
                print_line("no rank with the state of the training is left.")
                return exit_status(code)
            if code and len(self.running) < self._job.least and not finished:
                print_line(f"fewer than {self._job.least} ranks run.")
                return exit_status(code)
            for number in signals[forwarded:]:
                self._due.clear()
                forward([*self.running.values()], number)
                if number not in WARNING:
                    deadline = min(deadline, now + END_S)
                forwarded += 1
            if now > deadline:
                kill_groups(process.pid for process in self.running.values())
            time.sleep(LOOK_S)

    def _end_lost(self) -> None:
        """Ends the processes of this host that other ranks report as silent or stuck."""
        for file in Path(self._env[FOLDER], LOST).glob("*-*-*"):
            file.unlink()
            rank, pid, _ = file.name.split("-")
            process = self.running.get(int(rank))
            if process and process.pid == int(pid):
                print_line(f"rank {rank} is silent or stuck: it is ended.")
                self._silenced.add(process.pid)
                kill_groups([process.pid])

    def _end_stopped(self, now: float) -> None:
        """Ends stopped processes once a rank has finished: others may have left before a report."""
        pids = [process.pid for process in self.running.values() if is_stopped(process.pid)]
        self._stopped_at = {pid: self._stopped_at.get(pid, now) for pid in pids}
        kill_groups(pid for pid, at in self._stopped_at.items() if now > at + END_S)

    def _has_state(self) -> bool:
        """False if all members have ended; those on other hosts are not known here."""
        file = Path(self._env[FOLDER], MEMBERS)
        if self._job.hosts or not file.exists():
            return True
        members = {int(uid.split("-")[1]) for _, uid, _ in json.loads(file.read_text())}
        return any(process.pid in members for process in self.running.values())

    def _start(self, rank: int, now: float) -> None:
        del self._due[rank]
        words = list(self._job.command)
        if hosts := self._job.hosts:
            host = hosts[rank * len(hosts) // self._job.ranks]
            job = replace(self._job, ranks=1, least=1, hosts=(host,))
            words = [*on_hosts(job, [host], [FOLDER, *self._worlds[rank]]), *words]
        process = start_process(words, {**self._env, **self._worlds[rank]})
        self.readers += shown(process, f"[{rank}] ", threading.Event())
        self.running[rank] = process
        self._started_at[rank] = now

    def _fail(self, rank: int, pid: int, status: int, *, again: bool) -> None:
        now = time.monotonic()
        soon = pid not in self._silenced and now - self._started_at[rank] < SOON_S
        self._quick_failures[rank] = self._quick_failures[rank] + 1 if soon else 0
        words = f"rank {rank} ended {describe_end(status)}"
        if self._quick_failures[rank] == ATTEMPTS:
            print_line(f"{words} soon after {ATTEMPTS} starts, and is not started again.")
        elif again and self._restarts < self._job.restarts:
            self._restarts += 1
            self._due[rank] = now + PAUSE_S
            print_line(f"{words}: it starts again, restart {self._restarts}.")
        else:
            print_line(f"{words}.")
