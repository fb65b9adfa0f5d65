"""How this process was started: what mpirun, srun or the user's own variables say about its place in the world.

One small function per launcher, each from an environment to a `Launch` or None; the first that knows wins. They only
read: nothing here starts or connects anything.
"""

import os
import re
import stat
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace

FDDP_VARIABLES = ("FDDP_RANK", "FDDP_SIZE")


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
    """What srun's --mpi says, 'pmi2' for one; None if it offers MPI nothing."""
    local_size: int | None = None
    """The number of processes on its host; None if the launcher does not say."""
    pmi_fd: int | None = None
    """The socket by which MPICH's mpiexec hears of it; None if there is none."""

    def __post_init__(self) -> None:
        if self.size < 1 or not 0 <= self.rank < self.size:
            raise ValueError(f"{self.launcher} says this is rank {self.rank} of {self.size}; a rank lies in 0..size-1.")
        if self.coordinator is not None and not re.fullmatch(r".+:\d+", self.coordinator):
            raise ValueError(
                f"{self.launcher} names the coordinator {self.coordinator!r}; it must be host:port, as in 'node1:4711'."
            )

    @property
    def by_mpi(self) -> bool:
        """Whether an mpiexec started this process, so that MPI can be initialized."""
        return self.launcher in ("Open MPI", "Hydra")


def read_launch(env: Mapping[str, str]) -> Launch:
    """Finds out how this process was started.

    Args:
      env: environment variables, as `os.environ`.

    Returns:
      What the first of these says: `FDDP_RANK, FDDP_SIZE`; Open MPI; MPICH's Hydra (PMI); Slurm's srun, whatever its
      --mpi. A process that nobody speaks of is alone. `FDDP_COORDINATOR` wins over what the launcher says of rank 0's
      place.

    Raises:
      ValueError: variables are incomplete or contradict each other.

    Example:
      >>> read_launch({"PMI_RANK": "1", "PMI_SIZE": "4"}).rank
      1
    """
    found = (launcher(env) for launcher in (_explicit, _open_mpi, _hydra, _slurm, _nobody))
    launch = next(launch for launch in found if launch is not None)
    # Whoever started the ranks: where they meet can be told beside it.
    return replace(launch, coordinator=env.get("FDDP_COORDINATOR", launch.coordinator))


def pmi_socket(launch: Launch) -> int | None:
    """The socket by which MPICH's mpiexec hears of this process, if it has it still.

    Args:
      launch: how this process was started.

    Returns:
      Its number. None: there is none, or a program between the two has closed it, and the number may be another file's.
    """
    with suppress(OSError):
        if launch.pmi_fd is not None and stat.S_ISSOCK(os.fstat(launch.pmi_fd).st_mode):
            return launch.pmi_fd
    return None


def missing_srun(launch: Launch, env: Mapping[str, str]) -> str:
    """What to say where Slurm gave a job several tasks and its script is one process, as inside sbatch without srun.

    Args:
      launch: how this process was started.
      env: environment variables, as `os.environ`.

    Returns:
      A sentence, or '' where nothing is amiss.

    Example:
      >>> missing_srun(Launch("alone", 0, 1), {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "2"})
      'Slurm gave this job 2 tasks, but this is one process: start it with srun.'
    """
    # Slurm itself runs an interactive salloc's shell as a step of one task. srun says SLURM_NTASKS anew.
    if "SLURM_JOB_ID" not in env or launch.size > 1 or launch.launcher not in ("alone", "Slurm"):
        return ""
    a_node = _integer(env, "SLURM_NTASKS_PER_NODE") if "SLURM_NTASKS_PER_NODE" in env else 1
    nodes = _integer(env, "SLURM_NNODES") if "SLURM_NNODES" in env else 1
    tasks = _integer(env, "SLURM_NTASKS") if "SLURM_NTASKS" in env else nodes * a_node
    return f"Slurm gave this job {tasks} tasks, but this is one process: start it with srun." if tasks > 1 else ""


