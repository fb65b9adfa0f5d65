"""Starts real processes: ranks of MPI under mpiexec, or processes that find each other by FDDP_*
variables (Gloo).

They get an environment of their own, in which warnings are errors, and an end: no test waits for
ever.
"""

import atexit
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Protocol

import fork_server
import jax
import pytest
from _pytest.mark.structures import ParameterSet

TESTS = Path(__file__).parent
WORKERS = TESTS / "workers"
HOLD = TESTS / "on_ranks" / "hold.py"  # the script whose ranks hold claims
# conftest.py sets them.
COMPILATION_CACHE = ("JAX_COMPILATION_CACHE_DIR", "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS")
# The variables of this process that locate programs and files: neither its devices nor its
# launcher.
INHERITED = ("PATH", "HOME", "TMPDIR", "LD_LIBRARY_PATH", *COMPILATION_CACHE)
END_S = 5.0
# A last resort, ten times the seconds of the longest of these jobs on a quiet machine.
JOB_S = 300.0
# FDDP_GRACE_S if all ranks fail: no rank waits this long, however busy the machine is.
PATIENT_S = "10"
# A test's programs run a few times: most of their time goes to compiling. JAX's own switch leaves
# optimizations out; before JAX 0.11 XLA:CPU also has kernels that take longer to make than all the
# rest of a small program.
OLD_KERNELS = "--xla_cpu_use_fusion_emitters=false" if jax.__version_info__ < (0, 11) else ""
UNOPTIMIZED = {
    "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
    "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {OLD_KERNELS}".strip(),
}
# A rank of MPICH that waits takes a whole core, also from the ranks that it waits for.
PATIENT_MPI = {
    "MPICH_CH4_PROGRESS_THROTTLE": "1",
    "MPICH_CH4_PROGRESS_THROTTLE_NO_PROGRESS_COUNT": "256",
}
# XLA's Gloo says so to stdout whenever it connects, and nothing silences it. The threads of two
# devices say it at once, word by word: a line is a greeting if it consists of such words only.
GREETING = re.compile(
    r"(\[Gloo\] Rank |is connected to|peer ranks\.|Expected number of connected peer ranks is "
    r":|\d|\s)+"
)
# On a busy machine some ranks start later than others, who say so.
WAITING = re.compile(r"fddp: rank \d+ (of \d+ )?waits ")
# The installed jaxlib has a known fault, which rank 0 prints.
FAULTY = re.compile(
    r"fddp: jaxlib \S+ on CPUs has a known fault, .+ \(\S+\)\. `python -m fddp doctor` lists all, "
    r"and what helps\.$"
)

# Warnings are errors, but for a program that another process is writing into the cache, which JAX
# then compiles, and for one that does not fit on a disk that a claim makes full.
CACHE = "persistent compilation cache entry"
STRICT = (
    *("-W", "error"),
    *("-W", f"ignore:Error reading {CACHE}"),
    *("-W", f"ignore:Error writing {CACHE}"),
)
# Variables read when Python and JAX are imported: a rank with another value is not forked.
READ_AT_IMPORT = ("JAX_", "PYTHON")

# (backend, processes) of every kind of job that is tested. Three processes show what powers of two
# hide.
QUICK_JOBS = [("mpi", 3), ("gloo", 2)]
JOBS = [*QUICK_JOBS, ("mpi", 2), ("mpi", 4), ("gloo", 4)]


def case(job: tuple[str, int], *more: object, slow: bool = False) -> ParameterSet:
    """A job and its test, as a parameter set of pytest in its tier."""
    tiers = [pytest.mark.slow] if slow or job not in QUICK_JOBS else []
    return pytest.param(*job, *more, marks=[pytest.mark.ranks, *tiers])


def on(quick: str) -> pytest.MarkDecorator:
    """Parametrizes by one backend in the default tier, and by the other one in the tier `slow`."""
    marked = [
        pytest.param(backend, marks=[] if backend == quick else [pytest.mark.slow])
        for backend in ("mpi", "gloo")
    ]
    return pytest.mark.parametrize("backend", marked)


