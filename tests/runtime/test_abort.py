"""An error of one rank ends all, and is told once."""

from pathlib import Path

import pytest
from processes import JOBS, PATIENT_S, case, ended, on

pytestmark = pytest.mark.ranks
on_every_job = pytest.mark.parametrize("backend, size", [case(job) for job in JOBS])
on_two_ranks = pytest.mark.parametrize("backend", ["mpi", "gloo"])


@on_every_job
def test_an_error_on_one_rank_ends_all_and_is_shown(backend: str, size: int, tmp_path: Path):
    *others, last = ended(tmp_path, backend, "raise", size=size)
    assert f"fddp: rank {size - 1} of {size} failed:\nTraceback" in last
    assert f"RuntimeError: rank {size - 1} has had enough" in last
    assert "Traceback" not in "".join(others), "the others' errors only follow from it"


@on("gloo")
def test_an_error_on_rank_0_ends_all_and_is_shown(backend: str, tmp_path: Path):
    first, _ = ended(tmp_path, backend, "raise_on_rank_0")
    assert "RuntimeError: rank 0 has had enough" in first


@on_two_ranks
def test_an_error_of_all_ranks_ends_each_and_is_told_in_full_once(backend: str, tmp_path: Path):
    first, last = ended(tmp_path, backend, "differ", grace_s=PATIENT_S)
    assert first.count("Traceback") == 1
    assert last.startswith("fddp: rank 1 of 2 failed as the others did: ValueError: ranks differ")
    for text in (first, last):
        assert "float32[1]" in text
        assert "float32[2]" in text


@on("mpi")
def test_sys_exit_on_one_rank_ends_all(backend: str, tmp_path: Path):
    ended(tmp_path, backend, "exit")


@on("mpi")
def test_a_killed_rank_ends_all(backend: str, tmp_path: Path):
    ended(tmp_path, backend, "killed")


@on("gloo")
def test_a_keyboards_interrupt_of_all_ranks_is_one_line(backend: str, tmp_path: Path):
    assert ended(tmp_path, backend, "interrupted_all", grace_s=PATIENT_S) == (
        "fddp: rank 0 of 2 was interrupted.\n",
        "",
    )


@on("mpi")
def test_a_keyboards_interrupt_of_one_rank_ends_all_without_a_traceback(backend: str, tmp_path: Path):
    outputs = ended(tmp_path, backend, "interrupted")
    assert outputs[1].startswith("fddp: rank 1 of 2 was interrupted.\n")
    assert "Traceback" not in "".join(outputs)
