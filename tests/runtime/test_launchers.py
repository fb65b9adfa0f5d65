"""The variables of every launcher are read for their meaning, and for nothing more."""

import importlib.util
import os
import socket
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import fddp
from fddp.runtime import world
from fddp.runtime.hints import hint
from fddp.runtime.join_mpi import agree_on_coordinator
from fddp.runtime.launchers import launcher_variables, pmi_socket, read_launch, worlds
from fddp.runtime.place import Launch
from fddp.runtime.watching.abort import read_grace

EXPLICIT = {"FDDP_RANK": "1", "FDDP_SIZE": "3", "FDDP_COORDINATOR": "node1:4711"}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "2",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
}
HYDRA = {"PMI_RANK": "5", "PMI_SIZE": "8", "MPI_LOCALRANKID": "1"}
JOB = {"SLURM_JOB_ID": "123456", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "16"}
STEP = {"SLURM_STEP_NUM_TASKS": "16", "SLURM_STEP_NODELIST": "node[007-012,040],login"}
SLURM = JOB | STEP | {"SLURM_PROCID": "9", "SLURM_LOCALID": "1"}

# The variables of Slurm 22.05, MPICH 4.0 and 5.0 and Open MPI 4.1 on rank 1 of two nodes, as far as
# they are of interest.
SRUN = {
    "SLURM_JOB_ID": "6",
    "SLURM_NTASKS": "2",
    "SLURM_NNODES": "2",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "0",
    "SLURM_STEP_ID": "2",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_NODELIST": "n[1-2]",
}
SRUN_PMI2 = SRUN | {
    "SLURM_MPI_TYPE": "pmi2",
    "PMI_FD": "11",
    "PMI_JOBID": "6.2",
    "PMI_RANK": "1",
    "PMI_SIZE": "2",
}
SRUN_PMIX = SRUN | {"SLURM_MPI_TYPE": "pmix", "PMIX_RANK": "1", "PMIX_NAMESPACE": "slurm.pmix.6.2"}
# mpiexec inside sbatch -N2 -n2: its proxies are tasks of a step, one a node.
HYDRA_IN_SBATCH = SRUN | {
    "PMI_FD": "5",
    "PMI_HOSTNAME": "n2",
    "PMI_RANK": "3",
    "PMI_SIZE": "4",
    "MPI_LOCALRANKID": "1",
    "MPI_LOCALNRANKS": "2",
}
# The same where the job's script has said SLURM_MPI_TYPE=pmi2, for Slurm the default of srun --mpi.
HYDRA_IN_SBATCH_PMI2 = HYDRA_IN_SBATCH | {"SLURM_MPI_TYPE": "pmi2", "PMI_JOBID": "6.2"}
OPEN_MPI_IN_SBATCH = SRUN | {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "PMIX_RANK": "1",
}
MET = f"n1:{(2531 * 6 + 2) % 4096 + 61440}"
# As Slurm's plugin for Cray sets them too, on Perlmutter say.
SRUN_CRAY = SRUN | {
    "SLURM_MPI_TYPE": "cray_shasta",
    "PALS_RANKID": "1",
    "PALS_LOCAL_RANKID": "0",
    "PMI_RANK": "1",
    "PMI_SIZE": "2",
    "PMI_LOCAL_RANK": "0",
}
TORCH = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "node1", "MASTER_PORT": "29500"}
# The variables of torchrun of PyTorch 2.13, as far as they are of interest.
TORCHRUN = TORCH | {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "none"}
TORCH_MET = f"node1:{61440 + 29501 % 4096}"
JAX = {"JAX_COORDINATOR_ADDRESS": "node1:4711", "JAX_NUM_PROCESSES": "4", "JAX_PROCESS_ID": "3"}
PALS = {
    "PALS_RANKID": "3",
    "PALS_LOCAL_RANKID": "1",
    "PMI_RANK": "3",
    "PMI_SIZE": "4",
    "PMI_LOCAL_RANK": "1",
}
FLUX = {
    "FLUX_TASK_RANK": "3",
    "FLUX_JOB_SIZE": "4",
    "FLUX_TASK_LOCAL_ID": "1",
    "PMI_RANK": "3",
    "PMI_SIZE": "4",
}
MVAPICH = {
    "MV2_COMM_WORLD_RANK": "3",
    "MV2_COMM_WORLD_SIZE": "4",
    "MV2_COMM_WORLD_LOCAL_RANK": "1",
    "PMI_ID": "3",
}
# The variables of prterun of PRRTE 3; Open MPI's mpirun, which contains it, adds its own.
PRRTE = {"PMIX_RANK": "1", "PMIX_NAMESPACE": "prterun-n1-5003@1", "PRTE_LAUNCHED": "1"}
INDEXED = {"JOB_COMPLETION_INDEX": "2"}
PLACE = {"FDDP_SIZE": "3", "FDDP_COORDINATOR": "train-0.train:4711"}