def selected(request: pytest.FixtureRequest, backend: str, size: int, name: str) -> list[str]:
    """The tests of a job, by the name of a parameter, that this session selects: a job runs no
    others."""
    parameters = [
        callspec.params
        for item in request.session.items
        if (callspec := getattr(item, "callspec", None))
    ]
    return [
        str(values[name])
        for values in parameters
        if name in values and (values.get("backend"), values.get("size")) == (backend, size)
    ]


class Process(Protocol):
    """A started process: the part of `subprocess.Popen` in use."""

    pid: int

    def poll(self) -> int | None: ...
    def wait(self, timeout: float) -> int: ...
    def terminate(self) -> None: ...


@dataclass(frozen=True)
class Outcome:
    """The outcome of a job."""

    outputs: tuple[str, ...]
    """The stdout, then the stderr of each rank."""
    codes: tuple[int | None, ...]
    """Exit code of each process, mpiexec's alone under MPI; None: still running at the timeout."""

    @property
    def ended(self) -> bool:
        return None not in self.codes

    @property
    def succeeded(self) -> bool:
        return set(self.codes) == {0}


def launch(
    backend: str,
    size: int,
    script: str | Path,
    *args: object,
    folder: Path,
    timeout_s: float = JOB_S,
    **env: str,
) -> Outcome:
    """Runs a worker on several ranks and waits for its end.

    Args:
      backend: "mpi" or "gloo".
      size: number of processes.
      script: file in tests/workers, or a path of its own.
      *args: its arguments.
      folder: empty folder for the ranks' output.
      timeout_s: seconds after which all processes are killed.
      **env: more environment variables.

    Returns:
      The outcome; also printed, because pytest shows the output of a failed test.
    """
    command = [str(WORKERS / script), *map(str, args)]
    env = _environment() | env
    if backend == "mpi":
        processes = _start_mpi(size, command, folder, env)
    else:
        processes = _start_gloo(_worlds(size), command, folder, env)
    return _outcome(backend, size, processes, folder, timeout_s)


def launch_with(
    worlds: Sequence[Mapping[str, str]],
    script: str | Path,
    *args: object,
    folder: Path,
    timeout_s: float = JOB_S,
) -> Outcome:
    """Runs a worker as `launch` does, on ranks that meet over Gloo by the variables of another
    launcher.

    Args:
      worlds: the variables of each rank.
      script: file in tests/workers, or a path of its own.
      *args: its arguments.
      folder: empty folder for the ranks' output.
      timeout_s: seconds after which all processes are killed.

    Returns:
      The outcome.
    """
    command = [str(WORKERS / script), *map(str, args)]
    processes = _start_gloo(worlds, command, folder, _environment())
    return _outcome("gloo", len(worlds), processes, folder, timeout_s)


def failed_outputs(
    folder: Path, backend: str, how: str, script: str = "ends.py", size: int = 2, grace_s: str = "1"
) -> tuple[str, ...]:
    """The outputs of the ranks of a script that fails; no process may go on or end with success."""
    outcome = launch(backend, size, script, how, folder=folder, FDDP_GRACE_S=grace_s)
    assert outcome.ended
    assert 0 not in outcome.codes
    return outcome.outputs


def _outcome(
    backend: str, size: int, processes: Sequence[Process], folder: Path, timeout_s: float
) -> Outcome:
    _wait(processes, timeout_s)
    codes = tuple(process.poll() for process in processes)
    _kill(processes)
    outputs = written(folder, size)
    for rank, text in enumerate(outputs):
        print(f"--- {backend} rank {rank} of {size}\n{text}")
    print(f"--- exit codes {codes}")
    return Outcome(outputs, codes)


def written(folder: Path, size: int) -> tuple[str, ...]:
    """The outputs so far of each rank and of its watcher, which may outlive it."""
    return tuple(
        "".join(_read(folder / f"{rank}.{kind}") for kind in ("out", "err")) for rank in range(size)
    )


