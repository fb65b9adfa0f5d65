"""Starts the ranks of a job, ends all when one fails, and starts them again, with the hosts that are left.

The script itself goes on where the job was, from its newest checkpoint (`fddp.Checkpoints`). Schedulers that start jobs
again by themselves (Slurm's requeue, Kubernetes' JobSet) do not need this.

Source: torchrun, `torch.distributed.run`.
"""

import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import IO, NamedTuple

from fddp.comm import SECRET, new_secret
from fddp.runtime.launchers import worlds
from fddp.runtime.mpi_vendors import launchers

LOOK_S = 0.05
END_S = 10.0  # the watchers of a job end it sooner
FLIGHT = b"`python -m fddp flight "  # which the watcher of rank 0 names when it ends a job
MARK = re.compile(rb"\x1e(\d+)\x1f")  # in front of each piece that MPICH's mpiexec passes on
MARK_BYTES = 12
LINE_ENDS = (b"\n", b"\r")  # a progress bar ends its lines with the second
LONGEST = 2**16
GREETING = re.compile(rb"\[Gloo\] Rank \d+ is connected to ")  # of XLA, which nothing silences
ANSWER_S = 10.0
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
    with tempfile.TemporaryDirectory(prefix="fddp-run-") as folder, _told() as told:
        # A restart need not compile programs again.
        env = {"JAX_COMPILATION_CACHE_DIR": folder} | os.environ if job.restarts else dict(os.environ)
        for start in count():
            ended = _run(job, hosts, env, told)
            if ended.code == 0 or told:
                return ended.code
            if start == job.restarts:
                _say(f"{ended.words}{', and all restarts are used up' if job.restarts else ''}.")
                return ended.code
            hosts = [host for host, there in zip(hosts, _answer(hosts)) if there]
            ranks = job.on(hosts)
            if ranks < job.least:
                _say(f"{ended.words}, and with {ranks} ranks on the hosts that answer it is not started again.")
                return ended.code
            _say(f"{ended.words}: restart {start + 1} of {job.restarts}, with {ranks} ranks.")
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
        readers = [one for process, prefix in zip(processes, prefixes) for one in _shown(process, prefix, ending)]
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
    # A session of its own: what a terminal sends comes here alone, and is passed on.
    return subprocess.Popen(
        command,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )


def _shown(process: subprocess.Popen[bytes], prefix: str, ending: threading.Event) -> list[threading.Thread]:
    """Passes on what a process writes, each line with its rank in front; notes that the watchers end the job."""

    def copy(stream: IO[bytes], out: IO[bytes] | None) -> None:
        with stream:
            for line in _of_each_rank(stream, prefix.encode()):
                if FLIGHT in line:
                    ending.set()
                if out is None:
                    continue
                try:
                    out.write(line)  # one write: lines of several ranks do not mix
                    out.flush()
                except OSError as error:  # a full disk, or a reader that has left: the ranks go on
                    with Path(os.devnull).open("wb") as nowhere:
                        os.dup2(nowhere.fileno(), out.fileno())  # also for what the buffer still holds
                    with suppress(OSError):
                        _say(f"what the ranks print is lost from here on: {error.strerror}.")

    outs = [getattr(stream, "buffer", None) for stream in (sys.stdout, sys.stderr)]  # a shell may close both
    pairs = zip((process.stdout, process.stderr), outs)
    threads = [threading.Thread(target=copy, args=pair, daemon=True) for pair in pairs]
    for thread in threads:
        thread.start()
    return threads


def _of_each_rank(stream: IO[bytes], rank: bytes) -> Iterator[bytes]:
    """Whole lines with their rank in front, of pieces of lines that mpiexec marks with the rank; without greetings."""
    begun = defaultdict[bytes, bytes](bytes)
    for piece in _pieces(stream):
        unmarked, *marked = MARK.split(piece)
        ranks = [rank, *(b"[%b] " % number for number in marked[::2])]
        for rank, text in zip(ranks, [unmarked, *marked[1::2]]):
            begun[rank] += text
            if begun[rank].endswith(LINE_ENDS) or len(begun[rank]) > LONGEST:
                line = begun.pop(rank)
                if not GREETING.match(line):
                    yield rank + line
    yield from (rank + line for rank, line in begun.items() if line)


def _pieces(stream: IO[bytes]) -> Iterator[bytes]:
    """Splits output after each line end, and never inside of a mark."""
    rest = b""
    while data := os.read(stream.fileno(), LONGEST):
        data = rest + data
        mark = data.rfind(b"\x1e", -MARK_BYTES)
        whole = len(data) if mark < 0 or b"\x1f" in data[mark:] else mark
        rest = data[whole:]
        yield from data[:whole].splitlines(keepends=True)
    yield rest


def _signal(processes: Sequence[subprocess.Popen[bytes]], number: int) -> None:
    for process in processes:
        if process.poll() is None:
            # mpiexec ends its ranks itself; it cannot if it is killed.
            process.send_signal(number) if number != signal.SIGKILL else os.killpg(process.pid, number)


@contextmanager
def _told() -> Iterator[list[int]]:
    """Collects the signals that come meanwhile, from a scheduler or the keyboard, to pass them on to the ranks."""
    came = list[int]()
    before = {
        number: signal.signal(number, lambda number, frame: came.append(number))
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
        if signal.getsignal(number) != signal.SIG_IGN  # as nohup has it
    }
    try:
        yield came
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


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


def _say(line: str) -> None:
    print(f"fddp run: {line}", file=sys.stderr, flush=True)
