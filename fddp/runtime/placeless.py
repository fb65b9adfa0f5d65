"""Launchers that name no place to meet: PALS, Flux and MVAPICH say how many ranks there are, others not even that.

Their ranks meet where `FDDP_COORDINATOR` says. All but Kubernetes start programs of MPI too, which meet by a PMI of the
launcher's; an MPI that does not speak it ends the process, so it is not tried unasked.
"""

from collections.abc import Mapping

from fddp.runtime.place import Launch, from_variables

# Each numbers its processes and tells none of them how many there are.
NUMBERS = {
    "PALS_RANKID": "PALS",
    "PMIX_RANK": "a launcher with PMIx",
    "JOB_COMPLETION_INDEX": "an Indexed Job of Kubernetes",
}


def pals(env: Mapping[str, str]) -> Launch | None:
    """HPE's mpiexec, of PALS, which says the number of ranks for Cray's PMI."""
    size = next((name for name in ("PMI_SIZE", "PALS_SIZE") if name in env), None)
    if "PALS_RANKID" not in env or size is None:
        return None
    return from_variables(env, "PALS", "PALS_RANKID", size, "PALS_LOCAL_RANKID", "PALS_LOCAL_SIZE")


def flux(env: Mapping[str, str]) -> Launch | None:
    """`flux run`, of the Flux framework."""
    if "FLUX_TASK_RANK" not in env:
        return None
    return from_variables(env, "Flux", "FLUX_TASK_RANK", "FLUX_JOB_SIZE", "FLUX_TASK_LOCAL_ID")


def mvapich(env: Mapping[str, str]) -> Launch | None:
    """mpirun_rsh, of MVAPICH."""
    if "MV2_COMM_WORLD_RANK" not in env:
        return None
    numbers = ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE")
    return from_variables(env, "MVAPICH", *numbers, "MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_SIZE")


def numbered(env: Mapping[str, str]) -> str | None:
    """The variable by which a launcher numbers its processes without telling how many there are.

    Args:
      env: environment variables, as `os.environ`.

    Returns:
      Its name, or None.

    Example:
      >>> numbered({"JOB_COMPLETION_INDEX": "3"})
      'JOB_COMPLETION_INDEX'
    """
    return next((name for name in NUMBERS if name in env), None)


def by_prrte(env: Mapping[str, str]) -> bool:
    """Whether PRRTE's prterun started this process, rather than the PMIx of Slurm's srun."""
    return "PMIX_RANK" in env and not env.get("PMIX_NAMESPACE", "slurm.").startswith("slurm.")
