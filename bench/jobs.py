"""Ranks as processes: started on this machine, and ended whatever happens."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

MPIEXEC = str(Path(sys.executable).with_name("mpiexec"))
PATIENCE_S = 20


def start(
    backend: str, size: int, command: Sequence[str], env: Mapping[str, str], **pipes: Any
) -> list[subprocess.Popen]:
    """Starts a command on several ranks of this machine: under mpiexec for the backend "mpi", and
    with FDDP_* variables for all others; `pipes` are arguments of `subprocess.Popen`."""
    env = {**os.environ, **env}
    if backend == "mpi":
        return [subprocess.Popen([MPIEXEC, "-n", str(size), *command], env=env, **pipes)]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        env |= {"FDDP_SIZE": str(size), "FDDP_COORDINATOR": f"127.0.0.1:{probe.getsockname()[1]}"}
    return [
        subprocess.Popen(command, env=env | {"FDDP_RANK": str(rank)}, **pipes)
        for rank in range(size)
    ]


@contextmanager
def ending(jobs: Sequence[subprocess.Popen]) -> Iterator[Sequence[subprocess.Popen]]:
    """Waits at the end of the block for processes without work, and ends all others."""
    try:
        yield jobs
        _wait(jobs)
    finally:
        for job in jobs:
            # mpiexec ends its ranks on SIGTERM; killed at once it would leave them
            job.terminate()
        _wait(jobs)
        for job in jobs:
            job.kill()  # on SIGTERM JAX speaks to the other ranks first, and these may be gone


def _wait(jobs: Sequence[subprocess.Popen]) -> None:
    end = time.monotonic() + PATIENCE_S
    while any(job.poll() is None for job in jobs) and time.monotonic() < end:
        time.sleep(0.05)
