"""Reads a process's rank and coordinator from variables of mpirun, srun, torchrun or the user.

Each launcher has a function from an environment to a `Launch` or None. The first `Launch` wins. The
functions only read: they start nothing and open no connection to another host.

Ranks of a launcher without a coordinator meet at `FDDP_COORDINATOR`. All such launchers but
Kubernetes also start MPI programs, whose ranks meet by the launcher's PMI. An MPI without support
for that PMI ends the process, so fddp uses MPI there only on request.
"""

import os
import re
import socket
import stat
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial

from fddp.comm import SECRET, new_secret
from fddp.runtime.place import Launch, from_variables, integer, integer_if_set, text

FDDP_VARIABLES = ("FDDP_RANK", "FDDP_SIZE")
TORCH_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
WORLD = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
JAX_VARIABLES = ("JAX_PROCESS_ID", "JAX_NUM_PROCESSES", "JAX_COORDINATOR_ADDRESS")
# Names of the variables that launchers set to give a process its rank and coordinator.
SPOKEN = re.compile(
    r"FDDP_(RANK|SIZE|LOCAL_RANK|COORDINATOR)"
    r"|RANK|WORLD_SIZE|LOCAL_(RANK|WORLD_SIZE)|MASTER_(ADDR|PORT)|TORCHELASTIC_RUN_ID"
    r"|JAX_(COORDINATOR_ADDRESS|NUM_PROCESSES|PROCESS_ID)"
    r"|(OMPI|MV2)_COMM_WORLD_(LOCAL_)?(RANK|SIZE)"
    r"|PMI_(RANK|SIZE)|MPI_LOCALN?RANK(S|ID)|PMIX_(RANK|NAMESPACE)|PALS_(LOCAL_)?(RANKID|SIZE)"
    r"|FLUX_(TASK_RANK|JOB_SIZE|TASK_LOCAL_ID)"
    r"|SLURM_(PROCID|LOCALID|STEP_NUM_TASKS|STEP_NODELIST|MPI_TYPE)"
    r"|JOB_COMPLETION_INDEX"
)
# Variables of launchers that number their processes without giving their count.
NUMBERS = {
    "PALS_RANKID": "PALS",
    "PMIX_RANK": "a launcher with PMIx",
    "JOB_COMPLETION_INDEX": "an Indexed Job of Kubernetes",
}
PORTS = 2**12  # number of derived ports, above Linux's ephemeral ports
GOLDEN = 2531  # `PORTS` divided by the golden ratio


def read_launch(env: Mapping[str, str]) -> Launch:
    """Reads how this process was started, from the first launcher with variables in `env`."""
    env = {name: value for name, value in env.items() if value}  # templates leave empty ones
    # Inner launchers first: srun may start the other launchers, and with --mpi=cray_shasta it sets
    # the variables of PALS.
    launchers = (_torchrun, _open_mpi, _hydra, _flux, _mvapich, _slurm, _pals)
    for read in (_explicit, *launchers, jax_variables, torch_variables):
        if launch := read(env):
            # The coordinator can be set with any launcher.
            return replace(launch, coordinator=env.get("FDDP_COORDINATOR", launch.coordinator))
    if "FDDP_COORDINATOR" in env:
        raise ValueError(
            "FDDP_COORDINATOR given but not FDDP_RANK, FDDP_SIZE; set FDDP_RANK and FDDP_SIZE."
        )
    return Launch("alone", rank=0, size=1)


