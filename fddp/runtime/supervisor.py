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
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from typing import NamedTuple

from fddp.comm import SECRET, new_secret
from fddp.runtime.launchers import worlds
from fddp.runtime.mpi_vendors import launchers
from fddp.runtime.output import print_line, shown
from fddp.runtime.signals import collect_signals

LOOK_S = 0.05
ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)  # from a scheduler, or from the keyboard
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
    """Number of processes."""
    hosts: Sequence[str] = ()
    """Hosts, with equally many ranks each; empty: this host."""
    restarts: int = 0
    """Maximum number of restarts."""
    least: int = 1
    """Minimum number of ranks for a restart."""
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
        return self.ranks // len(self.hosts) * len(hosts) if self.hosts else self.ranks


class Ended(NamedTuple):
    """The end of a run."""

    code: int
    """Exit status: 0, or that of the first failed process."""
    words: str


def supervise(job: Job) -> int:
    """Runs a job with its restarts; returns 0, or the status of the last run's first failure."""
    hosts = list(job.hosts)
    with (
        tempfile.TemporaryDirectory(prefix="fddp-run-") as folder,
        collect_signals(*ENDING) as signals,
    ):
        # A restart reuses compiled programs.
        env = (
            {"JAX_COMPILATION_CACHE_DIR": folder} | os.environ if job.restarts else dict(os.environ)
        )
        for start in count():
            outcome = _run(job, hosts, env, signals)
            if outcome.code == 0 or signals:
                return outcome.code
            if start == job.restarts:
                print_line(
                    f"{outcome.words}{', and all restarts are used up' if job.restarts else ''}."
                )
                return outcome.code
            hosts = [host for host, reachable in zip(hosts, _answer(hosts)) if reachable]
            ranks = job.on(hosts)
            if ranks < job.least:
                print_line(
                    f"{outcome.words}, and with {ranks} ranks on the hosts that answer it is not "
                    "started again."
                )
                return outcome.code
            print_line(
                f"{outcome.words}: restart {start + 1} of {job.restarts}, with {ranks} ranks."
            )
            time.sleep(PAUSE_S)
            if signals:
                return outcome.code
    raise AssertionError("count never ends")


def launcher(vendor: str | None = None) -> tuple[str, str | None] | None:
    """The mpiexec of this installation and its vendor; None without one."""
    return next(launchers(vendor), None)


### One run


def _run(job: Job, hosts: Sequence[str], env: Mapping[str, str], signals: list[int]) -> Ended:
    """Starts all ranks and waits for their end."""
    commands = [_by_mpiexec(job, hosts)] if job.mpiexec else [list(job.command)] * job.ranks
    variables = [{SECRET: env.get(SECRET) or new_secret()}] if job.mpiexec else worlds(job.ranks)
    processes = list[subprocess.Popen[bytes]]()
    prefixes = (
        [""] if job.mpiexec or job.ranks == 1 else [f"[{rank}] " for rank in range(job.ranks)]
    )
    try:
        for command, world in zip(commands, variables):
            processes.append(_start(command, {**env, **world}))
        ending = threading.Event()
        readers = [
            thread
            for process, prefix in zip(processes, prefixes)
            for thread in shown(process, prefix, ending)
        ]
        first = _wait(processes, signals, ending)
    finally:
        for process in processes:  # also the children of ended ranks
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
        for process in processes:
            with suppress(subprocess.TimeoutExpired):  # another user's process is not killed
                process.wait(END_S)
    for reader in readers:
        reader.join(END_S)  # a watcher may outlive its rank, and prints last
    if first is None:
        return Ended(0, "all ranks ended")
    code = processes[first].returncode
    who = "the job" if job.mpiexec else f"rank {first}"
    how = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
    return Ended(128 - code if code < 0 else code, f"{who} ended {how}")


def _wait(
    processes: Sequence[subprocess.Popen], signals: list[int], ending: threading.Event
) -> int | None:
    """Waits until all processes have ended; returns the number of the first that failed, or None.

    Kills the processes some seconds after the first failure, and passes signals on to them.
    """
    first = None
    deadline = float("inf")
    forwarded = 0
    term_time = float("inf")
    while any(_exit_code(process) is None for process in processes):
        time.sleep(LOOK_S)
        if first is None:
            first = next((k for k, process in enumerate(processes) if _exit_code(process)), None)
            deadline = time.monotonic() + END_S if first is not None else deadline
        term_time = min(term_time, time.monotonic() + 2 * END_S) if ending.is_set() else term_time
        if time.monotonic() > term_time and deadline == float("inf"):
            # An mpiexec may wait for ranks behind a broken link.
            _signal(processes, signal.SIGTERM)
            deadline = time.monotonic() + END_S
        for number in signals[forwarded:]:  # a signal may arrive twice
            _signal(processes, number)
            deadline = time.monotonic() + END_S if number != signal.SIGTERM else deadline
        forwarded = len(signals)
        if time.monotonic() > deadline:
            _signal(processes, signal.SIGKILL)
    return (
        first
        if first is not None
        else next((k for k, process in enumerate(processes) if _exit_code(process)), None)
    )


def _exit_code(process: subprocess.Popen) -> int | None:
    """The exit code of a process, or None while it runs.

    Unlike `poll` it leaves the process a zombie, so that its number still names its group and no
    other process.
    """
    if process.returncode is not None:
        return process.returncode
    ended = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if ended is None:
        return None
    return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status


def _by_mpiexec(job: Job, hosts: Sequence[str]) -> list[str]:
    program, vendor = job.mpiexec or ("mpiexec", None)
    ranks = job.on(hosts)
    output_options = (
        ["--tag-output", "-x", SECRET]
        if vendor == "Open MPI"
        else ["-prepend-pattern", "\x1e%r\x1f"]
    )
    words = [program, "-n", str(ranks), *output_options]
    if hosts and vendor == "Open MPI":
        words += ["--host", ",".join(f"{host}:{ranks // len(hosts)}" for host in hosts)]
    elif hosts:
        words += ["-hosts", ",".join(hosts), "-ppn", str(ranks // len(hosts))]
    return [*words, *job.command]


def _start(command: Sequence[str], env: Mapping[str, str]) -> subprocess.Popen[bytes]:
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


def _signal(processes: Sequence[subprocess.Popen[bytes]], number: int) -> None:
    for process in processes:
        if _exit_code(process) is None:
            # mpiexec ends its ranks itself, but not after SIGKILL.
            process.send_signal(number) if number != signal.SIGKILL else os.killpg(
                process.pid, number
            )


### Hosts


def _answer(hosts: Sequence[str]) -> list[bool]:
    """Returns, for each host, True if mpiexec's ssh command reaches it."""
    with ThreadPoolExecutor(max(1, len(hosts))) as pool:
        return list(pool.map(_answers, hosts))


def _answers(host: str) -> bool:
    if host in ("localhost", "127.0.0.1", socket.gethostname()):
        return True
    ssh = shlex.split(os.environ.get("HYDRA_LAUNCHER_EXEC", "ssh -o BatchMode=yes"))
    try:
        return (
            subprocess.run(
                [*ssh, host, "true"], stdin=subprocess.DEVNULL, timeout=ANSWER_S
            ).returncode
            == 0
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
