"""The GPU of each rank under each installed launcher; the variables of missing ones are set by
hand."""

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import fddp
from bench.jobs import ending
from bench.on_gpu import which_gpu
from bench.on_gpu.machine import Machine, shared

SCRIPT = (sys.executable, str(which_gpu.__file__))
PATIENCE_S = 45
# Without these Open MPI starts nothing as root, and no more ranks than there are cores.
OPEN_MPI = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
}


def measures(machine: Machine) -> dict[str, Callable[[], dict[str, Any]]]:
    """Starts ranks by fddp itself, and by torchrun, mpirun and srun or their variables."""
    size = str(machine.ranks)
    run = (sys.executable, "-m", "fddp", "run", "-n", size, "--by", "processes", SCRIPT[1])
    ways = {
        "fddp.launch": partial(_launched, machine),
        "python -m fddp run": partial(_started, machine, run),
    }
    if torchrun := _installed("torchrun"):
        command = (torchrun, "--nproc-per-node", size, "--no-python", *SCRIPT)
        ways["torchrun"] = partial(_started, machine, command)
    else:
        ways["torchrun's variables"] = partial(_by_hand, machine, _torchrun, _all_gpus)
    if mpirun := _installed("mpirun"):
        ways["mpirun"] = partial(_started, machine, (mpirun, "-n", size, *SCRIPT))
    else:
        ways["Open MPI's variables"] = partial(_by_hand, machine, _open_mpi, _all_gpus)
    if (srun := _installed("srun")) and _slurm_answers():
        gpu_option = ("--gpus-per-task=1",) if machine.gpus > 1 else ()
        command = (srun, "--immediate=10", "-N1", "-n", size, *gpu_option, *SCRIPT)
        ways["srun"] = partial(_started, machine, command)
    ways["srun's variables, one GPU a task"] = partial(_by_hand, machine, _srun, _gpu_of_rank)
    if machine.gpus > 1:
        ways["srun's variables, all GPUs a task"] = partial(_by_hand, machine, _srun, _all_gpus)
    return {name: partial(_judged, machine, way) for name, way in ways.items()}


def tell(figures: dict[str, Any]) -> str:
    """The figures in words."""
    backends = sorted({rank_report["backend"] for rank_report in figures["ranks"]})
    got = ", ".join(
        f"rank {rank_report['rank']} → {' and '.join(rank_report['gpus']) or 'the CPU'}"
        for rank_report in figures["ranks"]
    )
    return f"{got}; over {' and '.join(backends)}"


def _judged(machine: Machine, way: Callable[[], list[dict[str, Any]]]) -> dict[str, Any]:
    ranks = sorted(way(), key=lambda rank_report: rank_report["rank"])
    size = machine.ranks
    gpus = [gpu for rank_report in ranks for gpu in rank_report["gpus"]]
    wrong = ""
    places = [(rank_report["rank"], rank_report["mean"]) for rank_report in ranks]
    if places != [(rank, (size - 1) / 2) for rank in range(size)]:
        words = [rank_report["said"] for rank_report in ranks]
        wrong = " ".join([f"not all of {size} ranks have trained together", *words])
    elif machine.gpus > 1 and len(set(gpus)) != size:
        wrong = "ranks share GPUs though there is one for each"
    elif machine.on_gpu and len(gpus) != size:
        wrong = "a rank has another number of GPUs than one"
    return {"ranks": ranks, **({"wrong": wrong} if wrong else {})}


### Ways to start ranks


def _launched(machine: Machine) -> list[dict[str, Any]]:
    os.environ.update(shared(machine, os.environ))
    return fddp.launch(which_gpu.which, machine.ranks)


def _started(machine: Machine, command: Sequence[str]) -> list[dict[str, Any]]:
    """Starts one command that starts the ranks."""
    # mpirun says nowhere where to meet; the other launchers' words are as good.
    coordinator = {"FDDP_COORDINATOR": _free()} if Path(command[0]).name == "mpirun" else {}
    env = os.environ | shared(machine, os.environ) | OPEN_MPI | coordinator
    return _reports_of([(command, env)])


def _by_hand(
    machine: Machine,
    variables: Callable[[int, int], Mapping[str, str]],
    shown: Callable[[Machine, int], str],
) -> list[dict[str, Any]]:
    """Starts each rank with the variables of a launcher."""
    env = os.environ | shared(machine, os.environ) | {"FDDP_COORDINATOR": _free()}
    commands = []
    for rank in range(machine.ranks):
        gpu = {"CUDA_VISIBLE_DEVICES": shown(machine, rank)} if machine.gpus > 1 else {}
        commands.append((SCRIPT, {**env, **variables(rank, machine.ranks), **gpu}))
    return _reports_of(commands)


def _reports_of(
    commands: Sequence[tuple[Sequence[str], Mapping[str, str]]],
) -> list[dict[str, Any]]:
    """Runs commands side by side, and reads the output of the ranks."""
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    started = [subprocess.Popen(command, env=dict(env), **pipes) for command, env in commands]
    with ending(started) as jobs:
        texts = [job.communicate(timeout=PATIENCE_S)[0] for job in jobs]
    lines = [line.partition(which_gpu.MARK)[2] for text in texts for line in text.splitlines()]
    reports = [json.loads(line) for line in lines if line]
    if not reports or any(job.returncode for job in jobs):
        raise RuntimeError("\n".join(text[-700:] for text in texts))
    return reports


### Variables


def _torchrun(rank: int, size: int) -> Mapping[str, str]:
    place = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": size}
    meeting = {"MASTER_PORT": 29500, "MASTER_ADDR": "127.0.0.1"}
    return {name: str(value) for name, value in (place | meeting).items()}


def _open_mpi(rank: int, size: int) -> Mapping[str, str]:
    place = {"RANK": rank, "SIZE": size, "LOCAL_RANK": rank, "LOCAL_SIZE": size}
    return {f"OMPI_COMM_WORLD_{name}": str(value) for name, value in place.items()}


def _srun(rank: int, size: int) -> Mapping[str, str]:
    place = {"PROCID": rank, "STEP_NUM_TASKS": size, "LOCALID": rank, "NTASKS": size}
    job = {"JOB_ID": 1, "STEP_ID": 0, "STEP_NODELIST": "localhost", "MPI_TYPE": "none"}
    return {f"SLURM_{name}": str(value) for name, value in (place | job).items()}


def _all_gpus(machine: Machine, rank: int) -> str:
    """All GPUs that this process sees."""
    del rank
    return os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(machine.gpus)))


def _gpu_of_rank(machine: Machine, rank: int) -> str:
    """The GPU of one rank alone."""
    return _all_gpus(machine, rank).split(",")[rank]


### Installed launchers


def _installed(program: str) -> str | None:
    """A program on the path, or next to this Python."""
    return shutil.which(program) or shutil.which(program, path=str(Path(sys.executable).parent))


def _slurm_answers() -> bool:
    """True if there is a Slurm behind its commands."""
    try:
        return (
            subprocess.run(["sinfo"], capture_output=True, timeout=5, check=False).returncode == 0
        )
    except (OSError, subprocess.TimeoutExpired):
        return False


def _free() -> str:
    """A place to meet."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"
