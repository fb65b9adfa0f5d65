"""Ways into a world of several processes and out of it, with real processes: other launchers, too
late, and leaving."""

import signal
import socket
from pathlib import Path

import jax
import pytest
from processes import Outcome, free_port, launch, launch_with

import fddp
from fddp.runtime import name_problem
from fddp.runtime.join_service import on_cpus

ranks = pytest.mark.ranks
slow = pytest.mark.slow
LATE = "JAX had started before fddp.init was called"


### Launchers


def srun(rank: int, port: int) -> dict[str, str]:
    """The variables of `srun --mpi=pmi2`. The job's number decides at which port ranks meet."""
    step = {"STEP_ID": "0", "STEP_NUM_TASKS": "2", "STEP_NODELIST": "127.0.0.1"}
    task = {"JOB_ID": str(port), "PROCID": str(rank), "LOCALID": str(rank), "MPI_TYPE": "pmi2"}
    pmi = {"PMI_RANK": str(rank), "PMI_SIZE": "2", "PMI_JOBID": f"{port}.0"}
    return {f"SLURM_{name}": text for name, text in (step | task).items()} | pmi


def open_mpi(rank: int, port: int) -> dict[str, str]:
    """The variables of an mpiexec of another MPI than mpi4py's."""
    world = {"RANK": str(rank), "LOCAL_RANK": str(rank), "SIZE": "2"}
    variables = {f"OMPI_COMM_WORLD_{name}": text for name, text in world.items()}
    return variables | {"FDDP_COORDINATOR": f"127.0.0.1:{port}"}


def torchrun(rank: int, port: int) -> dict[str, str]:
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_RUN_ID": "none"}
    return place | {
        "RANK": str(rank),
        "WORLD_SIZE": "2",
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": "2",
    }


def jax_variables(rank: int, port: int) -> dict[str, str]:
    variables = {"JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}", "JAX_NUM_PROCESSES": "2"}
    return variables | {"JAX_PROCESS_ID": str(rank)}


def job_of_kubernetes(rank: int, port: int) -> dict[str, str]:
    variables = {"FDDP_COORDINATOR": f"127.0.0.1:{port}", "FDDP_SIZE": "2"}
    return variables | {"JOB_COMPLETION_INDEX": str(rank)}


def flux(rank: int, port: int) -> dict[str, str]:
    place = {
        "FDDP_COORDINATOR": f"127.0.0.1:{port}",
        "FLUX_TASK_LOCAL_ID": str(rank),
        "PMI_RANK": str(rank),
    }
    return place | {"FLUX_TASK_RANK": str(rank), "FLUX_JOB_SIZE": "2", "PMI_SIZE": "2"}


TAKES_MPI = "backend 'gloo'; fddp.init('mpi') takes MPI, if it starts there."


# `test_launchers` claims the launch and the backend of each launcher without a process.
@ranks
@pytest.mark.parametrize(
    ("variables", "line"),
    [
        (srun, f"fddp: srun --mpi=pmi2: {TAKES_MPI}\n"),
        pytest.param(open_mpi, "fddp: Open MPI says 2 ranks, MPI 1: backend 'gloo'.\n", marks=slow),
        pytest.param(torchrun, "", marks=slow),
        pytest.param(jax_variables, "", marks=slow),
        pytest.param(job_of_kubernetes, "", marks=slow),
        pytest.param(flux, f"fddp: Flux: {TAKES_MPI}\n", marks=slow),
    ],
)
def test_ranks_with_a_launchers_variables_meet_over_gloo_and_train(variables, line, tmp_path: Path):
    port = free_port()
    worlds = [variables(rank, port) for rank in range(2)]
    outcome = launch_with(worlds, "doors.py", "join", folder=tmp_path)
    assert outcome.succeeded
    first, second = (f"gloo {rank} of 2, 2 replicas, 0.5\n" for rank in range(2))
    assert outcome.outputs == (first + line, second)


@ranks
@slow
def test_ranks_of_a_launcher_without_a_place_to_meet_say_so_on_each_and_end(tmp_path: Path):
    worlds = [
        {name: value for name, value in flux(rank, 1).items() if name != "FDDP_COORDINATOR"}
        for rank in range(2)
    ]
    outcome = launch_with(worlds, "doors.py", "join", folder=tmp_path)
    assert outcome.codes == (1, 1)
    for text in outcome.outputs:
        assert "no address of rank 0 comes from Flux: set FDDP_COORDINATOR=host:port" in text
        assert "backend 'gloo'; fddp.init('mpi')" not in text  # nothing starts with Gloo


### Hosts


@ranks
def test_ranks_behind_an_http_proxy_meet_without_it(tmp_path: Path):
    proxy = "http://127.0.0.1:9"  # nothing listens at it
    proxies = dict.fromkeys(("http_proxy", "https_proxy", "grpc_proxy", "HTTP_PROXY"), proxy)
    outcome = launch("gloo", 2, "doors.py", "join", folder=tmp_path, **proxies)
    assert outcome.outputs == tuple(f"gloo {rank} of 2, 2 replicas, 0.5\n" for rank in range(2))


