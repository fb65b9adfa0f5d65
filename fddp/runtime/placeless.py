"""Launchers without a coordinator: PALS, Flux and MVAPICH, and launchers without a number of ranks.

Their ranks meet at `FDDP_COORDINATOR`. All but Kubernetes also start MPI programs, whose ranks meet
by the launcher's PMI. An MPI without support for that PMI ends the process, so fddp uses MPI here
only on request.
"""

from collections.abc import Mapping

from fddp.runtime.place import Launch, from_variables

# Variables of launchers that number their processes without giving their count.
NUMBERS = {
    "PALS_RANKID": "PALS",
    "PMIX_RANK": "a launcher with PMIx",
    "JOB_COMPLETION_INDEX": "an Indexed Job of Kubernetes",
}


def pals(env: Mapping[str, str]) -> Launch | None:
    """Reads the variables of HPE's mpiexec (PALS). It gives the number of ranks for Cray's PMI."""
    size = next((name for name in ("PMI_SIZE", "PALS_SIZE") if name in env), None)
    if "PALS_RANKID" not in env or size is None:
        return None
    return from_variables(env, "PALS", "PALS_RANKID", size, "PALS_LOCAL_RANKID", "PALS_LOCAL_SIZE")


def flux(env: Mapping[str, str]) -> Launch | None:
    """Reads the variables of `flux run`."""
    if "FLUX_TASK_RANK" not in env:
        return None
    return from_variables(env, "Flux", "FLUX_TASK_RANK", "FLUX_JOB_SIZE", "FLUX_TASK_LOCAL_ID")


def mvapich(env: Mapping[str, str]) -> Launch | None:
    """Reads the variables of MVAPICH's mpirun_rsh."""
    if "MV2_COMM_WORLD_RANK" not in env:
        return None
    numbers = ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE")
    return from_variables(
        env, "MVAPICH", *numbers, "MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_SIZE"
    )


def numbered(env: Mapping[str, str]) -> str | None:
    """The variable of a launcher that numbers its processes without giving their count, or None.

    >>> numbered({"JOB_COMPLETION_INDEX": "3"})
    'JOB_COMPLETION_INDEX'
    """
    return next((name for name in NUMBERS if name in env), None)


def by_prrte(env: Mapping[str, str]) -> bool:
    """True if PRRTE's prterun started this process, rather than Slurm's srun with PMIx."""
    return "PMIX_RANK" in env and not env.get("PMIX_NAMESPACE", "slurm.").startswith("slurm.")
