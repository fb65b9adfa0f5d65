"""Ways into a world of several processes and out of it, with real processes: other launchers, too late, and leaving."""

import signal
from pathlib import Path

import pytest
from processes import Outcome, free_port, launch, launch_with

import fddp

pytestmark = pytest.mark.ranks
LATE = "JAX had started before fddp.init was called"


def gloo(folder: Path, *words: str) -> Outcome:
    return launch("gloo", 2, "doors.py", *words, folder=folder, timeout_s=120)


def torchrun(rank: int, port: int) -> dict[str, str]:
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_RUN_ID": "none"}
    return place | {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2"}


def jax_variables(rank: int, port: int) -> dict[str, str]:
    here = {"JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}", "JAX_NUM_PROCESSES": "2"}
    return here | {"JAX_PROCESS_ID": str(rank)}


def job_of_kubernetes(rank: int, port: int) -> dict[str, str]:
    here = {"FDDP_COORDINATOR": f"127.0.0.1:{port}", "FDDP_SIZE": "2"}
    return here | {"JOB_COMPLETION_INDEX": str(rank)}


def flux(rank: int, port: int) -> dict[str, str]:
    place = {"FDDP_COORDINATOR": f"127.0.0.1:{port}", "FLUX_TASK_LOCAL_ID": str(rank), "PMI_RANK": str(rank)}
    return place | {"FLUX_TASK_RANK": str(rank), "FLUX_JOB_SIZE": "2", "PMI_SIZE": "2"}


@pytest.mark.parametrize("variables", [torchrun, jax_variables, job_of_kubernetes, flux])
def test_ranks_with_a_launchers_variables_meet_over_gloo_and_train(variables, tmp_path: Path):
    port = free_port()
    worlds = [variables(rank, port) for rank in range(2)]
    ended = launch_with(worlds, "doors.py", "step", folder=tmp_path, timeout_s=120)
    assert ended.succeeded
    for rank, text in enumerate(ended.outputs):  # the mean of (0 - 0)² and (2 - 0)²
        assert f"rank {rank} of 2 over gloo: 2.0" in text


def test_ranks_of_a_launcher_without_a_place_to_meet_say_so_on_each_and_end(tmp_path: Path):
    worlds = [{name: value for name, value in flux(rank, 1).items() if name != "FDDP_COORDINATOR"} for rank in range(2)]
    ended = launch_with(worlds, "doors.py", "step", folder=tmp_path, timeout_s=120)
    assert ended.codes == (1, 1)
    for text in ended.outputs:
        assert "Flux does not say where rank 0 is: set FDDP_COORDINATOR=host:port" in text
        assert "backend 'gloo'; fddp.init('mpi')" not in text  # nothing starts with Gloo


@pytest.mark.parametrize("who", ["all", "0", "1"])
def test_init_after_a_computation_is_the_same_error_on_all_ranks_though_one_is_late(who, tmp_path: Path):
    ended = gloo(tmp_path, "late", who)
    assert ended.codes == (1, 1)
    errors = {text.strip().splitlines()[-1].partition(": rank ")[2] for text in ended.outputs}
    assert len(errors) == 1 and LATE in errors.pop()
    for rank, text in enumerate(ended.outputs):
        assert text.startswith(f"fddp: rank {rank} of 2: {LATE}") == (who in ("all", str(rank)))


def test_who_has_left_the_world_is_not_ended_with_a_rank_that_fails_later(tmp_path: Path):
    ended = gloo(tmp_path, "leave")
    assert ended.codes == (0, 1)
    assert ended.outputs[0].splitlines() == ["1 process, 2.0"]
    assert ended.outputs[1].startswith("Traceback") and "ValueError: on its own" in ended.outputs[1]


def test_sigterm_ends_a_process_that_has_left(tmp_path: Path):
    assert gloo(tmp_path, "terminated").codes == (-signal.SIGTERM, -signal.SIGTERM)


def test_the_world_of_mpi_cannot_be_left_and_every_rank_says_why(tmp_path: Path):
    ended = launch("mpi", 2, "doors.py", "leaves_by_mpi", folder=tmp_path, timeout_s=120)
    assert ended.succeeded
    assert all("backend 'mpi' is left when the process ends" in text for text in ended.outputs)


def test_one_process_may_leave_and_join_again():
    fddp.shutdown()  # what another test of this process has joined
    first = fddp.init()
    fddp.shutdown()
    assert fddp.init() is not first
    fddp.shutdown()
    assert fddp.init("gloo").processes == 1
    fddp.shutdown()