@pytest.mark.parametrize(
    ("env", "launch"),
    [
        ({}, Launch("alone", 0, 1)),
        ({"PATH": "/bin", "SLURM_NTASKS": "2"}, Launch("alone", 0, 1)),
        (EXPLICIT, Launch("FDDP_* variables", 1, 3, None, "node1:4711")),
        ({"FDDP_RANK": "0", "FDDP_SIZE": "1"}, Launch("FDDP_* variables", 0, 1)),
        (EXPLICIT | {"FDDP_LOCAL_RANK": "2"}, Launch("FDDP_* variables", 1, 3, 2, "node1:4711")),
        (OPEN_MPI, Launch("Open MPI", 2, 4, 0)),
        (HYDRA, Launch("Hydra", 5, 8, 1)),
        (HYDRA | {"PMI_FD": "7"}, Launch("Hydra", 5, 8, 1, pmi_fd=7)),
        ({"PMI_RANK": "0", "PMI_SIZE": "2"}, Launch("Hydra", 0, 2)),
        (
            SLURM,
            Launch("Slurm", 9, 16, 1, f"node007:{2531 * 123456 % 4096 + 61440}", job="123456.0"),
        ),
        (SRUN, Launch("Slurm", 1, 2, 0, MET, job="6.2")),
        (SRUN | {"SLURM_MPI_TYPE": "none"}, Launch("Slurm", 1, 2, 0, MET, job="6.2")),
        (SRUN_PMI2, Launch("Slurm", 1, 2, 0, MET, "pmi2", job="6.2")),
        (SRUN_PMIX, Launch("Slurm", 1, 2, 0, MET, "pmix", job="6.2")),
        (HYDRA_IN_SBATCH, Launch("Hydra", 3, 4, 1, local_size=2, pmi_fd=5)),
        (HYDRA_IN_SBATCH_PMI2, Launch("Hydra", 3, 4, 1, local_size=2, pmi_fd=5)),
        (OPEN_MPI_IN_SBATCH, Launch("Open MPI", 1, 2, 0)),
        (SRUN_CRAY, Launch("Slurm", 1, 2, 0, MET, "cray_shasta", job="6.2")),
        (TORCHRUN, Launch("torchrun", 1, 2, 1, TORCH_MET, local_size=2, job="none")),
        (TORCH, Launch("torchrun's variables", 1, 2, None, TORCH_MET)),
        (JAX, Launch("JAX_* variables", 3, 4, None, "node1:4711")),
        (PALS, Launch("PALS", 3, 4, 1)),
        (FLUX, Launch("Flux", 3, 4, 1)),
        (FLUX | {"MPI_LOCALRANKID": "0"}, Launch("Hydra", 3, 4, 0)),
        (MVAPICH, Launch("MVAPICH", 3, 4, 1)),
        (PRRTE | PLACE, Launch("FDDP_SIZE and PMIX_RANK", 1, 3, None, "train-0.train:4711")),
        (
            INDEXED | PLACE,
            Launch("FDDP_SIZE and JOB_COMPLETION_INDEX", 2, 3, None, "train-0.train:4711"),
        ),
    ],
    ids=str,
)
def test_a_launcher_is_read_for_what_it_says(env, launch):
    assert read_launch(env) == launch


