"""Starts the ranks of a job, ends all when one fails, and restarts them on the remaining hosts.

The script itself resumes from its newest checkpoint (`fddp.Checkpoints`). Schedulers with their own
restarts (Slurm's requeue, Kubernetes' JobSet) do not need this.

Source: torchrun, `torch.distributed.run`.
"""

import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain, compress

from fddp.comm import SECRET, new_secret
from fddp.runtime.children import (
    LOOK_S,
    collect_signals,
    cores_for,
    describe_end,
    drain,
    exit_code,
    exit_status,
    kill_groups,
    print_line,
    shown,
)
from fddp.runtime.launchers import worlds

# From schedulers: the ranks save their state, in any time.
WARNING = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
ENDING = (*WARNING, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
END_S = 10.0  # the watchers end a job sooner
ANSWER_S = 10.0
# Replaces its process by the command. Linux kills it when the parent ends, even by SIGKILL.
WITH_PARENT = """
import ctypes, os, signal, sys
parent, *command = sys.argv[1:]
libc = ctypes.CDLL(None)
if hasattr(libc, "prctl"):
    libc.prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
if os.getppid() == int(parent):
    os.execvp(command[0], command)
"""
PAUSE_S = 1.0  # before a restart: the resources of a dead host are released


@dataclass(frozen=True)
class Job:
    """A command and its ranks."""

    command: Sequence[str]
    """The script and its arguments."""
    ranks: int
    hosts: Sequence[str] = ()
    """Hosts, with equally many ranks each; empty: this host."""
    restarts: int = 0
    least: int = 1
    """Minimum number of ranks for a restart; with --elastic, for going on."""
    mpiexec: tuple[str, str | None] | None = None
    """The launcher and its vendor; None: child processes, which find each other by `FDDP_*`."""

    def __post_init__(self) -> None:
        if self.ranks < 1 or not 1 <= self.least <= self.ranks:
            raise ValueError(
                f"-n must be 1 or more and --min from 1 to it, got -n {self.ranks} and "
                f"--min {self.least}."
            )
        if self.restarts < 0:
            raise ValueError(f"--restarts must be 0 or more, got {self.restarts}.")
        if self.hosts and self.mpiexec is None:
            raise ValueError(
                "--hosts needs an mpiexec, which starts the ranks there: install MPICH or Open MPI."
            )
        if options := [host for host in self.hosts if host.startswith("-")]:
            raise ValueError(
                f"--hosts takes names of hosts, got {options[0]!r}, which ssh would take for an "
                "option."
            )
        if self.hosts and self.ranks % len(self.hosts):
            raise ValueError(
                f"-n must be a multiple of the {len(self.hosts)} hosts, got {self.ranks}."
            )

    def on(self, hosts: Sequence[str]) -> int:
        """The number of its ranks on some of its hosts."""
        if not self.hosts:
            return self.ranks
        return self.ranks // len(self.hosts) * len(hosts)


def supervise(job: Job) -> int:
    """Runs a job with its restarts; returns 0, or the status of the last run's first failure."""
    hosts = list(job.hosts)
    env = dict(os.environ)
    with (
        tempfile.TemporaryDirectory(prefix="fddp-run-") as folder,
        collect_signals(*ENDING) as signals,
    ):
        if job.restarts:  # a restart reuses compiled programs
            env.setdefault("JAX_COMPILATION_CACHE_DIR", folder)
        restart = 0
        while True:
            code, words = _run(job, hosts, env, signals)
            if code == 0 or signals:
                return code
            restart += 1
            if restart > job.restarts:
                print_line(f"{words}{', and all restarts are used up' * bool(job.restarts)}.")
                return code
            with ThreadPoolExecutor(max(1, len(hosts))) as pool:
                hosts = list(compress(hosts, pool.map(_answers, hosts)))
            ranks = job.on(hosts)
            if ranks < job.least:
                print_line(
                    f"{words}, and with {ranks} ranks on the hosts that answer it is not started "
                    "again."
                )
                return code
            print_line(f"{words}: restart {restart} of {job.restarts}, with {ranks} ranks.")
            time.sleep(PAUSE_S)
            if signals:
                return code


### One run


def _run(
    job: Job, hosts: Sequence[str], env: Mapping[str, str], signals: list[int]
) -> tuple[int, str]:
    """Returns the exit status, 0 or that of the first failed process, and the end in words."""
    command, variables = job.command, worlds(job.ranks)
    if job.mpiexec:
        command, variables = by_mpiexec(job, hosts), [{SECRET: env.get(SECRET) or new_secret()}]
    processes = list[subprocess.Popen[bytes]]()
    readers = list[threading.Thread]()
    ending = threading.Event()
    try:
        for rank, world in enumerate(variables):
            processes.append(start_process(command, {**env, **world}))
            prefix = f"[{rank}] " * (len(variables) > 1)
            readers += shown(processes[-1], prefix, ending)
        first = _wait(processes, signals, ending)
    finally:
        kill(processes)
    drain(readers, END_S, signals)  # a watcher may outlive its rank, and prints last
    if first is None:
        return 0, "all ranks ended"
    code = processes[first].returncode
    name = "the job" if job.mpiexec else f"rank {first}"
    return exit_status(code), f"{name} ended {describe_end(code)}"


def kill(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Kills processes and their children, also those of ended ranks."""
    kill_groups(process.pid for process in processes)
    for process in processes:
        with suppress(subprocess.TimeoutExpired):  # another user's process is not killed
            process.wait(END_S)


def _wait(
    processes: Sequence[subprocess.Popen], signals: list[int], ending: threading.Event
) -> int | None:
    """Waits until all processes have ended; returns the first that failed by number, or None."""
    first = None
    deadline = float("inf")
    forwarded = 0
    term_time = float("inf")
    while True:
        codes = [exit_code(process.pid) for process in processes]
        failed = [k for k, code in enumerate(codes) if code]
        if first is None and failed:
            first = failed[0]
            deadline = time.monotonic() + END_S
        if None not in codes:
            return first
        if ending.is_set():
            term_time = min(term_time, time.monotonic() + 2 * END_S)
        if time.monotonic() > term_time and deadline == float("inf"):
            # An mpiexec may wait for ranks behind a broken link.
            forward(processes, signal.SIGTERM)
            deadline = time.monotonic() + END_S
        for number in signals[forwarded:]:  # a signal may arrive twice
            # The ranks' watchers report the death of a rank and not its reason.
            print_line(f"received {signal.Signals(number).name}, and sends it to the ranks.")
            forward(processes, number)
            if number not in WARNING:
                deadline = time.monotonic() + END_S
            forwarded += 1
        if time.monotonic() > deadline:
            kill_groups(process.pid for process in processes if exit_code(process.pid) is None)
        time.sleep(LOOK_S)


def by_mpiexec(job: Job, hosts: Sequence[str]) -> list[str]:
    """The words by which mpiexec starts the ranks of some hosts, and marks the lines of each."""
    vendor = job.mpiexec and job.mpiexec[1]
    options = ["-prepend-pattern", "\x1e%r\x1f"]
    if vendor == "Open MPI":
        options = ["--tag-output"]
    cores = cores_for(job.on(hosts) // max(1, len(hosts)))
    if vendor == "MPICH" and cores and "HYDRA_BINDING" not in os.environ:
        options += ["-bind-to", f"hwthread:{cores}"]
    return [*on_hosts(job, hosts, [SECRET]), *options, *job.command]


def on_hosts(job: Job, hosts: Sequence[str], exports: Iterable[str]) -> list[str]:
    """The words of mpiexec without a command; MPICH exports all variables, Open MPI `exports`."""
    program, vendor = job.mpiexec or ("mpiexec", None)
    ranks = job.on(hosts)
    words = [program, "-n", str(ranks)]
    if vendor == "Open MPI":
        words += chain.from_iterable(("-x", name) for name in exports)
        if hosts:
            words += ["--host", ",".join(f"{host}:{ranks // len(hosts)}" for host in hosts)]
    elif hosts:
        words += ["-hosts", ",".join(hosts), "-ppn", str(ranks // len(hosts))]
    return words


def start_process(command: Sequence[str], env: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Starts a command that ends with this process."""
    if shutil.which(command[0]) is None:
        raise ValueError(f"run: there is no command {command[0]!r} here.")
    # A new session: this process alone receives the signals of a terminal, and forwards them.
    return subprocess.Popen(
        [sys.executable, "-ISc", WITH_PARENT, str(os.getpid()), *command],
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )


def forward(processes: Sequence[subprocess.Popen[bytes]], number: int) -> None:
    """Sends a signal to the processes that run."""
    for process in processes:
        if exit_code(process.pid) is None:
            os.kill(process.pid, number)  # an mpiexec ends its ranks itself


def _answers(host: str) -> bool:
    """True for a host that mpiexec's ssh command reaches."""
    if host in ("localhost", "127.0.0.1", socket.gethostname()):
        return True
    ssh = shlex.split(os.environ.get("HYDRA_LAUNCHER_EXEC", "ssh -o BatchMode=yes"))
    command = [*ssh, host, "true"]
    try:
        run = subprocess.run(command, stdin=subprocess.DEVNULL, timeout=ANSWER_S)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return run.returncode == 0
