"""Hints for a process whose environment speaks of other processes than those that it is going to join.

A process that trains alone though it was started as one of several is the costliest mistake: every one of them does the
same work, and none complains. So each sign of the others that names no place to meet is one line on stderr.
"""

from collections.abc import Iterator, Mapping
from contextlib import suppress

from fddp.runtime.launchers import TORCH_VARIABLES, jax_variables, torch_variables
from fddp.runtime.place import Launch, integer, integer_if_set
from fddp.runtime.placeless import NUMBERS, numbered

TOLD = ("fddp.init's arguments", "FDDP_")  # beginnings: whoever gives these has decided
MEET = "set FDDP_RANK, FDDP_SIZE and FDDP_COORDINATOR=host:port of rank 0"


def hints(launch: Launch, env: Mapping[str, str]) -> tuple[str, ...]:
    """Says what looks wrong about the way in which this process was started.

    Args:
      launch: what `read_launch` found.
      env: environment variables, as `os.environ`.

    Returns:
      Sentences; none where nothing is amiss.

    Example:
      >>> hints(Launch("alone", 0, 1), {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "2"})
      ('Slurm gave this job 2 tasks, but this is one process: start it with srun.',)
    """
    if launch.launcher == "alone":
        alone = (_missing_srun(env), _missing_size(env), _missing_place(env))
        return tuple(filter(None, alone))[:1]
    if launch.launcher == "Slurm" and launch.size == 1 and (missing := _missing_srun(env)):
        return (missing,)
    return tuple(_contradictions(launch, env))[:1]


def _missing_srun(env: Mapping[str, str]) -> str:
    """Slurm gave a job several tasks and its script is one process, as inside sbatch without srun."""
    # Slurm itself runs an interactive salloc's shell as a step of one task. srun says SLURM_NTASKS anew.
    if "SLURM_JOB_ID" not in env:
        return ""
    nodes = integer_if_set(env, "SLURM_NNODES") or 1
    a_node = integer_if_set(env, "SLURM_NTASKS_PER_NODE") or 1
    tasks = integer(env, "SLURM_NTASKS") if "SLURM_NTASKS" in env else nodes * a_node
    return f"Slurm gave this job {tasks} tasks, but this is one process: start it with srun." if tasks > 1 else ""


def _missing_size(env: Mapping[str, str]) -> str:
    """A launcher numbers its processes, and tells none of them how many there are."""
    name = numbered(env)
    if name is None:
        return ""
    return (
        f"{name}={env[name]} comes from {NUMBERS[name]}, and nobody says how many processes there are, so this one "
        "trains alone: set FDDP_SIZE and FDDP_COORDINATOR=host:port of number 0, or FDDP_RANK=0 FDDP_SIZE=1 if it may."
    )


def _missing_place(env: Mapping[str, str]) -> str:
    """Some of torchrun's or JAX's variables are set, and not those that say where to meet."""
    with suppress(ValueError):  # RANK and WORLD_SIZE may be anybody's
        if "RANK" in env and 0 <= integer(env, "RANK") < (size := integer_if_set(env, "WORLD_SIZE") or 1) > 1:
            missing = [name for name in TORCH_VARIABLES if name not in env]
            return (
                f"RANK={env['RANK']} and WORLD_SIZE={size} are set but not {', '.join(missing)}, so this process "
                f"trains alone: start it with torchrun, or {MEET}."
            )
    with suppress(ValueError):
        if (integer_if_set(env, "JAX_NUM_PROCESSES") or 1) > 1:
            return (
                f"JAX_NUM_PROCESSES={env['JAX_NUM_PROCESSES']} is set but not all of JAX_PROCESS_ID and "
                "JAX_COORDINATOR_ADDRESS=host:port, so this process trains alone: set them."
            )
    return ""


def _contradictions(launch: Launch, env: Mapping[str, str]) -> Iterator[str]:
    """Variables that somebody has set tell another place than the launcher does, whose word counts."""
    if launch.launcher.startswith(TOLD):
        return
    for read in (jax_variables, torch_variables):
        with suppress(ValueError):
            other = read(env)
            if other and (other.rank, other.size) != (launch.rank, launch.size):
                yield (
                    f"{launch.launcher} says that this is rank {launch.rank} of {launch.size}, {other.launcher} that "
                    f"it is rank {other.rank} of {other.size}: the former counts; unset the others, or {MEET}."
                )