def _explicit(env: Mapping[str, str]) -> Launch | None:
    given = [name for name in FDDP_VARIABLES if name in env]
    if not given:
        return None
    missing = [name for name in FDDP_VARIABLES if name not in env]
    if missing:
        raise ValueError(f"{', '.join(given)} given but not {', '.join(missing)}; set FDDP_RANK and FDDP_SIZE.")
    return Launch(
        "FDDP_* variables",
        rank=_integer(env, "FDDP_RANK"),
        size=_integer(env, "FDDP_SIZE"),
        local_rank=_integer(env, "FDDP_LOCAL_RANK") if "FDDP_LOCAL_RANK" in env else None,
    )


def _open_mpi(env: Mapping[str, str]) -> Launch | None:
    if "OMPI_COMM_WORLD_RANK" not in env:
        return None
    return Launch(
        "Open MPI",
        rank=_integer(env, "OMPI_COMM_WORLD_RANK"),
        size=_integer(env, "OMPI_COMM_WORLD_SIZE"),
        local_rank=_integer(env, "OMPI_COMM_WORLD_LOCAL_RANK"),
        local_size=_integer(env, "OMPI_COMM_WORLD_LOCAL_SIZE") if "OMPI_COMM_WORLD_LOCAL_SIZE" in env else None,
    )


def _hydra(env: Mapping[str, str]) -> Launch | None:
    # Tasks of srun --mpi=pmi2 have a PMI_RANK too. Only Hydra numbers the ranks of a host, and it does so inside a step
    # of Slurm's as well: there it starts its proxies with srun.
    if "PMI_RANK" not in env or ("SLURM_STEP_ID" in env and "MPI_LOCALRANKID" not in env):
        return None
    return Launch(
        "Hydra",
        rank=_integer(env, "PMI_RANK"),
        size=_integer(env, "PMI_SIZE"),
        local_rank=_integer(env, "MPI_LOCALRANKID") if "MPI_LOCALRANKID" in env else None,
        local_size=_integer(env, "MPI_LOCALNRANKS") if "MPI_LOCALNRANKS" in env else None,
        pmi_fd=_integer(env, "PMI_FD") if "PMI_FD" in env else None,
    )


def _slurm(env: Mapping[str, str]) -> Launch | None:
    # The step's variables, not the job's: a script under sbatch without srun is one process, whatever the job holds.
    if "SLURM_STEP_NUM_TASKS" not in env or "SLURM_PROCID" not in env:
        return None
    # Ports as JAX derives them: equal on all ranks of a job, different between jobs.
    port = _integer(env, "SLURM_JOB_ID") % 2**12 + (65535 - 2**12 + 1)
    return Launch(
        "Slurm",
        rank=_integer(env, "SLURM_PROCID"),
        size=_integer(env, "SLURM_STEP_NUM_TASKS"),
        local_rank=_integer(env, "SLURM_LOCALID"),
        coordinator=f"{_first_host(_text(env, 'SLURM_STEP_NODELIST'))}:{port}",
        pmi=None if env.get("SLURM_MPI_TYPE") == "none" else env.get("SLURM_MPI_TYPE"),
    )


def _nobody(env: Mapping[str, str]) -> Launch:
    if "FDDP_COORDINATOR" in env:
        raise ValueError("FDDP_COORDINATOR given but not FDDP_RANK, FDDP_SIZE; set FDDP_RANK and FDDP_SIZE.")
    return Launch("alone", rank=0, size=1)


def _first_host(nodes: str) -> str:
    """The first name of a Slurm node list: 'node[007-012,040],login' starts with node007."""
    match = re.match(r"([^,\[]+)(?:\[(\d+))?", nodes)
    if match is None:
        raise ValueError(f"SLURM_STEP_NODELIST must be a list of hosts, got {nodes!r}.")
    return match[1] + (match[2] or "")


def _integer(env: Mapping[str, str], name: str) -> int:
    text = _text(env, name)
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{name} must be a whole number, got {text!r}.") from None


def _text(env: Mapping[str, str], name: str) -> str:
    if name not in env:
        raise ValueError(f"{name} is not set, though the launcher's other variables are.")
    return env[name]
