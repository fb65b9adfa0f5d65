"""Starts the ranks of a job, ends all when one fails, and starts them again, with the hosts that are left.

The script itself goes on where the job was, from its newest checkpoint (`fddp.Checkpoints`). Schedulers that start jobs
again by themselves (Slurm's requeue, Kubernetes' JobSet) do not need this.

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
from fddp.runtime.output import shown, tell
from fddp.runtime.signals import collected

LOOK_S = 0.05
ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)  # of a scheduler, or of the keyboard
END_S = 10.0  # the watchers of a job end it sooner
ANSWER_S = 10.0
# Runs the command in this process's place; Linux ends it with the process that started it, even by SIGKILL.
WITH_PARENT = """
import ctypes, os, signal, sys
parent, *command = sys.argv[1:]
libc = ctypes.CDLL(None)
if hasattr(libc, "prctl"):
    libc.prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
if os.getppid() == int(parent):
    os.execvp(command[0], command)
"""
PAUSE_S = 1.0  # between two starts: what a dead host held is let go


@dataclass(frozen=True)
class Job:
    """A command, and the ranks that run it."""

    command: Sequence[str]
    """The script and its arguments."""
    ranks: int
    """The number of processes."""
    hosts: Sequence[str] = ()
    """The hosts, with equally many ranks each; none: this host."""
    restarts: int = 0
    """The number of times that it may be started again."""
    least: int = 1
    """The fewest ranks with which it is started again."""
    mpiexec: tuple[str, str | None] | None = None
    """The launcher and its vendor; None: processes of our own, which find each other by `FDDP_*`."""

    def __post_init__(self) -> None:
        if self.ranks < 1 or not 1 <= self.least <= self.ranks:
            raise ValueError(
                f"-n must be 1 or more and --min from 1 to it, got -n {self.ranks} and --min {self.least}."
            )
        if self.restarts < 0:
            raise ValueError(f"--restarts must be 0 or more, got {self.restarts}.")
        if self.hosts and self.mpiexec is None:
            raise ValueError("--hosts needs an mpiexec, which starts the ranks there: install MPICH or Open MPI.")
        if options := [host for host in self.hosts if host.startswith("-")]:
            raise ValueError(f"--hosts takes names of hosts, got {options[0]!r}, which ssh would take for an option.")
        if self.hosts and self.ranks % len(self.hosts):
            raise ValueError(f"-n must be a multiple of the {len(self.hosts)} hosts, got {self.ranks}.")

    def on(self, hosts: Sequence[str]) -> int:
        """The number of ranks that it has on some of its hosts."""
        return self.ranks // len(self.hosts) * len(hosts) if self.hosts else self.ranks


class Ended(NamedTuple):
    """The end of a run."""

    code: int
    """0, or that of its first fault."""
    words: str


def supervise(job: Job) -> int:
    """Runs a job to its end.

    Args:
      job: what to run.

    Returns:
      The exit status: 0, or that of the first fault of the last run.
    """
    hosts = list(job.hosts)
    with tempfile.TemporaryDirectory(prefix="fddp-run-") as folder, collected(*ENDING) as told:
        # A restart need not compile programs again.
        env = {"JAX_COMPILATION_CACHE_DIR": folder} | os.environ if job.restarts else dict(os.environ)
        for start in count():
            ended = _run(job, hosts, env, told)
            if ended.code == 0 or told:
                return ended.code
            if start == job.restarts:
                tell(f"{ended.words}{', and all restarts are used up' if job.restarts else ''}.")
                return ended.code
            hosts = [host for host, there in zip(hosts, _answer(hosts)) if there]
            ranks = job.on(hosts)
            if ranks < job.least:
                tell(f"{ended.words}, and with {ranks} ranks on the hosts that answer it is not started again.")
                return ended.code
            tell(f"{ended.words}: restart {start + 1} of {job.restarts}, with {ranks} ranks.")
            time.sleep(PAUSE_S)
            if told:
                return ended.code
    raise AssertionError("count never ends")


def launcher(vendor: str | None = None) -> tuple[str, str | None] | None:
    """The mpiexec of this installation and its vendor, if there is one."""
    return next(launchers(vendor), None)


### One run


def _run(job: Job, hosts: Sequence[str], env: Mapping[str, str], told: list[int]) -> Ended:
    """Starts all ranks and waits for their end."""
    commands = [_by_mpiexec(job, hosts)] if job.mpiexec else [list(job.command)] * job.ranks
    variables = [{SECRET: env.get(SECRET) or new_secret()}] if job.mpiexec else worlds(job.ranks)
    processes = list[subprocess.Popen[bytes]]()
    prefixes = [""] if job.mpiexec or job.ranks == 1 else [f"[{rank}] " for rank in range(job.ranks)]
    try:
        for command, world in zip(commands, variables):
            processes.append(_start(command, {**env, **world}))
        ending = threading.Event()
        readers = [one for process, prefix in zip(processes, prefixes) for one in shown(process, prefix, ending)]
        first = _wait(processes, told, ending)
    finally:
        for process in processes:  # also what a rank that is gone has started itself
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
    for reader in readers:
        reader.join(END_S)  # a watcher may outlive its rank, and has the last word
    if first is None:
        return Ended(0, "all ranks ended")
    code = processes[first].returncode
    who = "the job" if job.mpiexec else f"rank {first}"
    how = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
    return Ended(128 - code if code < 0 else code, f"{who} ended {how}")


def _wait(processes: Sequence[subprocess.Popen], told: list[int], ending: threading.Event) -> int | None:
    """Waits until all have ended, and ends them when one has failed; returns the first that failed, or None."""
    first = None
    until = float("inf")
    passed = 0
    stays = float("inf")
    while any(process.poll() is None for process in processes):
        time.sleep(LOOK_S)
        if first is None:
            first = next((k for k, process in enumerate(processes) if process.poll()), None)
            until = time.monotonic() + END_S if first is not None else until
        stays = min(stays, time.monotonic() + 2 * END_S) if ending.is_set() else stays
        if time.monotonic() > stays and until == float("inf"):
            _signal(processes, signal.SIGTERM)  # to an mpiexec that waits for ranks behind a wire that is cut
            until = time.monotonic() + END_S
        for number in told[passed:]:  # a signal may come twice
            _signal(processes, number)
            until = time.monotonic() + END_S if number != signal.SIGTERM else until
        passed = len(told)
        if time.monotonic() > until:
            _signal(processes, signal.SIGKILL)
    return first if first is not None else next((k for k, process in enumerate(processes) if process.returncode), None)


def _by_mpiexec(job: Job, hosts: Sequence[str]) -> list[str]:
    program, vendor = job.mpiexec or ("mpiexec", None)
    ranks = job.on(hosts)
    shows = ["--tag-output", "-x", SECRET] if vendor == "Open MPI" else ["-prepend-pattern", "\x1e%r\x1f"]
    words = [program, "-n", str(ranks), *shows]
    if hosts and vendor == "Open MPI":
        words += ["--host", ",".join(f"{host}:{ranks // len(hosts)}" for host in hosts)]
    elif hosts:
        words += ["-hosts", ",".join(hosts), "-ppn", str(ranks // len(hosts))]
    return [*words, *job.command]


def _start(command: Sequence[str], env: Mapping[str, str]) -> subprocess.Popen[bytes]:
    if shutil.which(command[0]) is None:
        raise ValueError(f"run: there is no command {command[0]!r} here.")
    # A session of its own: what a terminal sends comes here alone, and is passed on.
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
        if process.poll() is None:
            # mpiexec ends its ranks itself; it cannot if it is killed.
            process.send_signal(number) if number != signal.SIGKILL else os.killpg(process.pid, number)


### Hosts


def _answer(hosts: Sequence[str]) -> list[bool]:
    """Tells for each host whether it can be reached, as mpiexec would reach it."""
    with ThreadPoolExecutor(max(1, len(hosts))) as pool:
        return list(pool.map(_answers, hosts))


def _answers(host: str) -> bool:
    if host in ("localhost", "127.0.0.1", socket.gethostname()):
        return True
    ssh = shlex.split(os.environ.get("HYDRA_LAUNCHER_EXEC", "ssh -o BatchMode=yes"))
    try:
        return subprocess.run([*ssh, host, "true"], stdin=subprocess.DEVNULL, timeout=ANSWER_S).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False