def _environment() -> dict[str, str]:
    inherited = {name: os.environ[name] for name in INHERITED if name in os.environ}
    path = f"{TESTS.parent}{os.pathsep}{TESTS}"
    return (
        inherited
        | UNOPTIMIZED
        | PATIENT_MPI
        | {"PYTHONPATH": path, "JAX_PLATFORMS": "cpu", "FDDP_GRACE_S": "1"}
    )


def _start_mpi(
    size: int, command: Sequence[str], folder: Path, env: dict[str, str]
) -> list[subprocess.Popen]:
    mpiexec = [str(Path(sys.executable).parent / "mpiexec"), "-n", str(size)]
    files = [f"-outfile-pattern={folder}/%r.out", f"-errfile-pattern={folder}/%r.err"]
    python = [sys.executable, *STRICT, *command]
    return [_start([*mpiexec, *files, *python], folder / "mpiexec", env)]


def _worlds(size: int) -> list[dict[str, str]]:
    world = {"FDDP_SIZE": str(size), "FDDP_COORDINATOR": f"127.0.0.1:{free_port()}"}
    return [{"FDDP_RANK": str(rank), **world} for rank in range(size)]


def _start_gloo(
    worlds: Sequence[Mapping[str, str]], command: Sequence[str], folder: Path, env: dict[str, str]
) -> list[Process]:
    return [
        _start_rank(command, folder / str(rank), {**world, **env})
        for rank, world in enumerate(worlds)
    ]


def _start_rank(command: Sequence[str], output: Path, env: dict[str, str]) -> Process:
    usual = _environment()
    names = [name for name in usual | env if name.startswith(READ_AT_IMPORT)]
    if any(env.get(name) != usual.get(name) for name in names):
        return _start([sys.executable, *STRICT, *command], output, env)
    with output.with_suffix(".out").open("w") as out, output.with_suffix(".err").open("w") as err:
        request = fork_server.Request(command, env)
        return fork_server.start(_server(), request, out.fileno(), err.fileno())


@cache
def _server() -> str:
    """The path of this process's fork server, which starts at the first call and ends with this
    process."""
    folder = Path(tempfile.mkdtemp())
    path = folder / "forks"
    # A fork copies one thread only, so that the server must have no other: NumPy's library starts
    # some.
    env = _environment() | {"OPENBLAS_NUM_THREADS": "1"}
    command = [sys.executable, *STRICT, fork_server.__file__, str(path)]
    process = subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, start_new_session=True)
    owner = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    while owner.connect_ex(str(path)):
        if process.poll() is not None:
            raise RuntimeError(f"the fork server ended with code {process.returncode}")
        time.sleep(0.05)

    def end() -> None:
        owner.close()
        process.wait()
        shutil.rmtree(folder)

    atexit.register(end)
    return str(path)


def _start(command: Sequence[str], output: Path, env: dict[str, str]) -> subprocess.Popen:
    """A process in a session of its own, so that it can be killed with its children only."""
    with output.with_suffix(".out").open("w") as out, output.with_suffix(".err").open("w") as err:
        return subprocess.Popen(command, env=env, stdout=out, stderr=err, start_new_session=True)


def free_port() -> int:
    """A port without a listener."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _wait(processes: Sequence[Process], seconds: float) -> None:
    end = time.monotonic() + seconds
    for process in processes:
        try:
            process.wait(max(end - time.monotonic(), 0))
        except subprocess.TimeoutExpired:
            return


def _kill(processes: Sequence[Process]) -> None:
    """Ends running processes: mpiexec ends its ranks on SIGTERM; all that go on are killed."""
    _signal(processes, lambda process: process.terminate())
    _wait(processes, END_S)
    _signal(processes, lambda process: os.killpg(process.pid, signal.SIGKILL))
    _wait(processes, END_S)


def _signal(processes: Sequence[Process], send: Callable[[Process], None]) -> None:
    for process in processes:
        if process.poll() is None:
            send(process)


def _read(path: Path) -> str:
    lines = path.read_text(errors="replace").splitlines(keepends=True) if path.exists() else []
    return "".join(
        line
        for line in lines
        if not (GREETING.fullmatch(line) or WAITING.match(line) or FAULTY.match(line))
    )