def test_of_mpiexecs_socket_only_the_number_may_be_left(tmp_path: Path):
    """A program in between may have closed it: no process writes to the file that has its number by
    then."""
    socket_of = lambda number: pmi_socket(Launch("Hydra", 0, 2, pmi_fd=number))  # noqa: E731
    rank_end, mpiexecs = socket.socketpair()
    with rank_end, mpiexecs:
        closed = rank_end.fileno()
        assert socket_of(closed) == closed
    with (tmp_path / "log").open("w") as file:
        assert socket_of(file.fileno()) is None
    assert socket_of(closed) is None
    assert socket_of(None) is None


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("node[007-012,040],login", "node007"),
        ("node[3,5]", "node3"),
        ("login,node[1-2]", "login"),
        ("gpu-a.site.org", "gpu-a.site.org"),
        ("rack2-n[08-09]", "rack2-n08"),
    ],
)
def test_rank_0_of_slurm_is_met_on_the_first_node_of_the_step(nodes, first):
    coordinator = read_launch(SLURM | {"SLURM_STEP_NODELIST": nodes}).coordinator
    assert coordinator is not None and coordinator.rsplit(":", 1)[0] == first


def test_steps_that_run_at_the_same_time_meet_at_ports_of_their_own():
    """The ports of 16 jobs in succession, each of up to 100 steps."""
    steps = [
        {"SLURM_JOB_ID": str(4711 + job), "SLURM_STEP_ID": str(step)}
        for job in range(16)
        for step in range(100)
    ]
    assert len({read_launch(SLURM | step).coordinator for step in steps}) == len(steps)


def test_all_ranks_of_a_slurm_step_agree_on_a_port_that_differs_between_jobs():
    ranks = {read_launch(SLURM | {"SLURM_PROCID": str(rank)}).coordinator for rank in range(16)}
    assert len(ranks) == 1
    assert read_launch(SLURM | {"SLURM_JOB_ID": "123457"}).coordinator not in ranks
    (coordinator,) = ranks
    assert coordinator is not None and 1024 < int(coordinator.rsplit(":", 1)[1]) < 2**16


# The variables of Slurm 22.05 for a script of sbatch, and for the shell of salloc, not a task.
SBATCH_N2 = {
    "SLURM_JOB_ID": "6",
    "SLURM_PROCID": "0",
    "SLURM_NNODES": "2",
    "SLURM_TASKS_PER_NODE": "1(x2)",
}
SALLOC = {"SLURM_JOB_ID": "8", "SLURM_NNODES": "2", "SLURM_NTASKS": "2"}
# A site may have salloc open its shell as a step of its own.
SALLOC_STEP = SRUN | {
    "SLURM_STEP_ID": "4294967290",
    "SLURM_STEP_NUM_TASKS": "1",
    "SLURM_PROCID": "0",
}


def test_a_script_under_sbatch_without_srun_is_alone():
    assert read_launch(JOB) == Launch("alone", 0, 1)


@pytest.mark.parametrize(
    ("env", "tasks"),
    [
        (JOB, 16),
        (SBATCH_N2, 2),
        (SBATCH_N2 | {"SLURM_NTASKS_PER_NODE": "4"}, 8),
        (SALLOC, 2),
        (SALLOC_STEP, 2),
        (SALLOC | {"SLURM_NTASKS": "1", "SLURM_NNODES": "1"}, None),  # sbatch -n 1
        (SBATCH_N2 | {"SLURM_NNODES": "1"}, None),  # sbatch -N 1 -c 2
        (
            SRUN | {"SLURM_NTASKS": "1", "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"},
            None,
        ),  # srun -n 1
        (SRUN, None),
        (HYDRA_IN_SBATCH, None),
        (OPEN_MPI_IN_SBATCH, None),
        (SBATCH_N2 | {"FDDP_RANK": "0", "FDDP_SIZE": "1"}, None),
        ({"SLURM_NTASKS": "2"}, None),  # no job: the user's own setting
    ],
    ids=str,
)
def test_a_process_alone_in_a_job_of_several_tasks_is_told_of_srun(env, tasks):
    words = f"Slurm gave this job {tasks} tasks, but this is one process: start it with srun."
    assert hint(read_launch(env), env) == ("" if tasks is None else words)


def test_the_users_own_variables_win_then_the_innermost_launcher():
    everything = SLURM | HYDRA | OPEN_MPI | EXPLICIT
    assert read_launch(everything).launcher == "FDDP_* variables"
    assert read_launch(SLURM | HYDRA | OPEN_MPI).launcher == "Open MPI"
    # mpiexec inside a Slurm allocation starts its processes through srun.
    assert read_launch(SLURM | HYDRA).launcher == "Hydra"


