"""The place of a process in its job, and the environment variables that describe it."""

import os
import re
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass


@dataclass(frozen=True)
class Launch:
    """The place of a process in its job."""

    launcher: str
    rank: int
    size: int
    local_rank: int | None = None
    """Rank on its host; None if the launcher does not report it."""
    coordinator: str | None = None
    """host:port of rank 0; None if the launcher does not report it."""
    pmi: str | None = None
    """Value of srun's --mpi, such as 'pmi2'; None without a PMI."""
    local_size: int | None = None
    """Number of processes on its host; None if the launcher does not report it."""
    pmi_fd: int | None = None
    """Number of the socket to MPICH's mpiexec; None without one."""
    job: str = ""
    """Name of its job, as another job may use the same port; empty if the launcher has none."""

    def __post_init__(self) -> None:
        if self.size < 1 or not 0 <= self.rank < self.size:
            raise ValueError(
                f"rank {self.rank} of {self.size}, according to {self.launcher}: "
                "a rank lies in 0..size-1."
            )
        port = re.fullmatch(r".+:([0-9]{1,5})", str(self.coordinator))
        if self.coordinator is not None and not (port and 1 <= int(port[1]) < 2**16):
            raise ValueError(
                f"the coordinator is {self.coordinator!r}, according to {self.launcher}; it must "
                "be host:port with a port of 1 to 65535, as in 'node1:4711'."
            )

    @property
    def by_mpi(self) -> bool:
        """True if an mpiexec started this process: then MPI can be initialized."""
        return self.launcher in ("Open MPI", "Hydra")

    @property
    def may_be_mpi(self) -> bool:
        """True if the launcher also starts MPI programs; the installed MPI may lack its PMI."""
        return self.launcher in ("Flux", "PALS", "MVAPICH") or self.pmi is not None


def place_of(coordinator: str) -> tuple[str, int]:
    """Splits host:port; an IPv6 address may stand in brackets."""
    host, port = coordinator.rsplit(":", 1)
    return host.strip("[]"), int(port)


def is_of_this_host(host: str) -> bool:
    """True if a process can listen here at the address of a name."""
    try:
        family, *_, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family) as probe:
            probe.bind(address)
    except (OSError, UnicodeError):
        return False
    return True


def from_variables(
    env: Mapping[str, str],
    launcher: str,
    rank: str,
    size: str,
    local_rank: str | None = None,
    local_size: str | None = None,
) -> Launch:
    """Reads a process's place from the variables with these names; the local ones may be unset."""
    return Launch(
        launcher,
        rank=integer(env, rank),
        size=integer(env, size),
        local_rank=integer_if_set(env, local_rank),
        local_size=integer_if_set(env, local_size),
    )


def integer(env: Mapping[str, str], name: str) -> int:
    """Reads a whole number from an environment variable, which must be set."""
    value = text(env, name)
    try:
        return int(value)
    except ValueError:
        raise ValueError(f"{name} must be a whole number, got {value!r}.") from None


def integer_if_set(env: Mapping[str, str], name: str | None) -> int | None:
    """Reads a whole number from an environment variable; None if it is not set."""
    if name is None or name not in env:
        return None
    return integer(env, name)


def text(env: Mapping[str, str], name: str) -> str:
    """Reads an environment variable that must be set."""
    if name not in env:
        raise ValueError(f"{name} is not set, though the launcher's other variables are.")
    return env[name]


### Changes of the environment

_changing = threading.Lock()


@contextmanager
def environment(changes: Mapping[str, str | None]) -> Iterator[None]:
    """Changes variables of this process's environment during a block; None removes a variable."""
    with _changing:
        previous = {name: os.environ.get(name) for name in changes}
        try:
            _set(changes)
            yield
        finally:
            _set(previous)


def without_proxies() -> AbstractContextManager[None]:
    """Hides HTTP proxies during a block: gRPC would connect to other ranks through them."""
    return environment(dict.fromkeys(proxies(os.environ)))


def proxies(env: Mapping[str, str]) -> list[str]:
    """The names of variables that set HTTP proxies, or exceptions from them."""
    return [name for name in env if name.lower().endswith("_proxy")]


def _set(variables: Mapping[str, str | None]) -> None:
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
