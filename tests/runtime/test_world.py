"""Ways into a world of several processes and out of it, with real processes: other launchers, too
late, and leaving."""

import signal
from pathlib import Path

import pytest
from processes import Outcome, free_port, launch, launch_with

import fddp

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


TAKES_MPI = "backend 'gloo'; fddp.init('mpi') takes MPI, if it starts there."


# `test_launchers` claims the launch and the backend of each launcher without a process.
@ranks
def test_ranks_with_a_launchers_variables_meet_over_gloo_and_train(tmp_path: Path):
    port = free_port()
    worlds = [srun(rank, port) for rank in range(2)]
    outcome = launch_with(worlds, "doors.py", "join", folder=tmp_path)
    assert outcome.succeeded
    first, second = (f"gloo {rank} of 2, 2 replicas, 0.5\n" for rank in range(2))
    assert outcome.outputs == (first + f"fddp: srun --mpi=pmi2: {TAKES_MPI}\n", second)


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