@ranks
def test_a_small_dev_shm_is_named_before_mpi_starts(tmp_path: Path):
    outcome = launch("mpi", 2, "doors.py", "small", folder=tmp_path)
    assert outcome.succeeded
    for text in outcome.outputs:
        assert "fddp: /dev/shm has 0.00391 MiB, and MPICH may crash with a bus error" in text


@pytest.mark.parametrize("name", ["nowhere.invalid", "198.51.100.9"])
def test_a_hosts_name_that_leads_elsewhere_is_named_with_its_cure(name: str, monkeypatch):
    monkeypatch.setattr(socket, "gethostname", lambda: name)
    assert f"{name!r} of this host does not lead to an address of this host" in name_problem()
    assert f"a line such as '127.0.1.1 {name}' in /etc/hosts" in name_problem()
    monkeypatch.setattr(socket, "gethostname", lambda: "localhost")
    assert name_problem() == ""


def test_a_jax_distributed_of_ones_own_on_such_a_host_fails_in_the_same_words(monkeypatch):
    def start() -> str:
        raise RuntimeError("Unable to initialize backend 'cpu': external/gloo/gloo/transport")

    monkeypatch.setattr(jax, "default_backend", start)
    with pytest.raises(RuntimeError, match="Unable to initialize"):
        on_cpus()
    monkeypatch.setattr(socket, "gethostname", lambda: "nowhere.invalid")
    with pytest.raises(RuntimeError, match=r"Gloo has not started: the name 'nowhere\.invalid' of"):
        on_cpus()


### Children


@ranks
def test_a_process_that_a_rank_starts_is_no_rank_though_it_inherits_the_variables(tmp_path: Path):
    outcome = launch("gloo", 2, "doors.py", "child", folder=tmp_path)
    assert outcome.succeeded
    refused, alone, trained = outcome.outputs[0].splitlines()
    assert refused.startswith("RuntimeError: fddp.init: rank 0 of 2 has started this process")
    assert "without FDDP_" in refused
    assert (alone, trained) == ("local 0 of 1, 1 replicas, 0.0", "gloo 0 of 2, 2 replicas, 0.5")


### Too late


@ranks
@pytest.mark.parametrize("who", ["1", *(pytest.param(who, marks=slow) for who in ("0", "all"))])
def test_init_after_a_computation_is_the_same_error_on_all_ranks_though_one_is_late(
    who: str, tmp_path: Path
):
    outcome = launch("gloo", 2, "doors.py", "late", who, folder=tmp_path)
    assert outcome.codes == (1, 1)
    errors = {text.strip().splitlines()[-1].partition(": rank ")[2] for text in outcome.outputs}
    assert len(errors) == 1 and LATE in errors.pop()
    for rank, text in enumerate(outcome.outputs):
        assert text.startswith(f"fddp: rank {rank} of 2: {LATE}") == (who in ("all", str(rank)))


@ranks
def test_a_rank_whose_devices_gloo_cannot_connect_ends_the_others_with_its_error(tmp_path: Path):
    outcome = launch("gloo", 2, "doors.py", "gpus", "1", folder=tmp_path)
    assert outcome.codes == (1, 1)
    other, refused = outcome.outputs
    assert "RuntimeError: backend 'gloo' connects CPUs, and JAX uses 'gpu' here" in refused
    assert "rank 1: RuntimeError: backend 'gloo' connects CPUs" in other


### Leaving


@pytest.fixture(scope="module")
def leave_outcome(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """Three ranks, which join by arguments in reverse order, train, and leave."""
    port = free_port()
    folder = tmp_path_factory.mktemp("left")
    return launch("gloo", 3, "doors.py", "leave", port, folder=folder)


@ranks
def test_arguments_of_init_win_over_variables(leave_outcome: Outcome):
    lines = [text.partition("\n")[0] for text in leave_outcome.outputs]
    assert lines == [f"gloo {rank} of 3, 3 replicas, 1.0" for rank in (2, 1, 0)]


@ranks
def test_who_has_left_the_world_is_not_ended_with_a_rank_that_fails_later(leave_outcome: Outcome):
    assert leave_outcome.codes[1:] == (1, 0)
    _, failed, computed = (text.partition("\n")[2] for text in leave_outcome.outputs)
    assert computed == "1 process, 2.0\n"
    assert failed.startswith("Traceback") and "ValueError: on its own" in failed


@ranks
def test_sigterm_ends_a_process_that_has_left(leave_outcome: Outcome):
    assert leave_outcome.codes[0] == -signal.SIGTERM


def test_one_process_may_leave_and_join_again():
    fddp.shutdown()  # the world of another test of this process
    first = fddp.init()
    fddp.shutdown()
    assert fddp.init() is not first
    fddp.shutdown()
    assert fddp.init("gloo").processes == 1
    fddp.shutdown()