def test_torchrun_wins_over_what_started_it_and_its_variables_over_nothing():
    """Inside of srun or mpirun torchrun is the inner launcher; a RANK alone, without the others,
    may come from any program."""
    for outer in (SRUN, HYDRA, OPEN_MPI, FLUX, PALS, JAX):
        assert read_launch(TORCHRUN | outer).launcher == "torchrun"
        assert read_launch(TORCH | outer) == read_launch(outer)


@pytest.mark.parametrize(
    "env",
    [
        {"RANK": "3"},
        {"RANK": "first class", "WORLD_SIZE": "2"},
        {"RANK": "0", "WORLD_SIZE": "1"},
        {"WORLD_SIZE": "2"},
        {"LOCAL_RANK": "1", "MASTER_ADDR": "node1"},
        {"JAX_COORDINATOR_ADDRESS": "node1:4711"},
    ],
    ids=str,
)
def test_a_rank_that_stands_alone_is_nobodys_and_nothing_is_said(env):
    assert read_launch(env) == Launch("alone", 0, 1)
    assert hint(read_launch(env), env) == ""


@pytest.mark.parametrize("port", [1, 4711, 29500, 61439, 61440, 65535])
def test_ranks_of_torchrun_meet_beside_its_own_store(port):
    ranks = {
        read_launch(TORCHRUN | {"RANK": rank, "MASTER_PORT": str(port)}).coordinator
        for rank in "01"
    }
    (address,) = ranks
    assert address is not None and address.startswith("node1:")
    assert (
        int(address.rsplit(":", 1)[1]) != port and 61440 <= int(address.rsplit(":", 1)[1]) < 2**16
    )


