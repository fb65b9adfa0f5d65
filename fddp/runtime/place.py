"""A process's place among those that were started together, and the environment variables it is read from."""

import re
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Launch:
    """A process's place among those that were started together."""

    launcher: str
    rank: int
    size: int
    local_rank: int | None = None
    """Its number among the processes of its host; None if the launcher does not say."""
    coordinator: str | None = None
    """host:port at which rank 0 can be met; None if the launcher does not say."""
    pmi: str | None = None
    """The value of srun's --mpi, 'pmi2' for one; None if it offers MPI nothing."""
    local_size: int | None = None
    """The number of processes on its host; None if the launcher does not say."""
    pmi_fd: int | None = None
    """The socket by which MPICH's mpiexec hears of it; None if there is none."""
    job: str = ""
    """The name of its job, as others may meet at the same port; empty if the launcher has none."""

    def __post_init__(self) -> None:
        if self.size < 1 or not 0 <= self.rank < self.size:
            raise ValueError(f"{self.launcher} says this is rank {self.rank} of {self.size}; a rank lies in 0..size-1.")
        if self.coordinator is not None and not _is_place(str(self.coordinator)):
            raise ValueError(
                f"{self.launcher} names the coordinator {self.coordinator!r}; it must be host:port with a port of "
                "1 to 65535, as in 'node1:4711'."
            )

    @property
    def by_mpi(self) -> bool:
        """Whether an mpiexec started this process, so that MPI can be initialized."""
        return self.launcher in ("Open MPI", "Hydra")

    @property
    def may_be_mpi(self) -> bool:
        """Whether its launcher starts programs of MPI as well; nobody can ask whether the MPI here speaks its PMI."""
        return self.launcher in ("Flux", "PALS", "MVAPICH") or self.pmi is not None


def _is_place(text: str) -> bool:
    port = re.fullmatch(r".+:([0-9]{1,5})", text)
    return port is not None and 1 <= int(port[1]) < 2**16


def from_variables(
    env: Mapping[str, str],
    launcher: str,
    rank: str,
    size: str,
    local_rank: str | None = None,
    local_size: str | None = None,
) -> Launch:
    """Reads a process's place from the variables of a launcher.

    Args:
      env: environment variables, as `os.environ`.
      launcher: its name.
      rank: name of the variable that numbers the process.
      size: name of the one with the number of processes.
      local_rank: name of the one that numbers it among those of its host; None, or not set: the launcher does not say.
      local_size: name of the one with the number of processes on its host; likewise.

    Returns:
      The place, without a coordinator.

    Raises:
      ValueError: a variable is missing, or no whole number, or they contradict each other.
    """
    return Launch(
        launcher,
        rank=integer(env, rank),
        size=integer(env, size),
        local_rank=integer_if_set(env, local_rank),
        local_size=integer_if_set(env, local_size),
    )


def integer(env: Mapping[str, str], name: str) -> int:
    """An environment variable that is a whole number.

    Args:
      env: environment variables, as `os.environ`.
      name: of the variable.

    Returns:
      The number.

    Raises:
      ValueError: it is not set, or no whole number.
    """
    value = text(env, name)
    try:
        return int(value)
    except ValueError:
        raise ValueError(f"{name} must be a whole number, got {value!r}.") from None


def integer_if_set(env: Mapping[str, str], name: str | None) -> int | None:
    """An environment variable that is a whole number; None where it is not set, or there is no such variable.

    Raises:
      ValueError: it is no whole number.
    """
    return integer(env, name) if name and name in env else None


def text(env: Mapping[str, str], name: str) -> str:
    """An environment variable that must be there.

    Raises:
      ValueError: it is not set.
    """
    if name not in env:
        raise ValueError(f"{name} is not set, though the launcher's other variables are.")
    return env[name]