def launcher_variables(env: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment variables of all known launchers."""
    return {name: value for name, value in env.items() if SPOKEN.fullmatch(name)}


def numbered(env: Mapping[str, str]) -> str | None:
    """The variable of a launcher that numbers its processes without giving their count, or None."""
    return next((name for name in NUMBERS if name in env), None)


def pmi_socket(launch: Launch) -> int | None:
    """The socket to MPICH's mpiexec, unless a program between the two has closed it."""
    with suppress(OSError):
        if launch.pmi_fd is not None and stat.S_ISSOCK(os.fstat(launch.pmi_fd).st_mode):
            return launch.pmi_fd
    return None


def worlds(processes: int, hosts: Sequence[str] = ()) -> list[dict[str, str]]:
    """Makes the variables of each process of a new world, with rank 0 on the first host."""
    host = [*hosts, "127.0.0.1"][0]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        world = {
            "FDDP_SIZE": str(processes),
            "FDDP_COORDINATOR": f"{host}:{probe.getsockname()[1]}",
        }
    world[SECRET] = os.environ.get(SECRET) or new_secret()
    return [
        world | {"FDDP_RANK": str(rank), "FDDP_LOCAL_RANK": str(rank)} for rank in range(processes)
    ]


### Variables that the user sets


def _explicit(env: Mapping[str, str]) -> Launch | None:
    names = [name for name in FDDP_VARIABLES if name in env]
    if not names:
        return None
    number = "FDDP_RANK"
    launcher = "FDDP_* variables"
    if number not in env:
        number = numbered(env)
        launcher = f"FDDP_SIZE and {number}"
    if "FDDP_SIZE" not in env or number is None:
        missing = [name for name in FDDP_VARIABLES if name not in env]
        raise ValueError(
            f"{', '.join(names)} given but not {', '.join(missing)}; set FDDP_RANK and FDDP_SIZE."
        )
    return from_variables(env, launcher, number, "FDDP_SIZE", "FDDP_LOCAL_RANK")


def jax_variables(env: Mapping[str, str]) -> Launch | None:
    """Reads JAX's three variables, as Kubeflow's Trainer sets them; None if one is missing."""
    if any(name not in env for name in JAX_VARIABLES):
        return None
    place = from_variables(env, "JAX_* variables", "JAX_PROCESS_ID", "JAX_NUM_PROCESSES")
    return replace(place, coordinator=text(env, "JAX_COORDINATOR_ADDRESS"))


def torch_variables(
    env: Mapping[str, str], launcher: str = "torchrun's variables"
) -> Launch | None:
    """Reads torchrun's four variables; None if one is missing, as RANK may have other meanings."""
    if any(name not in env for name in TORCH_VARIABLES):
        return None
    # A torch store may occupy MASTER_PORT.
    port = _derived_port(integer(env, "MASTER_PORT") + 1)
    place = from_variables(env, launcher, "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    job = env.get("TORCHELASTIC_RUN_ID", "")
    return replace(place, coordinator=f"{text(env, 'MASTER_ADDR')}:{port}", job=job)


### Launchers


def _torchrun(env: Mapping[str, str]) -> Launch | None:
    if "TORCHELASTIC_RUN_ID" not in env:
        return None
    return torch_variables(env, "torchrun")


def _from_names(launcher: str, names: Sequence[str], env: Mapping[str, str]) -> Launch | None:
    """Reads rank, size, local rank and local size from variables; None if the first is not set."""
    return from_variables(env, launcher, *names) if names[0] in env else None


_open_mpi = partial(_from_names, "Open MPI", [f"OMPI_COMM_WORLD_{x}" for x in WORLD])
_flux = partial(_from_names, "Flux", ["FLUX_TASK_RANK", "FLUX_JOB_SIZE", "FLUX_TASK_LOCAL_ID"])
_mvapich = partial(_from_names, "MVAPICH", [f"MV2_COMM_WORLD_{x}" for x in WORLD])


def _hydra(env: Mapping[str, str]) -> Launch | None:
    # Tasks of srun --mpi=pmi2, Flux and PALS have a PMI_RANK too. Only Hydra sets MPI_LOCALRANKID.
    # It does so inside a Slurm step too, where it starts its proxies with srun.
    ambiguous = any(name in env for name in ("SLURM_STEP_ID", "FLUX_TASK_RANK", "PALS_RANKID"))
    if "PMI_RANK" not in env or (ambiguous and "MPI_LOCALRANKID" not in env):
        return None
    place = from_variables(
        env, "Hydra", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"
    )
    return replace(place, pmi_fd=integer_if_set(env, "PMI_FD"))


def _slurm(env: Mapping[str, str]) -> Launch | None:
    # The variables of the step, not of the job: a script under sbatch without srun is one process
    # in a job of any size. The step of the daemons of PRRTE's prterun does not describe their
    # ranks, unlike that of srun with PMIx.
    by_prrte = not env.get("PMIX_NAMESPACE", "slurm.").startswith("slurm.") and "PMIX_RANK" in env
    if "SLURM_STEP_NUM_TASKS" not in env or "SLURM_PROCID" not in env or by_prrte:
        return None
    # The port is equal on all ranks of a step. It differs between simultaneous steps: jobs are
    # numbered consecutively, and so are the steps of a job. The golden ratio spreads the jobs.
    job = integer(env, "SLURM_JOB_ID")
    step = integer_if_set(env, "SLURM_STEP_ID") or 0
    port = _derived_port(GOLDEN * job + step)
    pmi = env.get("SLURM_MPI_TYPE")
    return replace(
        from_variables(env, "Slurm", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
        local_rank=integer(env, "SLURM_LOCALID"),
        coordinator=f"{_first_host(text(env, 'SLURM_STEP_NODELIST'))}:{port}",
        pmi=None if pmi == "none" else pmi,
        job=f"{job}.{step}",
    )


def _pals(env: Mapping[str, str]) -> Launch | None:
    # HPE's mpiexec gives the number of ranks for Cray's PMI.
    size = next((name for name in ("PMI_SIZE", "PALS_SIZE") if name in env), None)
    if "PALS_RANKID" not in env or size is None:
        return None
    return from_variables(env, "PALS", "PALS_RANKID", size, "PALS_LOCAL_RANKID", "PALS_LOCAL_SIZE")


def _first_host(nodes: str) -> str:
    """The first host of a Slurm node list: node007 of 'node[007-012,040],login'."""
    match = re.match(r"([^,\[]+)(?:\[(\d+))?", nodes)
    if match is None:
        raise ValueError(f"SLURM_STEP_NODELIST must be a list of hosts, got {nodes!r}.")
    return match[1] + (match[2] or "")


def _derived_port(number: int) -> int:
    return 2**16 - PORTS + number % PORTS