@pytest.mark.parametrize(
    ("env", "names"),
    [
        (PRRTE, ["PMIX_RANK=1", "FDDP_SIZE"]),
        (INDEXED, ["JOB_COMPLETION_INDEX=2", "FDDP_SIZE", "FDDP_COORDINATOR"]),
        ({"PALS_RANKID": "1"}, ["PALS_RANKID=1", "FDDP_SIZE"]),
        (
            {"RANK": "1", "WORLD_SIZE": "2"},
            ["RANK=1", "WORLD_SIZE=2", "MASTER_ADDR, MASTER_PORT", "torchrun"],
        ),
        (TORCH | {"MASTER_PORT": None}, ["not MASTER_PORT"]),
        (
            {"JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "1"},
            ["JAX_NUM_PROCESSES=2", "JAX_COORDINATOR_ADDRESS"],
        ),
    ],
    ids=str,
)
def test_a_process_that_has_siblings_and_no_place_to_meet_says_so_in_one_line(env, names):
    env = {name: value for name, value in env.items() if value is not None}
    launch = read_launch(env)
    assert launch == Launch("alone", 0, 1)
    line = hint(launch, env)
    assert "trains alone" in line and "\n" not in line
    assert [name for name in names if name not in line] == []


def test_empty_variables_are_unset():
    assert read_launch(dict.fromkeys(TORCHRUN | EXPLICIT | JAX | HYDRA, "")) == Launch(
        "alone", 0, 1
    )
    assert read_launch(TORCH | {"FDDP_RANK": "", "FDDP_COORDINATOR": ""}) == read_launch(TORCH)


def test_doctor_is_told_the_variables_of_all_launchers_and_no_others():
    variables = TORCHRUN | JAX | PALS | FLUX | OPEN_MPI | EXPLICIT | INDEXED | {"PMIX_RANK": "1"}
    shown = launcher_variables(
        variables | {"HOME": "/", "XRANK": "1", "RANKS": "2", "SLURM_JOB_ID": "7"}
    )
    assert shown.items() <= variables.items() and not {"HOME", "XRANK", "RANKS"} & set(shown)
    assert {
        "RANK",
        "MASTER_PORT",
        "JAX_PROCESS_ID",
        "PALS_RANKID",
        "FLUX_JOB_SIZE",
        "PMIX_RANK",
    } <= set(shown)


def test_a_coordinator_can_be_told_to_the_ranks_of_any_launcher():
    assert read_launch(OPEN_MPI | {"FDDP_COORDINATOR": "a:1"}) == replace(
        read_launch(OPEN_MPI), coordinator="a:1"
    )


def test_only_an_mpiexec_promises_that_mpi_can_be_initialized():
    assert [read_launch(env).by_mpi for env in (OPEN_MPI, HYDRA, SLURM, EXPLICIT, {})] == [
        True,
        True,
    ] + [False] * 3
    assert [read_launch(env).by_mpi for env in (PALS, FLUX, MVAPICH, TORCHRUN, JAX)] == [False] * 5


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ({"FDDP_RANK": "0"}, "FDDP_RANK given but not FDDP_SIZE"),
        ({"FDDP_SIZE": "2"}, "FDDP_SIZE given but not FDDP_RANK"),
        ({"FDDP_COORDINATOR": "a:1"}, "FDDP_COORDINATOR given but not FDDP_RANK, FDDP_SIZE"),
        (EXPLICIT | {"FDDP_RANK": "one"}, "FDDP_RANK must be a whole number, got 'one'"),
        (EXPLICIT | {"FDDP_RANK": ""}, "FDDP_SIZE given but not FDDP_RANK"),
        (EXPLICIT | {"FDDP_RANK": "3"}, "rank 3 of 3, according to FDDP_[*] variables"),
        (EXPLICIT | {"FDDP_RANK": "-1"}, "rank -1 of 3"),
        (EXPLICIT | {"FDDP_SIZE": "0"}, "rank 1 of 0"),
        (
            EXPLICIT | {"FDDP_COORDINATOR": "node1"},
            "'node1', according to .*; it must be host:port",
        ),
        (
            EXPLICIT | {"FDDP_COORDINATOR": "node1:http"},
            "'node1:http', according to .*; it must be host:port",
        ),
        ({"OMPI_COMM_WORLD_RANK": "0"}, "OMPI_COMM_WORLD_SIZE is not set"),
        (OPEN_MPI | {"OMPI_COMM_WORLD_SIZE": "2"}, "rank 2 of 2, according to Open MPI"),
        ({"PMI_RANK": "0"}, "PMI_SIZE is not set"),
        (HYDRA | {"PMI_SIZE": "8.0"}, "PMI_SIZE must be a whole number, got '8.0'"),
        ({k: v for k, v in SLURM.items() if k != "SLURM_JOB_ID"}, "SLURM_JOB_ID is not set"),
        (
            {k: v for k, v in SLURM.items() if k != "SLURM_STEP_NODELIST"},
            "SLURM_STEP_NODELIST is not set",
        ),
        ({"FLUX_TASK_RANK": "0"}, "FLUX_JOB_SIZE is not set"),
        (TORCHRUN | {"RANK": "2"}, "rank 2 of 2, according to torchrun"),
        (TORCH | {"MASTER_PORT": "http"}, "MASTER_PORT must be a whole number, got 'http'"),
        (
            JAX | {"JAX_COORDINATOR_ADDRESS": "node1"},
            "'node1', according to .*; it must be host:port",
        ),
        (
            SLURM | {"SLURM_STEP_NODELIST": ","},
            "SLURM_STEP_NODELIST must be a list of hosts, got ','",
        ),
    ],
    ids=lambda case: case if isinstance(case, str) else "",
)
def test_variables_that_are_missing_or_contradict_each_other_are_named(env, message):
    with pytest.raises(ValueError, match=message):
        read_launch(env)


### Backends of `fddp.init`


