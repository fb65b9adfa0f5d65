"""Hints about environment variables of a process that trains alone.

Processes started together that train separately are the costliest mistake: all do the same work,
and no error is raised. So `fddp.init` prints a line on stderr if variables indicate further
processes without an address to meet at.
"""

from collections.abc import Mapping
from contextlib import suppress

from fddp.runtime.launchers import NUMBERS, TORCH_VARIABLES, launcher_variables, numbered
from fddp.runtime.place import Launch, integer, integer_if_set


def hint(launch: Launch, env: Mapping[str, str]) -> str:
    """Describes a likely mistake in the start of this process in a sentence; empty without one."""
    if launch.launcher == "alone":
        return _missing_srun(env) or _missing_size(env) or _missing_place(env)
    if launch.launcher == "Slurm" and launch.size == 1:
        return _missing_srun(env)
    return ""


def _missing_srun(env: Mapping[str, str]) -> str:
    """Describes a Slurm job of several tasks whose script runs as one process, without srun."""
    # Slurm itself runs the shell of an interactive salloc as a step of one task. srun sets
    # SLURM_NTASKS again.
    if "SLURM_JOB_ID" not in env:
        return ""
    nodes = integer_if_set(env, "SLURM_NNODES") or 1
    tasks_per_node = integer_if_set(env, "SLURM_NTASKS_PER_NODE") or 1
    tasks = integer_if_set(env, "SLURM_NTASKS")
    if tasks is None:
        tasks = nodes * tasks_per_node
    if tasks <= 1:
        return ""
    return f"Slurm gave this job {tasks} tasks, but this is one process: start it with srun."


def _missing_size(env: Mapping[str, str]) -> str:
    """Describes a launcher that numbers its processes without giving their count."""
    name = numbered(env)
    if name is None:
        return ""
    return (
        f"{name}={env[name]} comes from {NUMBERS[name]}, and the number of processes is unknown, "
        "so this process trains alone: set FDDP_SIZE and FDDP_COORDINATOR=host:port of number 0, "
        "or FDDP_RANK=0 FDDP_SIZE=1 if this is intended."
    )


def _missing_place(env: Mapping[str, str]) -> str:
    """Describes variables of torchrun or JAX that are set without an address to meet at."""
    with suppress(ValueError):  # other programs may set RANK and WORLD_SIZE
        if (
            "RANK" in env
            and 0 <= integer(env, "RANK") < (size := integer_if_set(env, "WORLD_SIZE") or 1) > 1
        ):
            missing = [name for name in TORCH_VARIABLES if name not in env]
            return (
                f"RANK={env['RANK']} and WORLD_SIZE={size} are set but not {', '.join(missing)}, "
                "so this process trains alone: start it with torchrun, or set FDDP_RANK, FDDP_SIZE "
                "and FDDP_COORDINATOR=host:port of rank 0."
            )
    with suppress(ValueError):
        if (integer_if_set(env, "JAX_NUM_PROCESSES") or 1) > 1:
            return (
                f"JAX_NUM_PROCESSES={env['JAX_NUM_PROCESSES']} is set but not all of "
                "JAX_PROCESS_ID and JAX_COORDINATOR_ADDRESS=host:port, so this process trains "
                "alone: set them."
            )
    return ""


def origin(launch: Launch, env: Mapping[str, str]) -> str:
    """Says which variables give this process its rank: they may be left over from another job."""
    if launch.launcher == "fddp.init's arguments":
        return ""
    return (
        f"according to {launch.launcher}: {', '.join(launcher_variables(env))}; if they are left "
        "over from another launch, unset them, or call fddp.init('local')"
    )