def started(env: Mapping[str, str], *, mpi_ranks: int = 1, **arguments: Any) -> tuple[str, Launch]:
    """The backend and launch of `fddp.init` on CPUs, with mpi4jax installed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "environ", dict(env))
        patch.setattr(importlib.util, "find_spec", lambda name: name)
        patch.setattr(world, "_started", [])
        patch.setattr(world, "remark", lambda *_: "")  # on the installed jaxlib
        patch.setattr(world, "_has_gpus", lambda: False)
        mpi = SimpleNamespace(COMM_WORLD=SimpleNamespace(size=mpi_ranks))
        patch.setattr(world, "import_module", lambda name: mpi)
        patch.setattr(world, "_start", lambda backend, launch, *_: (backend, launch))
        start: Any = fddp.init(**arguments)
    return start


@pytest.mark.parametrize(
    ("env", "backend"),
    [
        ({}, "local"),
        (EXPLICIT, "gloo"),
        (OPEN_MPI, "mpi"),
        (HYDRA, "mpi"),
        (HYDRA_IN_SBATCH, "mpi"),
        (SLURM, "gloo"),
        (SRUN_PMI2, "gloo"),
        (SRUN_PMIX, "gloo"),
        (SRUN_CRAY, "gloo"),
        (TORCHRUN, "gloo"),
        (JAX, "gloo"),
        (FLUX, "gloo"),
        (FLUX | {"FDDP_COORDINATOR": "node1:4711"}, "gloo"),
        (INDEXED | PLACE, "gloo"),
    ],
    ids=str,
)
def test_only_ranks_of_an_mpiexec_take_mpi_by_themselves(env, backend):
    assert started(env) == (backend, read_launch(env))
    assert started(env, backend="mpi") == ("mpi", read_launch(env))


def test_arguments_of_init_win_over_variables():
    arguments = {"rank": 0, "size": 2, "coordinator": "node2:4712"}
    launch = Launch("fddp.init's arguments", 0, 2, coordinator="node2:4712")
    for env in (EXPLICIT, SLURM, JAX):
        assert started(env, **arguments) == ("gloo", launch)
    _, launch = started(EXPLICIT, coordinator="node2:4712")
    assert launch == replace(read_launch(EXPLICIT), coordinator="node2:4712")


def test_rank_0_alone_says_that_srun_might_start_mpi(capsys):
    for env, name in ((SRUN_PMI2, "pmi2"), (SRUN_PMIX, "pmix"), (SRUN_CRAY, "cray_shasta")):
        started(env)
        assert capsys.readouterr().err == ""
        started(env | {"SLURM_PROCID": "0", "PMI_RANK": "0", "PMIX_RANK": "0", "PALS_RANKID": "0"})
        line = "backend 'gloo'; fddp.init('mpi') takes MPI, if it starts there."
        assert capsys.readouterr().err == f"fddp: srun --mpi={name}: {line}\n"


def test_ranks_of_another_mpi_take_gloo_if_they_know_where_to_meet(capsys):
    meet = {"FDDP_COORDINATOR": "node1:4711"}
    first = OPEN_MPI | meet | {"OMPI_COMM_WORLD_RANK": "0"}
    assert started(first, mpi_ranks=1)[0] == "gloo"
    assert capsys.readouterr().err == "fddp: Open MPI says 4 ranks, MPI 1: backend 'gloo'.\n"
    assert started(OPEN_MPI | meet, mpi_ranks=1)[0] == "gloo"
    assert started(first, mpi_ranks=4)[0] == "mpi"
    assert capsys.readouterr().err == ""


def test_init_of_a_process_alone_in_a_job_of_several_tasks_speaks_of_srun(capsys):
    assert started(SALLOC) == ("local", Launch("alone", 0, 1))
    line = "fddp: Slurm gave this job 2 tasks, but this is one process: start it with srun.\n"
    assert capsys.readouterr().err == line


@pytest.mark.parametrize(
    ("env", "cure"),
    [
        (FLUX, "take fddp.init('mpi'), if MPI starts there"),
        (TORCHRUN, "start the ranks with mpiexec"),
    ],
    ids=["Flux", "torchrun"],
)
def test_a_launcher_that_names_no_place_to_meet_is_an_error_with_its_cures(env, cure, capsys):
    _, launch = started(env)
    assert capsys.readouterr().err == ""  # nothing starts with Gloo
    with pytest.raises(ValueError) as error:
        agree_on_coordinator(replace(launch, coordinator=None))
    assert str(error.value) == (
        f"no address of rank 0 comes from {launch.launcher}: set FDDP_COORDINATOR=host:port, "
        f"equal on all ranks, give fddp.init(coordinator='host:port'), or {cure}."
    )


def test_the_grace_of_a_rank_that_fails_is_five_seconds_or_as_the_environment_says():
    assert [read_grace(env) for env in ({}, {"FDDP_GRACE_S": "0.5"}, {"FDDP_GRACE_S": "0"})] == [
        5,
        0.5,
        0,
    ]
    for text in ("", "soon", "-1", "nan", "inf"):
        with pytest.raises(
            ValueError, match=f"FDDP_GRACE_S must be a number of seconds of 0 or more, got '{text}'"
        ):
            read_grace({"FDDP_GRACE_S": text})


def test_the_ranks_of_a_launch_share_a_secret_that_no_other_launch_has(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.delenv("FDDP_SECRET", raising=False)
    (first,), (second,) = ({variables["FDDP_SECRET"] for variables in worlds(3)} for _ in range(2))
    assert first != second and len(first) == 32
    monkeypatch.setenv("FDDP_SECRET", "swordfish")
    assert {variables["FDDP_SECRET"] for variables in worlds(2)} == {"swordfish"}
